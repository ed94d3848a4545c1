"""FlexFL's published numbers that need no training: sizes, traffic, widths, and who ends up
training what."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from nestling import FleetConfig, Named, Tier
from nestling.methods.submodel.apoz import WidthScale, units_of
from nestling.methods.submodel.flexfl import FlexFL
from nestling.methods.submodel.pool import params
from nestling.models import build
from nestling.runs.assemble import assemble
from nestling.views import Reference
from nestling.world import Piece
from tests.small import small

SHAPE = (3, 32, 32)
APOZ = (
    0.506,
    0.513,
    0.650,
    0.618,
    0.635,
    0.595,
    0.565,
    0.607,
    0.604,
    0.588,
    0.589,
    0.810,
    0.964,
    0.994,
    0.805,
)
"""The released shares of zeros of VGG16 on CIFAR-10."""

QUARTER = (
    1,
    1,
    0.968,
    0.962,
    0.895,
    0.905,
    0.946,
    0.845,
    0.806,
    0.829,
    0.828,
    0.492,
    0.259,
    0.224,
    0.336,
)
"""The widths that the released search gives the model of nominally 25 %."""

NETWORKS = {
    "vgg16": ({}, 15),
    "resnet34": ({"channels": (64, 96, 128, 256, 512)}, 5),
    "mobilenetv2": ({"expand_first": True}, 9),
}


def reference(name: str) -> Reference:
    return Reference(
        "main", build(name, shape=SHAPE, classes=10, norm="batch", **NETWORKS[name][0]), SHAPE
    )


@pytest.fixture(scope="module")
def vgg() -> WidthScale:
    main = reference("vgg16")
    return WidthScale(main, units_of(main.axes), APOZ)


def test_all_large_to_seventy_percent_is_28_rounds_of_ten_vgg16(vgg: WidthScale) -> None:
    full = vgg.reference.full
    assert full.numel() == 33_646_666
    assert 28 * 10 * full.nbytes() / 1e6 == pytest.approx(37_684, abs=0.5)


@pytest.mark.parametrize("name", NETWORKS)
def test_units_are_the_published_ones(name: str) -> None:
    assert len(set(units_of(reference(name).axes))) == NETWORKS[name][1]


@pytest.mark.parametrize(
    ("nominal", "real"), [(0.25, 0.294), (0.4, 0.447), (0.5, 0.538), (0.9, 0.925), (1.0, 1.0)]
)
def test_the_released_search_ends_above_the_nominal_sizes(
    vgg: WidthScale, nominal: float, real: float
) -> None:
    full = params(Piece(vgg.reference, vgg.reference.full))
    assert params(Piece(vgg.reference, vgg.first(nominal))) / full == pytest.approx(real, abs=6e-4)


def test_the_released_search_gives_the_published_widths(vgg: WidthScale) -> None:
    sizes = vgg.reference.axes.sizes
    found = vgg.first(0.25)
    scale = 100 / 58
    assert found.key() == vgg.view(scale).key()
    assert vgg.ratios(scale) == pytest.approx(QUARTER, abs=1.1e-3)
    assert [len(found.indices(k)) for k in range(15)] == [
        int(r * k) for r, k in zip(vgg.ratios(scale), sizes, strict=True)
    ]


@pytest.mark.parametrize("nominal", [0.25, 0.4, 0.5, 0.9])
def test_the_paper_s_models_are_the_largest_within_their_size(
    vgg: WidthScale, nominal: float
) -> None:
    full = params(Piece(vgg.reference, vgg.reference.full))
    limit = nominal * full
    found = params(
        Piece(vgg.reference, vgg.largest(lambda view: params(Piece(vgg.reference, view)) <= limit))
    )
    assert 0.995 * limit < found <= limit


def test_the_pool_of_vgg16_is_nested(vgg: WidthScale) -> None:
    for first in (
        vgg.first,
        lambda q: vgg.largest(lambda view: params(Piece(vgg.reference, view)) <= q * 33_646_666),
    ):
        pool = [first(q) for q in (0.25, 0.4, 0.5, 0.9, 1.0)]
        assert all(
            large.contains(little) and large.key() != little.key()
            for little, large in pairwise(pool)
        )


PAPER_FLEET = FleetConfig(
    size=100,
    tiers=tuple(
        Tier(name=name, ratio=1.0, share=share, memory_mean=mean, memory_std=(5.0, 8.0, 10.0))
        for name, share, mean in (
            ("weak", 0.4, 35.0),
            ("medium", 0.3, 60.0),
            ("strong", 0.3, 110.0),
        )
    ),
)


def test_what_devices_of_uncertain_memory_train_and_send_back() -> None:
    """Table X's upload/dispatch of 0.98, and the share of each model among what is trained. Which
    deviation a device has is drawn once a fleet, so several fleets are looked at."""
    sent: Counter[int] = Counter()
    trained: Counter[int] = Counter()
    for seed in range(6):
        experiment = small(
            FlexFL(levels=(0.25, 0.5, 1.0), ratios="uniform"),
            fleet=PAPER_FLEET,
            participants=10,
            model=Named("tinycnn", {"channels": [20, 40, 80], "norm": "batch"}),
            seed=seed,
        )
        _, federation = assemble(experiment)
        pool, world = federation.method.pool, federation.world
        size = [rung.size for rung in pool.rungs]
        assert size == pytest.approx([0.25, 0.4, 0.5, 0.9, 1.0])
        for round in range(1, 301):
            for client, number in pool.slots(round, 10).items():
                device = world.device(client, round)
                assert number <= pool.most(device.tier)
                sent[number] += 1
                trained[min(number, pool.held(device.tier, device, round))] += 1
    dispatched, uploaded = (
        sum(size[k] * many for k, many in count.items()) for count in (sent, trained)
    )
    assert uploaded / dispatched == pytest.approx(0.98, abs=0.01)
    shares = [trained[k] / sum(trained.values()) for k in range(5)]
    assert shares == pytest.approx([0.337, 0.027, 0.311, 0.059, 0.266], abs=0.015)

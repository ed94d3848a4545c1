"""Views from shallow to deep: which networks can be cut, and that what is cut is a network that
works."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from nestling.errors import InputError
from nestling.models import MODELS, build
from nestling.seeds import torch_seeded
from nestling.views import Reference, from_spec, to_spec
from nestling.views.depth import columns, depth_views, kept, residual_stages
from tests.views import networks

SHAPE = (1, 28, 28)


def reference(name: str, **options: object) -> Reference:
    with torch_seeded(0, "test"):
        return Reference("main", build(name, shape=SHAPE, classes=10, **options), SHAPE)


def family(found: Reference) -> list[list[int]]:
    return [[kept(view, column) for column in columns(found)] for view in depth_views(found)]


@pytest.fixture
def x() -> Tensor:
    return torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["tinyexits", "exitcnn"])
def test_depths_of_a_network_with_exits_are_its_prefixes(name: str, x: Tensor) -> None:
    found = reference(name)
    whole = found.module.eval().all_exits(x)
    views = depth_views(found)
    assert family(found) == [[1], [2], [3], [4]] and views[-1].names == found.full.names
    for depth, view in enumerate(views, 1):
        part = found.network(view, view.extract(found.initial)).eval()
        assert [torch.equal(a, b) for a, b in zip(part.all_exits(x), whole, strict=False)] == [
            True
        ] * depth
        assert len(part.stages) == len(part.heads) == depth and torch.equal(
            part(x), whole[depth - 1]
        )


def test_a_view_may_have_only_its_last_exit(x: Tensor) -> None:
    found = reference("tinyexits")
    whole = found.module.eval().all_exits(x)
    for depth, view in enumerate(depth_views(found, exits="last"), 1):
        part = found.network(view, view.extract(found.initial)).eval()
        assert {name.split(".")[1] for name in view.names if name.startswith("heads")} == {
            str(depth - 1)
        }
        (only,) = part.all_exits(x)
        assert torch.equal(only, whole[depth - 1]) and torch.equal(part(x), only)


@pytest.mark.parametrize("inference", ["last", "mean"])
def test_inference_is_the_last_exit_or_the_mean_of_all(inference: str, x: Tensor) -> None:
    network = reference("tinyexits").module.answering(inference)
    exits = network.eval().all_exits(x)
    assert torch.allclose(
        network(x), exits[-1] if inference == "last" else sum(exits) / 4, atol=1e-6
    )
    assert torch.equal(network.train()(x), network.all_exits(x)[-1])
    assert network.prefix(2).inference == inference


def test_a_block_that_is_left_out_is_one_whose_weights_are_zero(x: Tensor) -> None:
    """The cut network computes what the whole one does with the other blocks silenced."""
    found = reference("tinyresnet")
    for view in depth_views(found):
        state = {
            name: t if name in view.shapes else torch.zeros_like(t)
            for name, t in found.initial.items()
        }
        silenced = found.network(found.full, state).eval()(x)
        part = found.network(view, view.extract(found.initial)).eval()(x)
        assert torch.allclose(part, silenced, atol=1e-6)


def test_the_usual_family_deepens_the_later_half_first() -> None:
    assert family(reference("tinyresnet")) == [[1, 1], [1, 2], [2, 2], [2, 3], [3, 3]]
    uneven = reference("tinyresnet", blocks=(1, 3, 2), channels=(4, 4, 4, 4))
    assert family(uneven) == [[1, 1, 1], [1, 2, 2], [1, 3, 2]]
    assert family(reference("resnet18", width=0.0625)) == [[1] * 4, [1, 1, 2, 2], [2] * 4]
    assert family(reference("tinyresnet", blocks=(5,), channels=(4, 4))) == [
        [1],
        [2],
        [3],
        [4],
        [5],
    ]


def test_a_family_of_ones_own() -> None:
    found = reference("tinyresnet")
    view = depth_views(found, [(3, 1)])[0]
    assert [kept(view, column) for column in columns(found)] == [3, 1]
    with pytest.raises(InputError, match="no depth"):
        depth_views(found, [(4, 1)])
    with pytest.raises(InputError, match="no depth"):
        depth_views(found, [(1,)])


def test_views_are_nested_and_travel_as_plain_data() -> None:
    for name in ("tinyexits", "tinyresnet"):
        found = reference(name)
        views = depth_views(found)
        assert all(deep.contains(shallow) for shallow, deep in pairwise(views))
        assert all(from_spec(found.axes, to_spec(view)).key() == view.key() for view in views)


CUTTABLE = {
    "resnet14", "resnet18", "resnet22", "resnet26", "resnet34", "resnet50", "preresnet18",
    "mobilenetv2", "exitcnn", "exitresnet", "tinyexits", "tinyresnet", "resnet101", "resnet152",
    "vit",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in MODELS
        if MODELS[n].input not in ("sequence", "text") and not n.startswith("densenet")
    ],
)
def test_which_networks_can_be_cut(name: str) -> None:
    shape = (1, 32, 32)
    narrow = {} if name == "mlp" else {"width": 0.0625}
    found = Reference("main", build(name, shape=shape, classes=4, **narrow), shape)
    if name in CUTTABLE:
        view = depth_views(found)[0]
        assert found.network(view).eval()(torch.zeros(2, *shape)).shape == (2, 4)
    else:
        with pytest.raises(InputError, match=r"cannot be cut in depth.*tinyresnet"):
            depth_views(found)


@pytest.mark.parametrize(("name", "shape"), [("gpt", (9,)), ("forecaster", (3, 20))])
def test_networks_over_steps_are_cut_by_blocks(name: str, shape: tuple[int, ...]) -> None:
    with torch_seeded(0, "test"):
        found = Reference("main", build(name, shape=shape, classes=7), shape)
    x = torch.randint(7, (3, *shape)) if name == "gpt" else torch.randn(3, *shape)
    assert family(found) == [[1], [2], [3], [4]]
    for view in depth_views(found):
        state = {
            name: t if name in view.shapes else torch.zeros_like(t)
            for name, t in found.initial.items()
        }
        silenced = found.network(found.full, state).eval()(x)
        part = found.network(view, view.extract(found.initial)).eval()(x)
        assert torch.allclose(part, silenced, atol=1e-6)


class Plain(nn.Module):
    """All blocks in one sequence, stages or not: a block that changes the map begins a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(Add(a, b) for a, b in ((1, 4), (4, 4), (4, 4), (4, 8), (8, 8))))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Add(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1)
        self.side = nn.Identity() if before == after else nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.side(x) + torch.relu(self.conv(x))


def test_stages_are_found_by_what_blocks_do() -> None:
    found = Reference("main", Plain(), (1, 8, 8))
    assert residual_stages(found) == [["body.0", "body.1", "body.2"], ["body.3", "body.4"]]
    for view in depth_views(found):
        assert found.network(view)(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    assert residual_stages(Reference("main", networks.Residual(), (2, 8, 8))) == []

"""Published sizes, to the last parameter. All on the meta device: counting needs no memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nestling.models import build, parameters, state_entries

CIFAR, MNIST = (3, 32, 32), (1, 28, 28)


def sizes(*expected: int) -> list[tuple[float, int]]:
    return list(zip((1, 1 / 2, 1 / 4, 1 / 8, 1 / 16), expected, strict=True))


def on_meta(
    name: str, shape: tuple[int, ...] = CIFAR, classes: int = 10, **options: object
) -> nn.Module:
    with torch.device("meta"):
        return build(name, shape=shape, classes=classes, **options)


@pytest.mark.parametrize(("width", "expected"), sizes(1_556_874, 391_370, 98_922, 25_274, 6_594))
def test_heterofl_cnn(width: float, expected: int) -> None:
    assert parameters(on_meta("cnn", MNIST, width=width, norm="batch")) == expected


@pytest.mark.parametrize(
    ("width", "expected"), sizes(11_172_170, 2_796_714, 701_018, 176_178, 44_510)
)
def test_heterofl_preresnet18(width: float, expected: int) -> None:
    assert parameters(on_meta("preresnet18", width=width, norm="batch")) == expected


@pytest.mark.parametrize(
    ("depth", "expected"),
    [(10, 4_910_922), (14, 10_812_234), (18, 11_181_642), (22, 17_082_954), (26, 17_452_362)],
)
def test_fedin_resnets(depth: int, expected: int) -> None:
    assert parameters(on_meta(f"resnet{depth}", norm="tracked")) == expected


def test_fedin_feature_shapes() -> None:
    network = on_meta("resnet10", norm="tracked")
    x = torch.empty(16, *CIFAR, device="meta")
    assert network.stem(x).shape == (16, 64, 8, 8)
    assert network.features(x).shape == (16, 512)


def test_draftfed_resnets_with_all_state_entries() -> None:
    sizes = {
        depth: state_entries(on_meta(f"resnet{depth}", norm="tracked")) for depth in (50, 101, 152)
    }
    assert 8 * sizes[50] + 8 * sizes[101] + 4 * sizes[152] == 762_925_852


def test_draftfed_resnets_with_parameters_only() -> None:
    sizes = {
        depth: parameters(on_meta(f"resnet{depth}", norm="tracked")) for depth in (50, 101, 152)
    }
    assert 8 * sizes[50] + 8 * sizes[101] + 4 * sizes[152] == 761_050_568


def test_draftfed_densenets() -> None:
    networks = [on_meta(f"densenet{depth}", norm="tracked") for depth in (121, 161, 169, 201)]
    assert 5 * sum(map(state_entries, networks)) == 323_815_780
    assert 5 * sum(map(parameters, networks)) == 320_357_320


def test_draftfed_draft_shapes() -> None:
    network = on_meta("densenet121", norm="tracked")
    x = torch.empty(2, *CIFAR, device="meta")
    assert network.stem[:2](x).shape == (2, 64, 16, 16)
    assert network.neck.norm(network.stages(network.stem(x))).shape == (2, 1024, 1, 1)


def test_flexfl_vgg16() -> None:
    network = on_meta("vgg16", norm="batch")
    assert parameters(network) == 33_646_666
    assert len(network.stages) == 13


POOLED = [
    (False, [32, 16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 2, 1]),
    (True, [32, 32, 16, 16, 8, 8, 8, 4, 4, 4, 2, 2, 1]),
]
"""The side of the map after each convolution of VGG16."""


@pytest.mark.parametrize(("late", "sides"), POOLED)
def test_where_vgg16_pools(late: bool, sides: list[int]) -> None:
    """After each group of convolutions or, as in FlexFL's released code, one convolution later; the
    parameters are the same."""
    network, found = on_meta("vgg16", norm="batch", late=late), []
    x = torch.empty(2, *CIFAR, device="meta")
    for stage in network.stages:
        x = stage(x)
        found.append(x.shape[-1])
    assert found == sides
    assert parameters(network) == 33_646_666


def test_flexfl_resnet34_layout() -> None:
    network = on_meta("resnet34", norm="batch", stem="cifar", channels=(64, 96, 128, 256, 512))
    relus = [
        sum(isinstance(part, nn.ReLU) for part in unit.modules())
        for unit in (network.stem, *network.stages)
    ]
    assert relus == [1, 6, 8, 12, 6]
    assert [stage[0].conv1.out_channels for stage in network.stages] == [96, 128, 256, 512]


def test_flexfl_mobilenetv2_layout() -> None:
    network = on_meta("mobilenetv2", norm="batch", expand_first=True)
    units = (network.stem, *network.stages, network.neck)
    assert [sum(isinstance(part, nn.ReLU6) for part in unit.modules()) for unit in units] == [
        1,
        2,
        4,
        6,
        8,
        6,
        6,
        2,
        1,
    ]


def test_stock_sizes_for_a_thousand_classes() -> None:
    shape = (3, 224, 224)
    assert (
        parameters(on_meta("mobilenetv2", shape, 1000, stem="imagenet", norm="tracked"))
        == 3_504_872
    )
    assert parameters(on_meta("resnet18", shape, 1000, norm="tracked")) == 11_689_512
    assert parameters(on_meta("resnet50", shape, 1000, norm="tracked")) == 25_557_032
    assert parameters(on_meta("densenet121", shape, 1000, norm="tracked")) == 7_978_856


def test_mlperf_tiny_resnet8() -> None:
    assert parameters(on_meta("resnet8", norm="none")) == 77_706
    counters = 7  # torch counts batches in every normalisation layer, Keras does not
    assert state_entries(on_meta("resnet8", norm="tracked")) - counters == 78_666


def test_mlperf_tiny_dscnn() -> None:
    shape, kernel = (1, 49, 10), (10, 4)
    assert parameters(on_meta("dscnn", shape, 12, kernel=kernel, norm="none")) == 22_604
    # With group norm it hardly trains.
    assert on_meta("dscnn", shape, 12, kernel=kernel).state_dict().keys() == (
        on_meta("dscnn", shape, 12, kernel=kernel, norm="tracked").state_dict().keys()
    )
    counters = 9
    assert (
        state_entries(on_meta("dscnn", shape, 12, kernel=kernel, norm="tracked")) - counters
        == 24_908
    )


def test_mlperf_tiny_autoencoder() -> None:
    values = 640
    assert parameters(on_meta("autoencoder", (values,), values)) == 265_864
    counters = 9
    whole = on_meta("autoencoder", (values,), values, norm="tracked")
    assert state_entries(whole) - counters == 269_992
    linear = [part.out_features for part in whole.modules() if isinstance(part, nn.Linear)]
    assert linear == [128] * 4 + [8] + [128] * 4 + [values]


def test_parameters_counts_trainable_ones_only() -> None:
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    assert (parameters(layer), state_entries(layer)) == (6, 8)

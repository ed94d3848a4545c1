"""HeteroFL's published sizes, from views of one network rather than from networks built small."""

from __future__ import annotations

import pytest
import torch

from nestling.models import build, parameters
from nestling.views import Reference, prefix, rolling
from nestling.views.view import View

RATES = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
MNIST = (1_556_874, 391_370, 98_922, 25_274, 6_594)
CIFAR = (11_172_170, 2_796_714, 701_018, 176_178, 44_510)


def reference(name: str, shape: tuple[int, ...], **options: object) -> Reference:
    with torch.device("meta"):
        return Reference("main", build(name, shape=shape, classes=10, norm="sbn", **options), shape)


def size(network: Reference, view: View) -> int:
    return sum(int(torch.Size(view.shape(name)).numel()) for name in network.parameters)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [("cnn", (1, 28, 28), MNIST), ("preresnet18", (3, 32, 32), CIFAR)],
)
def test_views_of_the_five_levels(
    name: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    network = reference(name, shape)
    assert tuple(size(network, prefix(network.axes, rate)) for rate in RATES) == expected


def test_the_mean_over_the_levels_is_the_published_one() -> None:
    network = reference("cnn", (1, 28, 28))
    assert round(sum(size(network, prefix(network.axes, rate)) for rate in RATES) / 5) == 415_807


@pytest.mark.parametrize("step", [1, 63, 200])
def test_rolling_windows_have_the_same_sizes(step: int) -> None:
    network = reference("cnn", (1, 28, 28))
    assert tuple(size(network, rolling(network.axes, rate, step)) for rate in RATES) == MNIST


@pytest.mark.parametrize("rate", RATES[1:])
def test_bottleneck_networks_can_be_cut(rate: float) -> None:
    """The released code refuses them: it knows no third convolution in a block."""
    network = reference("resnet50", (3, 32, 32), blocks=(1, 2), channels=(16, 16, 32), stem="cifar")
    for view in (prefix(network.axes, rate), rolling(network.axes, rate, 5)):
        small = network.network(view)
        assert small(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)
        assert parameters(small) == size(network, view)
    assert parameters(network.network(prefix(network.axes, rate))) == parameters(
        build(
            "resnet50",
            shape=(3, 32, 32),
            classes=10,
            norm="sbn",
            blocks=(1, 2),
            channels=(16, 16, 32),
            stem="cifar",
            width=rate,
        )
    )

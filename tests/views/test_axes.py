"""Channel ties found by tracing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nestling.errors import InputError
from nestling.models import build
from nestling.views import prefix, sub_module, trace
from tests.views.networks import SHAPE, Concatenating, Depthwise, Halves, Residual


def test_residual_adds_share_an_axis() -> None:
    axes = trace(Residual(), SHAPE)
    assert dict(zip(axes.names, axes.sizes, strict=True)) == {"stem": 8, "a": 6, "down": 12}
    stem, shortcut = axes.dims["stem.weight"][0], axes.dims["b.weight"][0]
    assert stem is not None and shortcut is not None and (stem == shortcut).all()


def test_depthwise_ties_inputs_and_outputs() -> None:
    axes = trace(Depthwise(), SHAPE)
    assert axes.sizes == (6, 10)
    twice = axes.dims["twice.weight"][0]
    assert twice is not None and twice.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_concatenation_keeps_axes_apart_through_pool_and_flatten() -> None:
    """A traced dependency graph that guesses channels from the linear layer's width ties the wrong
    ones here."""
    axes = trace(Concatenating(), SHAPE)
    assert axes.sizes == (8, 4, 4, 6)
    reader = axes.dims["fc.weight"][1]
    assert reader is not None
    assert reader.tolist() == [channel for channel in range(16) for _ in range(16)]


def test_gate_ties_the_halves() -> None:
    axes = trace(Halves(), SHAPE)
    assert axes.sizes == (6,)
    rows = axes.dims["a.weight"][0]
    assert rows is not None and rows.tolist() == [0, 1, 2, 3, 4, 5] * 2


def test_group_norms_make_grains() -> None:
    net = build("tinycnn", shape=(1, 28, 28), classes=10, channels=(20, 40), norm="group")
    axes = trace(net, (1, 28, 28))
    assert axes.grains == (4, 4) and trace(Residual(), SHAPE).grains == (1, 1, 1)
    view = prefix(axes, 0.3)
    assert [len(view.indices(name)) for name in axes.names] == [8, 12]  # 6 and 12, in whole groups
    assert sub_module(net, view)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_inputs_and_classes_are_never_sliced() -> None:
    axes = trace(Residual(), SHAPE)
    assert axes.dims["stem.weight"][1] is None
    assert axes.dims["head.weight"][0] is None and axes.dims["head.bias"][0] is None


class Shuffled(nn.Module):
    """An operation no rule knows: what it touches must not be sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(6, 7)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(torch.sort(self.a(x), dim=-1).values))


def test_unknown_operations_freeze_what_they_touch() -> None:
    axes = trace(Shuffled(), (4,))
    assert axes.names == ("b",)
    assert axes.dims["a.weight"] == (None, None)


def test_a_grouped_convolution_is_left_whole() -> None:
    net = nn.Sequential(
        nn.Conv2d(2, 8, 1),
        nn.Conv2d(8, 8, 1, groups=2),
        nn.Conv2d(8, 4, 1),
        nn.Flatten(),
        nn.Linear(4 * 64, 3),
    )
    assert trace(net, SHAPE).sizes == (4,)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def test_what_the_forward_does_not_use_belongs_to_every_view() -> None:
    assert trace(Unused(), (4,)).names == ()


def test_a_forward_that_looks_at_values_is_refused() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x) if x.sum().item() > 0 else self.head(-x)

    with pytest.raises(InputError, match="cannot be traced"):
        trace(Looks(), (4,))


def test_earlier_exits_are_traced_too() -> None:
    net = build("exitcnn", shape=(1, 28, 28), classes=10)
    half = sub_module(net, prefix(trace(net, (1, 28, 28)), 0.5))
    assert [out.shape for out in half.all_exits(torch.randn(2, 1, 28, 28))] == [
        torch.Size([2, 10])
    ] * len(half.heads)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", (1, 28, 28)),
        ("autoencoder", (6, 40)),
        ("cnn", (1, 28, 28)),
        ("tinycnn", (3, 32, 32)),
        ("cnn1d", (6, 128)),
        ("forecaster", (6, 40)),
        ("dscnn", (1, 32, 32)),
        ("resnet8", (3, 32, 32)),
        ("resnet18", (3, 32, 32)),
        ("resnet50", (3, 32, 32)),
        ("preresnet18", (3, 32, 32)),
        ("mobilenetv2", (3, 32, 32)),
        ("densenet121", (3, 32, 32)),
        ("exitresnet", (3, 32, 32)),
    ],
)
def test_every_family_is_sliced_everywhere(name: str, shape: tuple[int, ...]) -> None:
    """Half the width leaves no hidden layer whole: the traced half has exactly the tensors of the
    network built at half width."""
    with torch.device("meta"):
        whole, half = (
            build(name, shape=shape, classes=10, width=w, norm="tracked") for w in (1.0, 0.5)
        )
    view = prefix(trace(whole, shape), 0.5)
    assert view.shapes == {n: tuple(t.shape) for n, t in half.state_dict().items()}

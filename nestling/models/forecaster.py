"""A network for forecasts of sequences: dilated causal convolutions (Bai, Kolter and Koltun's TCN,
2018, smaller)."""

from __future__ import annotations

from torch import Tensor, nn

from nestling.models.norm import Norm, norm_layer
from nestling.models.parts import Network, named, scaled, sequence
from nestling.settings import Count, Positive


def causal(before: int, after: int, kernel: int, dilation: int) -> nn.Sequential:
    """A convolution whose every step sees itself and earlier ones, `dilation` apart."""
    return named(
        pad=nn.ZeroPad1d(((kernel - 1) * dilation, 0)),
        conv=nn.Conv1d(before, after, kernel, dilation=dilation),
    )


class Dilated(nn.Module):
    """Two causal convolutions beside a shortcut."""

    def __init__(self, channels: int, kernel: int, dilation: int, norm: str) -> None:
        """Both with the same dilation, and the norm between them."""
        super().__init__()
        self.first = causal(channels, channels, kernel, dilation)
        self.norm, self.relu = norm_layer(norm, channels, dims=1), nn.ReLU()
        self.second = causal(channels, channels, kernel, dilation)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, channels, steps) to the same."""
        return x + self.second(self.relu(self.norm(self.first(x))))


class Latest(nn.Module):
    """The last step, which has seen those before it."""

    def forward(self, x: Tensor) -> Tensor:
        """(rows, channels, steps) to (rows, channels)."""
        return x[..., -1]


def forecaster(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: Norm = "none",
    channels: Count = 32,
    depth: Count = 4,
    kernel: Count = 3,
) -> nn.Module:
    """`depth` blocks over (rows, channels, steps), each with twice the dilation of the one before,
    read at the last step; the classes are the values to be told, steps ahead times channels.

    Without a norm no step depends on a later one; the others look over all steps of the window. The
    last step sees 1 + 2 (kernel - 1) (2^depth - 1) steps, 61 by default. Microcontrollers have no
    dilation and do not train it.

    channels: of every convolution.
    depth:    blocks.
    kernel:   how many steps a convolution sees.
    """
    before, _ = sequence("forecaster", shape)
    size = scaled(channels, width)
    return Network(
        stem=nn.Conv1d(before, size, 1),
        stages=[Dilated(size, kernel, 2**number, norm) for number in range(depth)],
        neck=Latest(),
        head=nn.Linear(size, classes),
    )

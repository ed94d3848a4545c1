"""A convolutional network for sensor windows (human activity recognition): input (channels,
length)."""

from __future__ import annotations

from torch import nn

from nestling.models.norm import Norm, norm_layer
from nestling.models.parts import Network, he_init, named, scaled, sequence
from nestling.settings import Count, Positive


def cnn1d(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: Norm = "group",
    channels: tuple[Count, ...] = (32, 64, 64),
    kernel: Count = 5,
) -> nn.Module:
    """One convolution with stride 2 for every entry of `channels`, then the mean over time.

    channels: of every convolution.
    kernel:   how many steps of time a convolution sees.
    """
    before, _ = sequence("cnn1d", shape)
    stages = []
    for full in channels:
        after = scaled(full, width)
        conv = nn.Conv1d(before, after, kernel, stride=2, padding=kernel // 2, bias=norm == "none")
        stages.append(named(conv=conv, norm=norm_layer(norm, after, dims=1), relu=nn.ReLU()))
        before = after
    neck = named(pool=nn.AdaptiveAvgPool1d(1), flat=nn.Flatten())
    network = Network(stem=nn.Identity(), stages=stages, neck=neck, head=nn.Linear(before, classes))
    he_init(network)
    return network

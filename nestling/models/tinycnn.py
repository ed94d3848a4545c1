"""A small network for microcontrollers: the first convolution strides, the others are pooled, one
linear layer."""

from __future__ import annotations

from torch import nn

from nestling.models.norm import Norm, norm_layer
from nestling.models.parts import Network, conv2d, he_init, image, named, scaled
from nestling.settings import Count, Positive


def tinycnn(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: Norm = "group",
    channels: tuple[Count, ...] = (20, 40, 80),
) -> nn.Module:
    """A 5x5 convolution with stride 2, then a 3x3 convolution and a 2x2 pool for every further
    entry of `channels`.

    Halving the map in the first layer keeps the activations, which are what fills a
    microcontroller's memory, small.

    channels: of every convolution.
    """
    before, high, wide = image("tinycnn", shape)
    stages = []
    for number, full in enumerate(channels):
        after, first = scaled(full, width), number == 0
        conv = conv2d(
            before, after, 5 if first else 3, stride=2 if first else 1, bias=norm == "none"
        )
        parts = {"conv": conv, "norm": norm_layer(norm, after), "relu": nn.ReLU()}
        if not first and min(high, wide) > 1:
            parts["pool"] = nn.MaxPool2d(2)
            high, wide = high // 2, wide // 2
        elif first:
            high, wide = (high + 1) // 2, (wide + 1) // 2
        stages.append(named(**parts))
        before = after
    head = nn.Linear(before * high * wide, classes)
    network = Network(stem=nn.Identity(), stages=stages, neck=nn.Flatten(), head=head)
    he_init(network)
    return network

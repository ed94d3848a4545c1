"""A small network for microcontrollers: strided convolutions, no pooling, one linear layer."""

from __future__ import annotations

from torch import nn

from nestling.models.norm import norm_layer
from nestling.models.parts import Network, conv2d, he_init, image, named, scaled


def tinycnn(
    *, shape: tuple[int, ...], classes: int, width: float = 1.0, norm: str = "group", channels: tuple[int, ...] = (16, 32, 64)
) -> nn.Module:
    """One 3x3 convolution with stride 2 for every entry of `channels`; the head sees the flattened map."""
    before, high, wide = image("tinycnn", shape)
    stages = []
    for full in channels:
        after = scaled(full, width)
        conv = conv2d(before, after, stride=2, bias=norm == "none")
        stages.append(named(conv=conv, norm=norm_layer(norm, after), relu=nn.ReLU()))
        before, high, wide = after, (high + 1) // 2, (wide + 1) // 2
    head = nn.Linear(before * high * wide, classes)
    network = Network(stem=nn.Identity(), stages=stages, neck=nn.Flatten(), head=head)
    he_init(network)
    return network

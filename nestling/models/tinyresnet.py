"""A residual network for microcontrollers, deep enough to be cut in depth."""

from __future__ import annotations

from torch import nn

from nestling.models.norm import norm_layer
from nestling.models.parts import Network, conv2d, he_init, image, named, scaled
from nestling.models.resnet import basic_stages


def tinyresnet(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: float = 1.0,
    norm: str = "group",
    blocks: tuple[int, ...] = (3, 3),
    channels: tuple[int, ...] = (4, 8, 8),
) -> nn.Module:
    """A stem that quarters the map, `blocks` basic blocks a stage, a coarse mean, the head. `channels` is the stem's, then one a stage.

    With one block a stage it trains within 64 KB.
    """
    before, high, wide = image("tinyresnet", shape, least=4)
    size = scaled(channels[0], width)
    conv = conv2d(before, size, 5, stride=2, bias=norm == "none")
    stem = named(conv=conv, norm=norm_layer(norm, size), relu=nn.ReLU(), pool=nn.MaxPool2d(2))
    stages = basic_stages(blocks, channels, width, norm)
    high, wide = (high + 1) // 4, (wide + 1) // 4
    for _ in stages[1:]:
        high, wide = (high + 1) // 2, (wide + 1) // 2
    coarse = max(1, min(high, wide) // 2)
    features = scaled(channels[len(blocks)], width) * (high // coarse) * (wide // coarse)
    neck = named(pool=nn.AvgPool2d(coarse), flat=nn.Flatten())
    network = Network(stem=stem, stages=stages, neck=neck, head=nn.Linear(features, classes))
    he_init(network)
    return network

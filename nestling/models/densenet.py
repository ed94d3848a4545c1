"""DenseNet (Huang et al., 2017) in the stock layout: every layer sees the outputs of all layers
before it in its block."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from nestling.errors import InputError
from nestling.models.norm import Norm, norm_layer
from nestling.models.parts import (
    Network,
    Stem,
    check_stem,
    conv2d,
    he_init,
    image,
    image_stem,
    named,
    pooled,
    scaled,
)
from nestling.settings import Count, Positive

BOTTLENECK = 4


class DenseLayer(nn.Module):
    """Puts `growth` new channels behind its input."""

    def __init__(self, before: int, middle: int, growth: int, norm: str) -> None:
        """A 1x1 convolution to `middle` channels and a 3x3 one to `growth`, each behind a
        normalisation."""
        super().__init__()
        bias = norm == "none"
        self.norm1 = norm_layer(norm, before)
        self.relu1 = nn.ReLU()
        self.conv1 = conv2d(before, middle, 1, bias=bias)
        self.norm2 = norm_layer(norm, middle)
        self.relu2 = nn.ReLU()
        self.conv2 = conv2d(middle, growth, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """The input and the new channels."""
        new = self.conv1(self.relu1(self.norm1(x)))
        return torch.cat([x, self.conv2(self.relu2(self.norm2(new)))], dim=1)


def densenet(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: Norm = "group",
    blocks: tuple[Count, ...] = (6, 12, 24, 16),
    growth: Count = 32,
    initial: Count = 64,
    stem: Stem = "imagenet",
) -> nn.Module:
    """A stem, dense blocks, and between them transitions that halve channels and size.

    blocks:  the dense layers of every block.
    growth:  the channels that a dense layer adds.
    initial: the stem's channels.
    stem:    imagenet (7x7 with stride 2, then pooling: a quarter of the size) or cifar (3x3, for
             small images).
    """
    halvings = max(0, len(blocks) - 1)
    least = 2**halvings if check_stem(stem) == "cifar" else 4 * 2**halvings - 3
    before, _, _ = image("densenet", shape, least=least)
    if not blocks:
        raise InputError(
            "no blocks", field="model.blocks", fix="count the layers of at least one block"
        )
    # `full` follows the width-1 network, `size` this one: sizes of concatenations are sums of
    # scaled parts, not scaled sums.
    full, size = initial, scaled(initial, width)
    entry = image_stem(before, size, stem=stem, norm=norm)
    stages = []
    for number, count in enumerate(blocks):
        layers, size = _block(size, count, growth, width, norm)
        full += count * growth
        parts: dict[str, nn.Module] = {"layers": layers}
        if number + 1 < len(blocks):
            full //= 2
            parts["transition"] = _transition(size, scaled(full, width), norm)
            size = scaled(full, width)
        stages.append(named(**parts))
    neck = named(norm=norm_layer(norm, size), relu=nn.ReLU(), **dict(pooled().named_children()))
    network = Network(stem=entry, stages=stages, neck=neck, head=nn.Linear(size, classes))
    he_init(network)
    return network


def _block(
    size: int, count: int, growth: int, width: float, norm: str
) -> tuple[nn.Sequential, int]:
    new, middle = scaled(growth, width), scaled(BOTTLENECK * growth, width)
    layers = [DenseLayer(size + place * new, middle, new, norm) for place in range(count)]
    return nn.Sequential(*layers), size + count * new


def _transition(before: int, after: int, norm: str) -> nn.Sequential:
    conv = conv2d(before, after, 1, bias=norm == "none")
    return named(norm=norm_layer(norm, before), relu=nn.ReLU(), conv=conv, pool=nn.AvgPool2d(2))


densenet121 = partial(densenet, blocks=(6, 12, 24, 16))
densenet161 = partial(densenet, blocks=(6, 12, 36, 24), growth=48, initial=96)
densenet169 = partial(densenet, blocks=(6, 12, 32, 32))
densenet201 = partial(densenet, blocks=(6, 12, 48, 32))

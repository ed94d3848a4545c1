"""Residual networks (He et al., 2016) in the stock layout: `resnet` of basic blocks, `bottleneck`
of 1-3-1 blocks.

With norm "tracked" their parameter counts are those of the stock networks, which published FL
tables rest on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from nestling.errors import InputError
from nestling.models.norm import Norm, norm_layer
from nestling.models.parts import (
    Network,
    Stem,
    conv2d,
    he_init,
    image,
    image_stem,
    named,
    pooled,
    scaled,
)
from nestling.settings import Count, Positive

EXPANSION = 4


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(
        self, before: int, after: int, *, stride: int, norm: str, bias: bool, shortcut: nn.Module
    ) -> None:
        """From `before` to `after` channels; the first convolution has the stride."""
        super().__init__()
        self.conv1 = conv2d(before, after, stride=stride, bias=bias)
        self.norm1 = norm_layer(norm, after)
        self.relu1 = nn.ReLU()
        self.conv2 = conv2d(after, after, bias=bias)
        self.norm2 = norm_layer(norm, after)
        self.shortcut = shortcut
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out = self.relu1(self.norm1(self.conv1(x)))
        return self.relu2(self.norm2(self.conv2(out)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(
        self, before: int, middle: int, after: int, *, stride: int, norm: str, shortcut: nn.Module
    ) -> None:
        """From `before` over `middle` to `after` channels; the 3x3 convolution has the stride."""
        super().__init__()
        bias = norm == "none"
        self.conv1 = conv2d(before, middle, 1, bias=bias)
        self.norm1 = norm_layer(norm, middle)
        self.relu1 = nn.ReLU()
        self.conv2 = conv2d(middle, middle, stride=stride, bias=bias)
        self.norm2 = norm_layer(norm, middle)
        self.relu2 = nn.ReLU()
        self.conv3 = conv2d(middle, after, 1, bias=bias)
        self.norm3 = norm_layer(norm, after)
        self.shortcut = shortcut
        self.relu3 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out = self.relu1(self.norm1(self.conv1(x)))
        out = self.relu2(self.norm2(self.conv2(out)))
        return self.relu3(self.norm3(self.conv3(out)) + self.shortcut(x))


def resnet(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: Norm = "group",
    blocks: tuple[Count, ...] = (2, 2, 2, 2),
    channels: tuple[Count, ...] = (64, 64, 128, 256, 512),
    stem: Stem = "imagenet",
) -> nn.Module:
    """A stem, one stage for every entry of `blocks`, the mean over pixels, the head.

    blocks:   the basic blocks of every stage.
    channels: of the stem, then of every stage.
    stem:     imagenet (7x7 with stride 2, then pooling: a quarter of the size) or cifar (3x3, for
              small images).
    """
    before, _, _ = image("resnet", shape)
    stages = basic_stages(blocks, channels, width, norm)
    entry = image_stem(before, scaled(channels[0], width), stem=stem, norm=norm)
    return _network(entry, stages, scaled(channels[len(blocks)], width), classes)


def bottleneck(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: Norm = "group",
    blocks: tuple[Count, ...] = (3, 4, 6, 3),
    channels: tuple[Count, ...] = (64, 64, 128, 256, 512),
    stem: Stem = "imagenet",
) -> nn.Module:
    """As the smaller ones, of bottleneck blocks: a stage of c channels puts out 4·c.

    blocks:   the bottleneck blocks of every stage.
    channels: of the stem, then of every stage, inside its blocks.
    stem:     imagenet (7x7 with stride 2, then pooling: a quarter of the size) or cifar (3x3, for
              small images).
    """
    before, _, _ = image("resnet", shape)
    stages = _bottleneck_stages(blocks, channels, width, norm)
    entry = image_stem(before, scaled(channels[0], width), stem=stem, norm=norm)
    return _network(entry, stages, scaled(EXPANSION * channels[len(blocks)], width), classes)


def basic_stages(
    blocks: Sequence[int], channels: Sequence[int], width: float, norm: str
) -> list[nn.Module]:
    """The stages of a `resnet`, without stem and head."""

    def block(before: int, after: int, stride: int) -> BasicBlock:
        shortcut = _projection(before, after, stride, width, norm)
        sizes = scaled(before, width), scaled(after, width)
        return BasicBlock(*sizes, stride=stride, norm=norm, bias=norm == "none", shortcut=shortcut)

    return [nn.Sequential(*(block(*place) for place in stage)) for stage in plan(blocks, channels)]


def _bottleneck_stages(
    blocks: Sequence[int], channels: Sequence[int], width: float, norm: str
) -> list[nn.Module]:
    def block(before: int, after: int, stride: int) -> Bottleneck:
        shortcut = _projection(before, after, stride, width, norm)
        sizes = scaled(before, width), scaled(after // EXPANSION, width), scaled(after, width)
        return Bottleneck(*sizes, stride=stride, norm=norm, shortcut=shortcut)

    outputs = (*channels[:1], *(EXPANSION * middle for middle in channels[1:]))
    return [nn.Sequential(*(block(*place) for place in stage)) for stage in plan(blocks, outputs)]


def plan(blocks: Sequence[int], channels: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """For every stage its blocks as (channels before, after, stride), at full width. `channels`:
    the stem's, then one per stage.

    Every stage but the first begins with stride 2.
    """
    if not 1 <= len(blocks) < len(channels):
        message = f"{len(blocks)} stages, but channels for {max(0, len(channels) - 1)}"
        raise InputError(
            message, field="model.blocks", fix="give blocks and channels an entry for every stage"
        )
    if min(blocks) < 1:
        raise InputError(
            "a stage without blocks", field="model.blocks", fix="use at least 1 in every stage"
        )
    stages = []
    for number, count in enumerate(blocks):
        before, after = channels[number], channels[number + 1]
        first = (before, after, 2 if number else 1)
        stages.append([first, *[(after, after, 1)] * (count - 1)])
    return stages


def _projection(before: int, after: int, stride: int, width: float, norm: str) -> nn.Module:
    # Decided on the full sizes: a narrow network must have the same layers as the wide one, even if
    # both ends round to the same.
    if stride == 1 and before == after:
        return nn.Identity()
    size = scaled(after, width)
    return named(
        conv=conv2d(scaled(before, width), size, 1, stride=stride, bias=norm == "none"),
        norm=norm_layer(norm, size),
    )


def _network(stem: nn.Module, stages: list[nn.Module], features: int, classes: int) -> nn.Module:
    network = Network(stem=stem, stages=stages, neck=pooled(), head=nn.Linear(features, classes))
    he_init(network)
    return network


resnet10 = partial(resnet, blocks=(1, 1, 1, 1))
resnet14 = partial(resnet, blocks=(1, 1, 2, 2))
resnet18 = partial(resnet, blocks=(2, 2, 2, 2))
resnet22 = partial(resnet, blocks=(2, 2, 3, 3))
resnet26 = partial(resnet, blocks=(3, 3, 3, 3))
resnet34 = partial(resnet, blocks=(3, 4, 6, 3))
resnet50 = partial(bottleneck, blocks=(3, 4, 6, 3))
resnet101 = partial(bottleneck, blocks=(3, 4, 23, 3))
resnet152 = partial(bottleneck, blocks=(3, 8, 36, 3))

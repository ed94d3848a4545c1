"""ResNet-8 of MLPerf Tiny's image classification."""

from __future__ import annotations

from torch import nn

from nestling.models.norm import Norm, norm_layer
from nestling.models.parts import Network, conv2d, he_init, image, named, pooled, scaled
from nestling.models.resnet import BasicBlock, plan
from nestling.settings import Count, Positive


def resnet8(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: Norm = "group",
    blocks: tuple[Count, ...] = (1, 1, 1),
    channels: tuple[Count, ...] = (16, 32, 64),
) -> nn.Module:
    """A 3x3 stem, one stage for every entry of `blocks`, the mean over pixels, the head.

    As in the benchmark all convolutions carry a bias and shortcuts no normalisation. On
    3x32x32 and 10 classes: 77 706 parameters without normalisation (the published figure of the
    folded model); 78 666 with "tracked", running statistics counted.

    blocks:   the basic blocks of every stage.
    channels: of every stage.
    """
    before, _, _ = image("resnet8", shape)
    planned = plan(blocks, (*channels[:1], *channels))
    stages = [nn.Sequential(*(_block(*place, width, norm) for place in stage)) for stage in planned]
    size = scaled(channels[0], width)
    stem = named(conv=conv2d(before, size, bias=True), norm=norm_layer(norm, size), relu=nn.ReLU())
    head = nn.Linear(scaled(channels[len(blocks) - 1], width), classes)
    network = Network(stem=stem, stages=stages, neck=pooled(), head=head)
    he_init(network)
    return network


def _block(before: int, after: int, stride: int, width: float, norm: str) -> BasicBlock:
    sizes = scaled(before, width), scaled(after, width)
    straight = stride == 1 and before == after
    shortcut = nn.Identity() if straight else conv2d(*sizes, 1, stride=stride, bias=True)
    return BasicBlock(*sizes, stride=stride, norm=norm, bias=True, shortcut=shortcut)

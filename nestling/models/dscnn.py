"""DS-CNN of MLPerf Tiny's keyword spotting: one convolution, then depth-wise separable blocks."""

from __future__ import annotations

from torch import nn

from nestling.models.norm import Norm, norm_layer
from nestling.models.parts import Network, conv2d, he_init, image, named, pooled, scaled
from nestling.settings import Count, Positive


def dscnn(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: Norm = "tracked",
    channels: Count = 64,
    blocks: Count = 4,
    kernel: tuple[Count, Count] = (3, 3),
) -> nn.Module:
    """A convolution with stride 2, then depth-wise separable ones, the mean over pixels, the head.

    Running statistics normalise, as in MLPerf Tiny: with group norm a narrow network learns far
    more slowly. Microcontrollers train with `norm = "none"` or "group" only.

    All convolutions carry a bias, as in the benchmark: without normalisation, i.e. folded, it has
    22 604 parameters for 12 words. The benchmark's dropout is left out, and its first map has one
    row more (Keras pads unevenly).

    channels: of every convolution.
    blocks:   how many pairs of a depth-wise and a point-wise convolution there are.
    kernel:   height and width of the first convolution's kernel; on 49x10 spectrograms MLPerf Tiny
              uses (10, 4).
    """
    before, _, _ = image("dscnn", shape, least=2 if any(size % 2 == 0 for size in kernel) else 1)
    size = scaled(channels, width)
    stem = named(
        conv=conv2d(before, size, kernel, stride=2, bias=True),
        norm=norm_layer(norm, size),
        relu=nn.ReLU(),
    )
    stages = [_block(size, norm) for _ in range(blocks)]
    network = Network(stem=stem, stages=stages, neck=pooled(), head=nn.Linear(size, classes))
    he_init(network)
    return network


def _block(size: int, norm: str) -> nn.Sequential:
    return named(
        depthwise=conv2d(size, size, groups=size, bias=True),
        norm1=norm_layer(norm, size),
        relu1=nn.ReLU(),
        pointwise=conv2d(size, size, 1, bias=True),
        norm2=norm_layer(norm, size),
        relu2=nn.ReLU(),
    )

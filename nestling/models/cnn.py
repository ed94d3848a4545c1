"""The convolutional network of HeteroFL's MNIST experiments (Diao et al., 2021)."""

from __future__ import annotations

from torch import nn

from nestling.models.norm import Norm, norm_layer
from nestling.models.parts import Network, conv2d, image, named, pooled, scaled
from nestling.settings import Count, Positive


def cnn(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: Norm = "group",
    channels: tuple[Count, ...] = (64, 128, 256, 512),
) -> nn.Module:
    """3x3 convolutions with bias, each but the last followed by pooling by 2.

    channels: of every convolution.
    """
    before, _, _ = image("cnn", shape, least=2 ** (len(channels) - 1))
    stages = []
    for number, full in enumerate(channels, start=1):
        after = scaled(full, width)
        pool = nn.MaxPool2d(2) if number < len(channels) else nn.Identity()
        stages.append(
            named(
                conv=conv2d(before, after, bias=True),
                norm=norm_layer(norm, after),
                relu=nn.ReLU(),
                pool=pool,
            )
        )
        before = after
    return Network(
        stem=nn.Identity(), stages=stages, neck=pooled(), head=nn.Linear(before, classes)
    )

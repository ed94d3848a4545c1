"""VGG16 as FlexFL trains it (2024): 13 convolutions, then 4096-4096 fully connected."""

from __future__ import annotations

from torch import nn

from nestling.errors import InputError
from nestling.models.norm import Norm, norm_layer
from nestling.models.parts import Network, conv2d, image, named, scaled
from nestling.settings import Count, Positive, ShareBelowOne

_CHANNELS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
_POOLED, _LATE = (1, 3, 6, 9, 12), (2, 4, 7, 10, 12)
"""The convolutions, counted from 0, that pooling follows."""


def vgg16(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: Norm = "group",
    hidden: tuple[Count, ...] = (4096, 4096),
    dropout: ShareBelowOne = 0.5,
    late: bool = False,
) -> nn.Module:
    """One stage per convolution. Pooling follows every group of them; the last is left out where
    the map is one pixel already.

    hidden:  the units of the fully connected layers; FlexFL uses (256, 256) on one-channel images.
    dropout: the share of those units that is left out of a training step.
    late:    pools as FlexFL's released code does: after the first convolution of the next group
             instead of before it, so that those four see maps of twice the side. The parameters
             are the same.
    """
    if not 0 <= dropout < 1:
        raise InputError(
            f"dropout is {dropout}",
            field="model.dropout",
            fix="use 0 (none) up to, not including, 1",
        )
    before, high, wide = image("vgg16", shape, least=16)
    pixels, stages = min(high, wide), []
    for number, full in enumerate(_CHANNELS):
        after, shrink = scaled(full, width), number in (_LATE if late else _POOLED) and pixels > 1
        pool = nn.MaxPool2d(2) if shrink else nn.Identity()
        stages.append(
            named(
                conv=conv2d(before, after, bias=True),
                norm=norm_layer(norm, after),
                relu=nn.ReLU(),
                pool=pool,
            )
        )
        before, pixels = after, pixels // 2 if shrink else pixels
    neck, size = _dense(before, hidden, width, dropout)
    return Network(stem=nn.Identity(), stages=stages, neck=neck, head=nn.Linear(size, classes))


def _dense(
    before: int, hidden: tuple[int, ...], width: float, dropout: float
) -> tuple[nn.Sequential, int]:
    parts: dict[str, nn.Module] = {"pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten()}
    for number, full in enumerate(hidden, start=1):
        after = scaled(full, width)
        # No layer at all without dropout: batching over clients refuses random layers, even those
        # that never fire.
        drop = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
        parts |= {
            f"fc{number}": nn.Linear(before, after),
            f"relu{number}": nn.ReLU(),
            f"drop{number}": drop,
        }
        before = after
    return named(**parts), before

"""Fully connected network: flattens whatever comes in."""

from __future__ import annotations

import math

from torch import nn

from nestling.models.norm import Norm, norm_layer
from nestling.models.parts import Network, named, scaled
from nestling.settings import Count, Positive


def mlp(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: Norm = "none",
    hidden: tuple[Count, ...] = (200,),
) -> nn.Module:
    """One stage per hidden layer.

    hidden: the units of every hidden layer; none is softmax regression.
    """
    size, stages = math.prod(shape), []
    for units in hidden:
        after = scaled(units, width)
        stages.append(
            named(
                linear=nn.Linear(size, after), norm=norm_layer(norm, after, dims=1), relu=nn.ReLU()
            )
        )
        size = after
    return Network(
        stem=nn.Flatten(), stages=stages, neck=nn.Identity(), head=nn.Linear(size, classes)
    )

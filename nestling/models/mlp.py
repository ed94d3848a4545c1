"""Fully connected network: flattens whatever comes in."""

from __future__ import annotations

import math

from torch import nn

from nestling.models.norm import norm_layer
from nestling.models.parts import Network, named, scaled


def mlp(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: float = 1.0,
    norm: str = "none",
    hidden: tuple[int, ...] = (200,),
) -> nn.Module:
    """One stage per hidden layer; `hidden=()` is softmax regression."""
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

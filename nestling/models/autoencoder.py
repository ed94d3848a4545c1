"""The dense autoencoder of MLPerf Tiny's anomaly detection: a sample that it cannot say again is
unlike those it was trained on."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

from nestling.models.norm import Norm, norm_layer
from nestling.models.parts import Network, named, scaled
from nestling.settings import Count, Positive


def autoencoder(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: Norm = "none",
    hidden: tuple[Count, ...] = (128, 128, 128, 128),
    code: Count = 8,
) -> nn.Module:
    """The layers of `hidden`, the code, and the same layers backwards, each with ReLU. For a
    network that says its input again the classes are the values of a sample.

    The benchmark normalises every layer by running statistics, which is `norm = "tracked"` (640
    values: 269 992 parameters and statistics). Microcontrollers train with `norm = "none"`, the
    default, or "group" only; then weights begin so that nine layers keep the signal.

    hidden: the units of every layer before the code.
    code:   the units of the layer in the middle.
    """
    sizes = [scaled(units, width) for units in (*hidden, code, *reversed(hidden))]
    stages = []
    for before, after in pairwise((math.prod(shape), *sizes)):
        linear = nn.Linear(before, after)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        stages.append(named(linear=linear, norm=norm_layer(norm, after, dims=1), relu=nn.ReLU()))
    return Network(
        stem=nn.Flatten(),
        stages=stages,
        neck=nn.Identity(),
        head=nn.Linear(sizes[-1], classes),
    )

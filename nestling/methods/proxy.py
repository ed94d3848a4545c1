"""The server's labelled rows, for methods that try something out on them before the first round."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from nestling.methods.api import InputError, World, require
from nestling.seeds import stream

TRIED, FEWEST = 0.8, 5
"""The share of the proxy that networks are trained on (they are judged on the rest), and the fewest rows of one."""

PROXY_FIRST = "server proxy (labelled), before the first round"
"""What their auxiliary data is called."""

Proxy = tuple[Tensor, Tensor, Tensor, Tensor]
"""Inputs and labels to train on, inputs and labels to judge by."""


def labelled_proxy(world: World, method: str, fix: str, share: float = 1.0, tried: float = TRIED) -> Proxy:
    """A share of the public rows with their labels, in two parts, the first of which is `tried` of them; `fix` says what to do where
    there are none."""
    x, y = world.public, world.public_labels
    if x is None or y is None:
        raise InputError(f"{method} needs a labelled proxy set on the server and there is none", field="split.public", fix=fix)
    rows = stream(world.seed, "proxy").permutation(len(x))[: math.ceil(share * len(x))]
    require(len(rows) >= FEWEST, f"a proxy of {len(rows)} rows is too small (at least {FEWEST})", "split.public", fix)
    first, rest = np.split(rows, [int(tried * len(rows))])
    return x[first], y[first], x[rest], y[rest]

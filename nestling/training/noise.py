"""Noise by counting: every draw is a hash of a key and its place, so that it is the same on every
engine, in a stack or not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nestling.training.device_order import numbers
from nestling.training.order import EPOCH

_BITS = 24
"""As many as a float32 has; a draw takes its two halves from one number."""


def normal(key: Tensor, number: int | Tensor, shape: Sequence[int]) -> Tensor:
    """Standard normal draws of a shape, the `number`-th set of them that belongs to the key (an
    int64 scalar)."""
    counters = torch.arange(math.prod(shape), device=key.device) + number * EPOCH
    drawn, most = numbers(key, counters), 1 << _BITS
    first, second = ((drawn >> (64 - _BITS)) & (most - 1), drawn & (most - 1))
    # Box and Muller; the first lies in (0, 1], so that its logarithm is finite.
    radius = torch.sqrt(-2 * torch.log((first + 1).float() / most))
    return (radius * torch.cos(2 * math.pi * second.float() / most)).reshape(*shape)


def uniform(key: Tensor, number: int | Tensor, shape: Sequence[int]) -> Tensor:
    """Draws from [0, 1) of a shape, the `number`-th set of them that belongs to the key."""
    counters = torch.arange(math.prod(shape), device=key.device) + number * EPOCH
    drawn = (numbers(key, counters) >> (64 - _BITS)) & ((1 << _BITS) - 1)
    return (drawn.float() / (1 << _BITS)).reshape(*shape)

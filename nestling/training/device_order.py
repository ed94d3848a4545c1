"""The order of rows, drawn where the data is: `training.order` in tensor arithmetic, bit for bit.

Integers of 64 bits wrap around in torch as they do in NumPy, but they have a sign there: a shift to
the right must not pull it along, and numbers are compared as if they had none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nestling.seeds import FIRST, GOLDEN, SECOND
from nestling.training.order import EPOCH


def orders(keys: Tensor, epoch: int, rows: int) -> Tensor:
    """(keys, rows) one permutation per key, for keys of shape (keys, 1)."""
    counters = torch.arange(epoch * EPOCH, epoch * EPOCH + rows, device=keys.device)
    return torch.argsort(numbers(keys, counters) ^ _signed(1 << 63), dim=1, stable=True)


def numbers(keys: Tensor, counters: Tensor) -> Tensor:
    """Random 64-bit numbers by counting, those of `seeds.numbers` with a sign."""
    z = keys + (counters + 1) * _signed(GOLDEN)
    z = (z ^ _right(z, 30)) * _signed(FIRST)
    z = (z ^ _right(z, 27)) * _signed(SECOND)
    return z ^ _right(z, 31)


def _right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return int(number) - (1 << 64) if int(number) >> 63 else int(number)

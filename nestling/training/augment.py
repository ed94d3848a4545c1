"""Changes to training images that leave their class alone. All chance comes as one 64-bit number an image (see `order`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

REACH = 2
"""How many pixels `shift` moves an image at most, in each direction."""


@dataclass(frozen=True)
class Augmentation:
    """`draws` turns 64-bit numbers of any shape into what `change(x, draws)` needs, one row an image."""

    draws: Callable[[np.ndarray], np.ndarray]
    change: Callable[[Tensor, Tensor], Tensor]


def _offsets(chance: np.ndarray) -> np.ndarray:
    places = np.uint64(2 * REACH + 1)
    down, right = (chance >> np.uint64(8)) % places, (chance >> np.uint64(36)) % places
    return np.stack([down, right], axis=-1).astype(np.int64)


def shift(x: Tensor, offsets: Tensor) -> Tensor:
    """Every image moved by up to `REACH` pixels each way, its border repeated. Other data than images is left alone."""
    if x.dim() != 4:
        return x
    batch, channels, high, wide = x.shape
    padded = F.pad(x, (REACH,) * 4, mode="replicate")
    rows = torch.arange(high, device=x.device) + offsets[:, :1]
    columns = torch.arange(wide, device=x.device) + offsets[:, 1:]
    one = torch.arange(batch, device=x.device)
    every = torch.arange(channels, device=x.device)
    return padded[one[:, None, None, None], every[None, :, None, None], rows[:, None, :, None], columns[:, None, None, :]]


AUGMENTATIONS: dict[str, Augmentation | None] = {"none": None, "shift": Augmentation(_offsets, shift)}
"""The one table of augmentations."""

"""Changes to training images that leave their class alone. All chance comes as one 64-bit number an image (see `order`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
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
    channels, high, wide = x.shape[1:]
    # Places beyond a border are those of the border itself.
    rows = (torch.arange(-REACH, high - REACH, device=x.device) + offsets[:, :1]).clamp(0, high - 1)
    columns = (torch.arange(-REACH, wide - REACH, device=x.device) + offsets[:, 1:]).clamp(0, wide - 1)
    places = (rows[:, :, None] * wide + columns[:, None, :]).flatten(1)
    return x.flatten(2).gather(2, places[:, None].expand(-1, channels, -1)).reshape(x.shape)


AUGMENTATIONS: dict[str, Augmentation | None] = {"none": None, "shift": Augmentation(_offsets, shift)}
"""The one table of augmentations."""

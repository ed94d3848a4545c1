"""Changes to training images that leave their class alone. All chance comes as one 64-bit number
per image (see `order`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nestling.seeds import numbers

REACH = 2
"""How many pixels `shift` moves an image at most, in each direction."""

PAD = 4
"""By how many pixels `crop_flip` widens an image on every side before it crops."""


@dataclass(frozen=True)
class Augmentation:
    """`draws` turns 64-bit numbers of any shape into what `change(x, draws)` needs, one row per
    image."""

    draws: Callable[[np.ndarray], np.ndarray]
    change: Callable[[Tensor, Tensor], Tensor]


def _offsets(chance: np.ndarray, reach: int = REACH) -> np.ndarray:
    places = np.uint64(2 * reach + 1)
    down, right = (chance >> np.uint64(8)) % places, (chance >> np.uint64(36)) % places
    return np.stack([down, right], axis=-1).astype(np.int64)


def shift(x: Tensor, offsets: Tensor) -> Tensor:
    """Every image moved by up to `REACH` pixels each way, its border repeated. Other data than
    images is left alone."""
    if x.dim() != 4:
        return x
    rows, columns = _window(x, offsets, REACH)
    return _picked(x, rows, columns)


def _crops(chance: np.ndarray) -> np.ndarray:
    """(down, right, whether to mirror)."""
    mirrored = (_other(chance) >> np.uint64(63)).astype(np.int64)
    return np.concatenate([_offsets(chance, PAD), mirrored[..., None]], axis=-1)


def crop_flip(x: Tensor, draws: Tensor) -> Tensor:
    """Every image with `PAD` pixels of zeros around it, cropped to its size anywhere in there,
    mirrored if so drawn. Zero is the mean colour of the data sets by name, which are standardised.
    Other data than images is left alone."""
    if x.dim() != 4:
        return x
    rows, columns = _window(x, draws[:, :2], PAD)
    columns = torch.where(draws[:, 2:] > 0, columns.flip(1), columns)
    inside = _within(rows, x.shape[2])[:, :, None] & _within(columns, x.shape[3])[:, None, :]
    return torch.where(inside[:, None], _picked(x, rows, columns), 0.0)


def _centres(chance: np.ndarray) -> np.ndarray:
    """Two numbers below 2**31, of which the place in an image of any size follows."""
    down, right = _other(chance) >> np.uint64(33), _other(chance, 1) >> np.uint64(33)
    return np.stack([down, right], axis=-1).astype(np.int64)


def cutout(x: Tensor, centres: Tensor) -> Tensor:
    """Every image with a square of half its shorter side set to zero. Its centre may lie on any
    pixel, so that some of the square may lie outside. Other data than images is left alone."""
    if x.dim() != 4:
        return x
    side = min(x.shape[2:]) // 2
    struck = [_struck(size, centres[:, k : k + 1], side) for k, size in enumerate(x.shape[2:])]
    return torch.where((struck[0][:, :, None] & struck[1][:, None, :])[:, None], 0.0, x)


def _struck(size: int, drawn: Tensor, side: int) -> Tensor:
    """(images, size) which places along a dimension lie in the square."""
    first = drawn % size - side // 2
    places = torch.arange(size, device=drawn.device)
    return (places >= first) & (places < first + side)


def _crops_and_centres(chance: np.ndarray) -> np.ndarray:
    return np.concatenate([_crops(chance), _centres(chance)], axis=-1)


def crop_flip_cutout(x: Tensor, draws: Tensor) -> Tensor:
    """`crop_flip`, then `cutout`."""
    return cutout(crop_flip(x, draws[:, :3]), draws[:, 3:])


def _other(chance: np.ndarray, number: int = 0) -> np.ndarray:
    """Another number of every image, independent of the first."""
    return numbers(chance, np.full(1, number, dtype=np.uint64))


def _window(x: Tensor, offsets: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """(images, height) and (images, width): which rows and columns an image moved by its offset
    shows, those beyond it included."""
    high, wide = x.shape[2:]
    rows = torch.arange(-reach, high - reach, device=x.device) + offsets[:, :1]
    return rows, torch.arange(-reach, wide - reach, device=x.device) + offsets[:, 1:]


def _within(places: Tensor, size: int) -> Tensor:
    return (places >= 0) & (places < size)


def _picked(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Every image's own rows and columns; places beyond a border are those of the border itself."""
    channels, high, wide = x.shape[1:]
    places = (
        rows.clamp(0, high - 1)[:, :, None] * wide + columns.clamp(0, wide - 1)[:, None, :]
    ).flatten(1)
    return x.flatten(2).gather(2, places[:, None].expand(-1, channels, -1)).reshape(x.shape)


AUGMENTATIONS: dict[str, Augmentation | None] = {
    "none": None,
    "shift": Augmentation(_offsets, shift),
    "crop-flip": Augmentation(_crops, crop_flip),
    "cutout": Augmentation(_centres, cutout),
    "crop-flip-cutout": Augmentation(_crops_and_centres, crop_flip_cutout),
}
"""The one table of augmentations."""

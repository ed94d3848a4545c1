"""Changes to training images that leave their class alone. All chance comes from torch's generator, which the trainer seeds."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

REACH = 2
"""How many pixels `shift` moves an image at most, in each direction."""


def unchanged(x: Tensor) -> Tensor:
    """The batch as it is."""
    return x


def shift(x: Tensor) -> Tensor:
    """Every image moved by up to `REACH` pixels each way, its border repeated. Other data than images is left alone."""
    if x.dim() != 4:
        return x
    batch, channels, high, wide = x.shape
    padded = F.pad(x, (REACH,) * 4, mode="replicate")
    down, right = torch.randint(0, 2 * REACH + 1, (2, batch)).to(x.device)
    rows = torch.arange(high, device=x.device) + down[:, None]
    columns = torch.arange(wide, device=x.device) + right[:, None]
    one = torch.arange(batch, device=x.device)
    every = torch.arange(channels, device=x.device)
    return padded[one[:, None, None, None], every[None, :, None, None], rows[:, None, :, None], columns[:, None, None, :]]


AUGMENTATIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": unchanged, "shift": shift}
"""The one table of augmentations."""

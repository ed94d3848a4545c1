"""Moved images are parts of the image with its border repeated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nestling.training.augment import AUGMENTATIONS, REACH, shift


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 9, 5), (2, 1, 3)])
def test_a_shift_cuts_a_window_out_of_the_widened_image(shape: tuple[int, int, int]) -> None:
    places = 2 * REACH + 1
    offsets = torch.cartesian_prod(torch.arange(places), torch.arange(places))
    x = torch.randn(len(offsets), *shape, generator=torch.Generator().manual_seed(0))
    wide = F.pad(x, (REACH,) * 4, mode="replicate")
    high, across = shape[1:]
    windows = [w[:, d : d + high, r : r + across] for w, (d, r) in zip(wide, offsets.tolist(), strict=True)]
    assert torch.equal(shift(x, offsets), torch.stack(windows))


def test_other_data_than_images_is_left_alone() -> None:
    x = torch.randn(4, 7)
    assert shift(x, torch.zeros(4, 2, dtype=torch.int64)) is x


def test_every_offset_is_drawn() -> None:
    augment = AUGMENTATIONS["shift"]
    assert augment is not None
    drawn = augment.draws(np.random.default_rng(0).integers(0, 2**63, (40, 50), dtype=np.uint64))
    assert drawn.shape == (40, 50, 2)
    assert sorted(set(map(tuple, drawn.reshape(-1, 2).tolist()))) == [(d, r) for d in range(5) for r in range(5)]

"""Changed images are what a plain reference makes of the same draws, on every engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import nestling
from nestling import EngineConfig, Train
from nestling.training.augment import AUGMENTATIONS, PAD, REACH, crop_flip, cutout, shift
from tests.small import small


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 9, 5), (2, 1, 3)])
def test_a_shift_cuts_a_window_out_of_the_widened_image(shape: tuple[int, int, int]) -> None:
    places = 2 * REACH + 1
    offsets = torch.cartesian_prod(torch.arange(places), torch.arange(places))
    x = torch.randn(len(offsets), *shape, generator=torch.Generator().manual_seed(0))
    wide = F.pad(x, (REACH,) * 4, mode="replicate")
    high, across = shape[1:]
    windows = [
        w[:, d : d + high, r : r + across] for w, (d, r) in zip(wide, offsets.tolist(), strict=True)
    ]
    assert torch.equal(shift(x, offsets), torch.stack(windows))


def test_other_data_than_images_is_left_alone() -> None:
    x = torch.randn(4, 7)
    assert shift(x, torch.zeros(4, 2, dtype=torch.int64)) is x


def test_every_offset_is_drawn() -> None:
    augment = AUGMENTATIONS["shift"]
    assert augment is not None
    drawn = augment.draws(np.random.default_rng(0).integers(0, 2**63, (40, 50), dtype=np.uint64))
    assert drawn.shape == (40, 50, 2)
    assert sorted(set(map(tuple, drawn.reshape(-1, 2).tolist()))) == [
        (d, r) for d in range(5) for r in range(5)
    ]


def images(count: int, shape: tuple[int, int, int]) -> torch.Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (2, 5, 3)])
def test_crop_flip_cuts_a_window_out_of_the_image_with_zeros_around_it(
    shape: tuple[int, int, int],
) -> None:
    places = torch.arange(2 * PAD + 1)
    draws = torch.cartesian_prod(places, places, torch.arange(2))
    x = images(len(draws), shape)
    wide, (high, across) = F.pad(x, (PAD,) * 4), shape[1:]
    windows = [
        w[:, d : d + high, r : r + across]
        for w, (d, r, _) in zip(wide, draws.tolist(), strict=True)
    ]
    expected = [
        w.flip(-1) if mirrored else w
        for w, (*_, mirrored) in zip(windows, draws.tolist(), strict=True)
    ]
    assert torch.equal(crop_flip(x, draws), torch.stack(expected))


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (2, 5, 9)])
def test_cutout_strikes_a_square_that_may_lie_outside(shape: tuple[int, int, int]) -> None:
    _, high, wide = shape
    draws = torch.cartesian_prod(torch.arange(high), torch.arange(wide)) + 3 * high * wide
    expected = images(len(draws), shape)
    cut, half = cutout(expected.clone(), draws), min(high, wide) // 2 // 2
    for image, (down, right) in zip(expected, draws.tolist(), strict=True):
        top, left = down % high - half, right % wide - half
        side = min(high, wide) // 2
        image[:, max(top, 0) : max(top + side, 0), max(left, 0) : max(left + side, 0)] = 0
    assert torch.equal(cut, expected)


def test_both_are_one_after_the_other() -> None:
    x, augment = images(40, (3, 16, 16)), AUGMENTATIONS["crop-flip-cutout"]
    assert augment is not None
    draws = torch.from_numpy(augment.draws(chance(40)))
    assert torch.equal(augment.change(x, draws), cutout(crop_flip(x, draws[:, :3]), draws[:, 3:]))


def chance(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**64, shape, dtype=np.uint64)


@pytest.mark.parametrize(
    ("name", "wide"), [("crop-flip", 3), ("cutout", 2), ("crop-flip-cutout", 5)]
)
def test_draws_are_a_row_for_every_number_whatever_its_company(name: str, wide: int) -> None:
    augment = AUGMENTATIONS[name]
    assert augment is not None
    given = chance(6, 7)
    drawn = augment.draws(given)
    assert drawn.shape == (6, 7, wide) and drawn.dtype == np.int64
    assert (drawn[2, 3:5] == augment.draws(given[2, 3:5])).all()
    x = torch.randn(42, 7)
    assert augment.change(x, torch.from_numpy(drawn.reshape(42, wide))) is x


def test_crops_mirrors_and_holes_are_drawn_evenly_and_apart() -> None:
    augment = AUGMENTATIONS["crop-flip-cutout"]
    assert augment is not None
    drawn = augment.draws(chance(40000))
    cases = np.stack(
        [
            drawn[:, 0] == 4,
            drawn[:, 1] == 8,
            drawn[:, 2] == 1,
            drawn[:, 3] % 28 < 14,
            drawn[:, 4] % 28 < 14,
        ]
    )
    shares = (1 / 9, 1 / 9, 1 / 2, 1 / 2, 1 / 2)
    assert np.allclose(cases.mean(1), shares, atol=0.01)
    together = cases.astype(float) @ cases.T.astype(float) / cases.shape[1]
    assert np.allclose(
        together[~np.eye(5, dtype=bool)],
        np.outer(shares, shares)[~np.eye(5, dtype=bool)],
        atol=0.01,
    )


def changed(name: str, engine: EngineConfig) -> torch.Tensor:
    train = Train(epochs=1, batch=16, lr=0.01, momentum=0.5, augment=name)
    state = nestling.run(
        small("fedavg", rounds=2, train=train, engine=engine)
    ).federation.method.state()["weights"]
    return torch.cat([t.reshape(-1).double() for t in state.values()])


NEW = [name for name in AUGMENTATIONS if name not in ("none", "shift")]


@pytest.mark.parametrize("name", NEW)
def test_processes_change_images_alike_to_the_bit(name: str) -> None:
    inline = changed(name, EngineConfig("inline"))
    assert torch.equal(inline, changed(name, EngineConfig("pool", 2)))
    assert not torch.allclose(inline, changed("none", EngineConfig("inline")), atol=1e-4)


@pytest.mark.parametrize("name", NEW)
@pytest.mark.usefixtures("images_as_they_are")
def test_a_stack_changes_images_alike(name: str) -> None:
    inline, stacked = (changed(name, EngineConfig(engine, 1)) for engine in ("inline", "cohort"))
    assert float((inline - stacked).norm()) < 1e-5 * float(inline.norm())

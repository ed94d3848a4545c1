"""Made-up colour images that a network can learn, for machines without data sets.

Ten smooth random pictures, one a class. A sample is its class's picture, moved by a few pixels,
dimmed or brightened, under noise.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

CLASSES, SIZE = 10, 32
SEED = 7
REACH = 3
"""How many pixels a picture is moved at most, each way."""
NOISE = 45.0
CONTRAST = (30.0, 60.0)
"""The least and the greatest deviation of a picture, in grey values out of 255; `NOISE` is that of
the noise."""
_CHUNK = 5_000


def made_up_images(train: int = 50_000, test: int = 10_000) -> Path:
    """The .npz file of so many images in the temporary folder; written on first use."""
    settings = (train, test, SEED, REACH, NOISE, *CONTRAST)
    path = (
        Path(tempfile.gettempdir())
        / "nestling-benchmarks"
        / f"images-{'-'.join(f'{s:g}' for s in settings)}.npz"
    )
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(unfinished, **_arrays(train, test))
        unfinished.replace(path)
    return path


def _arrays(train: int, test: int) -> dict[str, np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(SEED))
    pictures = np.stack([_smooth(rng) for _ in range(CLASSES)])
    rows = train + test
    y = rng.permutation(np.arange(rows) % CLASSES)
    x = np.concatenate(
        [_samples(pictures, y[start : start + _CHUNK], rng) for start in range(0, rows, _CHUNK)]
    )
    return {"x": x, "y": y, "test": np.arange(rows) >= train}


def _smooth(rng: np.random.Generator) -> np.ndarray:
    """A picture of a few slow waves, larger than a sample by the reach of the shifts, of values
    around 0."""
    grid = np.arange(SIZE + 2 * REACH) / SIZE
    picture = np.zeros((3, len(grid), len(grid)))
    for _ in range(6):
        down, right = rng.uniform(-2, 2, 2)
        phase, strength = rng.uniform(0, 2 * np.pi, 3), rng.normal(size=3)
        wave = 2 * np.pi * (down * grid[:, None] + right * grid[None, :])
        picture += strength[:, None, None] * np.sin(wave + phase[:, None, None])
    return (picture / picture.std()).astype(np.float32)


def _samples(pictures: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    down, right = rng.integers(0, 2 * REACH + 1, (2, len(y)))
    rows, columns = (start[:, None] + np.arange(SIZE) for start in (down, right))
    moved = pictures[
        y[:, None, None, None],
        np.arange(3)[None, :, None, None],
        rows[:, None, :, None],
        columns[:, None, None, :],
    ]
    contrast = rng.uniform(*CONTRAST, (len(y), 1, 1, 1)).astype(np.float32)
    noise = NOISE * rng.standard_normal(moved.shape, dtype=np.float32)
    return np.clip(128 + contrast * moved + noise, 0, 255).astype(np.uint8)

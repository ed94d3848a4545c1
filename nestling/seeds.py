"""Derived random streams.

Every stream comes from (experiment seed, purpose, client, round, ...), never from shared state, so
that a result does not depend on the engine, on the number of workers, or on the order in which
clients finished.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import numpy as np
import torch

# The constants of the splitmix64 finaliser.
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GOLDEN, _FIRST, _SECOND = np.uint64(GOLDEN), np.uint64(FIRST), np.uint64(SECOND)


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose: `derive(seed, "batches", client, round)`."""
    key = "\x1f".join([str(int(seed)), *(f"{type(part).__name__}:{part}" for part in purpose)])
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def stream(seed: int, *purpose: str | int) -> np.random.Generator:
    """A NumPy generator for one purpose."""
    return np.random.Generator(np.random.PCG64(derive(seed, *purpose)))


def numbers(keys: int | np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Random 64-bit numbers by counting: each is a hash of its key and its counter, so that any of
    them can be computed without the others and many at once. Keys and counters are broadcast
    against each other."""
    # Arrays wrap around silently, as is wanted here; scalars would warn.
    z = np.asarray(keys, dtype=np.uint64) + (counters + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))


@contextlib.contextmanager
def torch_seeded(seed: int, *purpose: str | int) -> Iterator[None]:
    """Torch's global generator seeded for one purpose inside the block, and put back afterwards."""
    before = torch.get_rng_state()
    # torch.manual_seed would also note where a GPU that is not in use yet was seeded, which takes
    # longer than a small client's work.
    torch.default_generator.manual_seed(derive(seed, *purpose))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(derive(seed, *purpose))
    try:
        yield
    finally:
        torch.set_rng_state(before)

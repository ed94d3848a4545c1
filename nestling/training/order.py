"""The order of rows and all other chance in batches, by counting.

A random number is a hash of (key, counter) (see `seeds.numbers`), and a key belongs to one client's phase in one round. Nothing has
to be drawn in sequence, so the draws of a whole group of clients are made at once and equal those of each client alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from nestling.seeds import derive, numbers

_EPOCH = 2**32


@dataclass(frozen=True)
class Schedule:
    """Which rows every client of a group trains on, step by step.

    rows:    (clients, steps, batch) numbers of rows; places beyond a batch's length hold 0.
    lengths: (clients, steps) rows in each batch; 0 where a client has no such step.
    """

    rows: np.ndarray
    lengths: np.ndarray

    @property
    def steps(self) -> int:
        return self.rows.shape[1]

    @cached_property
    def even(self) -> bool:
        """Whether all batches of all clients are full."""
        return bool((self.lengths == self.rows.shape[2]).all())

    @property
    def steps_taken(self) -> list[int]:
        """Each client's number of steps."""
        return (self.lengths > 0).sum(1).tolist()

    @property
    def samples(self) -> list[int]:
        """How many samples each client sees."""
        return self.lengths.sum(1).tolist()


def keys(purpose: str, seed: int, clients: Sequence[int], round: int, phase: int) -> np.ndarray:
    """One key a client for one purpose."""
    return numbers(derive(seed, purpose, round, phase), np.asarray(clients, dtype=np.uint64))


def orders(keys: np.ndarray, epoch: int, rows: int) -> np.ndarray:
    """(keys, rows) one permutation a key."""
    return np.argsort(numbers(keys[:, None], counters(epoch * _EPOCH, rows)), axis=1, kind="stable")


def counters(start: int, count: int) -> np.ndarray:
    """`start`, `start` + 1, …"""
    return np.arange(start, start + count, dtype=np.uint64)


def order(seed: int, client: int, round: int, phase: int, epoch: int, rows: int) -> np.ndarray:
    """One client's order of rows in one epoch of a phase."""
    return orders(keys("order", seed, [client], round, phase), epoch, rows)[0]


def schedule(
    keys: np.ndarray, sizes: Sequence[int], *, epochs: int, batch: int, steps: int = 0, drop_last: bool = False, least: int = 1
) -> Schedule:
    """Rows in batches for clients with `sizes` rows. A batch shorter than `least` is left out, and so is a last short one with
    `drop_last`; `steps` > 0 stops after that many."""
    if sizes and all(n == sizes[0] for n in sizes):
        return _equal_schedule(keys, sizes[0], epochs, batch, steps, _per_epoch(sizes[0], batch, drop_last, least))
    counts = [_per_epoch(n, batch, drop_last, least) for n in sizes]
    totals = [min(c * epochs, steps) if steps else c * epochs for c in counts]
    longest, wide = max(totals, default=0), min(batch, max(sizes, default=0))
    rows = np.zeros((len(sizes), longest, wide), dtype=np.int64)
    lengths = np.zeros((len(sizes), longest), dtype=np.int64)
    for size in sorted(set(sizes)):
        own = [k for k, n in enumerate(sizes) if n == size]
        count, total = counts[own[0]], totals[own[0]]
        if not total:
            continue
        needed = range(-(-total // count))
        blocks = [_batches(orders(keys[own], epoch, size), count, wide) for epoch in needed]
        rows[own, :total] = np.concatenate(blocks, axis=1)[:, :total]
        full = np.minimum(batch, size - batch * np.arange(count))
        lengths[own, :total] = np.tile(full, len(needed))[:total]
    return Schedule(rows, lengths)


def _equal_schedule(keys: np.ndarray, size: int, epochs: int, batch: int, steps: int, count: int) -> Schedule:
    """The batches of clients that all have `size` rows, `count` batches an epoch."""
    total, wide = min(count * epochs, steps) if steps else count * epochs, min(batch, size)
    needed = -(-total // count) if total else 0
    blocks = [_batches(orders(keys, epoch, size), count, wide) for epoch in range(needed)]
    rows = blocks[0] if needed == 1 else np.concatenate(blocks, 1) if needed else np.zeros((len(keys), 0, wide), dtype=np.int64)
    return Schedule(rows[:, :total], np.broadcast_to(_lengths(size, batch, count, total), (len(keys), total)))


@lru_cache(maxsize=64)
def _lengths(size: int, batch: int, count: int, total: int) -> np.ndarray:
    return np.minimum(batch, size - batch * (np.arange(total) % max(count, 1)))


def _per_epoch(size: int, batch: int, drop_last: bool, least: int) -> int:
    """How many batches an epoch has."""
    full, rest = divmod(size, batch)
    short = rest and rest >= least and not (drop_last and full)
    return (full if batch >= least else 0) + bool(short)


def _batches(order: np.ndarray, count: int, wide: int) -> np.ndarray:
    """(clients, rows) → (clients, count, wide), the last batch filled up with 0."""
    if order.shape[1] == count * wide:
        return order.reshape(len(order), count, wide)
    padded = np.zeros((len(order), count * wide), dtype=np.int64)
    taken = min(order.shape[1], count * wide)
    padded[:, :taken] = order[:, :taken]
    return padded.reshape(len(order), count, wide)

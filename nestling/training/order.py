"""The order of rows and all other chance in batches, by counting.

A random number is a hash of (key, counter) (see `seeds.numbers`), and a key belongs to one client's
phase in one round. Nothing has to be drawn in sequence, so the draws of a whole group of clients
are made at once and equal those of each client alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np

from nestling.seeds import derive, numbers

EPOCH = 2**32
"""How many numbers an epoch may take."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """Which rows every client of a group trains on, step by step.

    lengths: (clients, steps) rows in each batch; 0 where a client has no such step.
    wide:    the rows in the widest batch.
    draw:    makes `rows`, when somebody asks for them.
    keys:    where all clients train on the same number of rows in full batches, the keys that their
             orders are drawn by.
    """

    lengths: np.ndarray
    wide: int
    draw: Callable[[], np.ndarray]
    keys: np.ndarray | None = None

    @cached_property
    def rows(self) -> np.ndarray:
        """(clients, steps, batch) numbers of rows; places beyond a batch's length hold 0."""
        return self.draw()

    @property
    def steps(self) -> int:
        """The most steps that any client of the group takes."""
        return self.lengths.shape[1]

    @cached_property
    def even(self) -> bool:
        """Whether all batches of all clients are full."""
        return self.keys is not None or bool((self.lengths == self.wide).all())

    @property
    def steps_taken(self) -> list[int]:
        """Each client's number of steps."""
        return [self.steps] * len(self.lengths) if self.even else (self.lengths > 0).sum(1).tolist()

    @property
    def samples(self) -> list[int]:
        """How many samples each client sees."""
        return (
            [self.steps * self.wide] * len(self.lengths)
            if self.even
            else self.lengths.sum(1).tolist()
        )


def keys(purpose: str, seed: int, clients: Sequence[int], round: int, phase: int) -> np.ndarray:
    """One key per client for one purpose."""
    return numbers(derive(seed, purpose, round, phase), np.asarray(clients, dtype=np.uint64))


def orders(keys: np.ndarray, epoch: int, rows: int) -> np.ndarray:
    """(keys, rows) one permutation per key."""
    return np.argsort(numbers(keys[:, None], counters(epoch * EPOCH, rows)), axis=1, kind="stable")


def counters(start: int, count: int) -> np.ndarray:
    """`start`, `start` + 1, …"""
    return np.arange(start, start + count, dtype=np.uint64)


def order(seed: int, client: int, round: int, phase: int, epoch: int, rows: int) -> np.ndarray:
    """One client's order of rows in one epoch of a phase."""
    return orders(keys("order", seed, [client], round, phase), epoch, rows)[0]


def schedule(
    keys: np.ndarray,
    sizes: Sequence[int],
    *,
    epochs: int,
    batch: int,
    steps: int = 0,
    drop_last: bool = False,
    least: int = 1,
) -> Schedule:
    """Rows in batches for clients with `sizes` rows. A batch shorter than `least` is left out, and
    so is a last short one with `drop_last`; `steps` > 0 stops after that many."""
    if sizes and all(n == sizes[0] for n in sizes):
        return _equal_schedule(
            keys, sizes[0], epochs, batch, steps, _per_epoch(sizes[0], batch, drop_last, least)
        )
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
    return Schedule(lengths, wide, lambda: rows)


def _equal_schedule(
    keys: np.ndarray, size: int, epochs: int, batch: int, steps: int, count: int
) -> Schedule:
    """The batches of clients that all have `size` rows, `count` batches per epoch."""
    total, wide = min(count * epochs, steps) if steps else count * epochs, min(batch, size)
    lengths = np.broadcast_to(_lengths(size, batch, count, total), (len(keys), total))
    whole = total == count * epochs and size == count * wide and size > 0
    return Schedule(
        lengths, wide, partial(_equal_rows, keys, size, wide, count, total), keys if whole else None
    )


def _equal_rows(keys: np.ndarray, size: int, wide: int, count: int, total: int) -> np.ndarray:
    needed = -(-total // count) if total else 0
    blocks = [_batches(orders(keys, epoch, size), count, wide) for epoch in range(needed)]
    rows = (
        blocks[0]
        if needed == 1
        else np.concatenate(blocks, 1)
        if needed
        else np.zeros((len(keys), 0, wide), dtype=np.int64)
    )
    return rows[:, :total]


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

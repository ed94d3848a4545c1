"""Where buffers lie in one block of memory, given when each of them exists."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGNED = 4
# placing n buffers takes some n² steps; `EFFORT` bounds all of them
MOST_TRIES, EFFORT = 400, 200_000


@dataclass
class Buffer:
    """Bytes that exist from step `start` to step `end`, both included."""

    size: int
    start: int
    end: int


def aligned(size: int) -> int:
    """`size` rounded up so that what follows may hold floats."""
    return -(-size // ALIGNED) * ALIGNED


def floor_of(buffers: Sequence[Buffer]) -> int:
    """The most bytes that exist together: no placement takes less."""
    changes: dict[int, int] = {}
    for buffer in buffers:
        changes[buffer.start] = changes.get(buffer.start, 0) + aligned(buffer.size)
        changes[buffer.end + 1] = changes.get(buffer.end + 1, 0) - aligned(buffer.size)
    return max(accumulate(changes[step] for step in sorted(changes)), default=0)


def place(buffers: Sequence[Buffer]) -> tuple[list[int], int]:
    """An offset for each buffer, so that none overlap while both exist, and the bytes of the whole.

    Greedy: one after another to the lowest place that is free for as long as it exists, the largest
            first. Where that misses the floor,
    other orders are tried, and at last small changes of the best; always the same ones, so that a
    plan can be made again.
    """
    floor, least = floor_of(buffers), -1
    order, offsets = list[int](), list[int]()
    for tried in _orders(buffers):
        found, total = _greedy(buffers, tried)
        if least < 0 or total < least:
            order, offsets, least = tried, found, total
        if least == floor:
            return offsets, least
    return _improved(buffers, order, floor)


def _orders(buffers: Sequence[Buffer]) -> Iterator[list[int]]:
    keys: tuple[Callable[[Buffer], tuple[int, ...]], ...] = (
        lambda b: (-b.size, b.start),
        lambda b: (b.start - b.end, -b.size),
        lambda b: (-b.size * (b.end - b.start + 1), b.start),
        lambda b: (b.start, -b.size),
        lambda b: (-b.end, -b.size),
    )
    for key in keys:
        yield sorted(range(len(buffers)), key=lambda number: key(buffers[number]))


def _improved(buffers: Sequence[Buffer], order: list[int], floor: int) -> tuple[list[int], int]:
    """The best of orders that differ from one another in the place of one buffer."""
    draw = random.Random(0)
    best, least = _greedy(buffers, order)
    for _ in range(min(MOST_TRIES, EFFORT // len(order) ** 2)):
        tried = order.copy()
        tried.insert(draw.randrange(len(order)), tried.pop(draw.randrange(len(order))))
        offsets, total = _greedy(buffers, tried)
        if total <= least:
            order, best, least = tried, offsets, total
        if least == floor:
            break
    return best, least


def _greedy(buffers: Sequence[Buffer], order: list[int]) -> tuple[list[int], int]:
    offsets = [0] * len(buffers)
    placed: list[int] = []  # by offset
    for number in order:
        buffer, at = buffers[number], 0
        for other in placed:
            there = buffers[other]
            if there.start > buffer.end or there.end < buffer.start:
                continue
            if offsets[other] - at >= aligned(buffer.size):
                break
            at = max(at, offsets[other] + aligned(there.size))
        offsets[number] = at
        where = next((k for k, other in enumerate(placed) if offsets[other] > at), len(placed))
        placed.insert(where, number)
    return offsets, max((offsets[k] + aligned(buffers[k].size) for k in order), default=0)

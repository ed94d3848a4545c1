"""What a program is given to train, and what all programs share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestling.training.lane import Lane, beside
from nestling.training.optimisers import Buffers
from nestling.training.stacks.group import Group

_DONE = object()


@dataclass(eq=False)
class LaneJob:
    """Some clients of a group: their order of batches, and where their results go, one row each."""

    group: Group
    table: Tensor
    out: Tensor
    losses: Tensor
    others: dict[str, Tensor]


def side_by_side(work: Sequence[tuple[Lane, Iterator[None]]]) -> None:
    """Plays the steps of several lanes: everybody's first, then everybody's second. Launching costs
    about as much as running, so that a lane launched as a whole would be done before the next one
    began."""
    with beside([lane for lane, _ in work]):
        active = list(work)
        while active:
            active = [(lane, steps) for lane, steps in active if _next(lane, steps)]


def _next(lane: Lane, steps: Iterator[None]) -> bool:
    lane.enter()
    return next(steps, _DONE) is not _DONE


def zero(memory: Buffers, *tensors: Tensor) -> None:
    """Everything back to its start."""
    torch._foreach_zero_([*memory.everything(), *tensors])

"""What a gateway wants of those who carry jobs to its devices."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from nestling.errors import InputError
from nestling.tiny.link.orders import Orders
from nestling.tiny.runtime.job import Done


@dataclass(frozen=True)
class Facts:
    """A device as it described itself.

    rows, shape: of its data, (channels, height, width). counts: its rows by class; None where
                 nobody said.
    crc: of its data. ram: bytes that a job may take (0: not said).
    """

    rows: int
    shape: tuple[int, int, int]
    counts: tuple[int, ...] | None
    crc: int
    ram: int = 0


class Link(Protocol):
    """Carries jobs to devices, one at a time for each, and none of its functions waits for a
    device."""

    def open(self) -> None:
        """Begins to reach the devices; they may be heard from later."""

    def close(self) -> None:
        """Lets go of the devices without waiting for the jobs they are at."""

    def facts(self, device: str) -> Facts | None:
        """What is known of a device: None before it was first heard from."""

    def run(self, device: str, orders: Orders) -> Future[Done]:
        """Has a device do a job; one that it was still at work on is given up. A device that is
        gone is an exception."""


def board_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """The form of samples as a board has them: a sequence has height 1, a vector is all
    channels."""
    if not 1 <= len(shape) <= 3:
        raise InputError(
            f"samples of {len(shape)} dimensions", field="data", fix="one, two or three"
        )
    channels, *rest = shape
    height, width = (1, *rest) if len(rest) == 1 else rest or (1, 1)
    return channels, height, width


def checked(done: Done, orders: Orders) -> Done:
    """What a device gave, if it can be of this job."""
    steps, samples = len(orders.sizes), len(orders.rows)
    if done.weights.dtype != np.float32 or done.weights.shape != (orders.header.params,):
        raise InputError(
            f"{done.weights.dtype} weights of shape {done.weights.shape}, the job has "
            f"{orders.header.params}"
        )
    if (done.steps, done.samples) != (steps, samples):
        raise InputError(
            f"{done.steps} steps on {done.samples} samples where {steps} on {samples} were ordered"
        )
    if not np.isfinite(done.loss):
        raise InputError(f"a loss of {done.loss}")
    return done

"""A job: one client's training in one round as a board is told it, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nestling.planning.descriptor import DescriptorSettings

if TYPE_CHECKING:
    from nestling.planning.plan import MemoryPlan


@dataclass(frozen=True, eq=False)
class Step:
    """One batch: which rows of the board's data, how far each image is moved (down, right; see
    `training.augment.shift`), and how many inputs of the last layer the inner loss sees (0: there
    is none)."""

    rows: np.ndarray
    shifts: np.ndarray | None = None
    inner: int = 0


@dataclass(frozen=True, eq=False)
class Job:
    """All that a board needs beside its firmware and its data.

    weights: float32, in the order of the plan. anchor: the trained part of what the proximal term
             pulls towards.
    mask: flags, one per trained parameter. present: one float per class. targets: (rows of the
          board's data, classes) float32.
    """

    plan: MemoryPlan
    weights: np.ndarray
    settings: DescriptorSettings
    steps: Sequence[Step]
    anchor: np.ndarray | None = None
    mask: np.ndarray | None = None
    present: np.ndarray | None = None
    targets: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Done:
    """What a job gave: the weights, and the loss summed over the samples seen."""

    weights: np.ndarray
    loss: float
    steps: int
    samples: int

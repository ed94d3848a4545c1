"""What is learned: what a target is, what a model's outputs say, and what is measured of them.

How good a model is, is a mean over test rows of one number a row, whatever the task; 1 is perfect.
A client's own view of it weights the rows by their kind, as its own data has them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from nestling.tasks.losses import losses

Measured = tuple[dict[str, Any], dict[str, Any]]
"""The metrics that are one number each, and those by class."""


@dataclass(frozen=True)
class Answers:
    """What a model says of rows; with a first dimension, what several say. `found` is what it takes
    for true, `sure` how sure it is where the task has that, `outputs` are kept where somebody wants
    them."""

    found: Tensor
    loss: Tensor
    sure: Tensor | None = None
    outputs: Tensor | None = None

    def each(self) -> list[Answers]:
        """Those of several models, one by one."""
        some = [self.found, self.loss, self.sure, self.outputs]
        parts = [[None] * len(self.found) if t is None else list(t) for t in some]
        return [Answers(*own) for own in zip(*parts, strict=True)]


def joined(found: Sequence[Answers], along: int = 0) -> Answers:
    """Answers one after another: those of several models to the same rows, or of the same models to
    more rows."""

    def both(name: str) -> Any:
        parts = [getattr(one, name) for one in found]
        return None if parts[0] is None else torch.cat(parts, along)

    return Answers(both("found"), both("loss"), both("sure"), both("outputs"))


class Task(ABC):
    """What is learned from the rows of one data set."""

    name: ClassVar[str]
    score: ClassVar[str]  # what ranks models, in a word
    has_classes: ClassVar[bool] = False  # whether a target is one class of several
    network: ClassVar[str] = ""  # what suits it where the user names none; "": what suits the data
    alone: ClassVar[bool] = True  # whether how right it is about a row depends on that row alone

    def shape(self, target: Tensor, outputs: int) -> tuple[int, ...]:
        """The shape of what a network with so many outputs must say of rows with these targets."""
        return (len(target), outputs)

    @abstractmethod
    def answers(self, outputs: Tensor, y: Tensor, keep: bool = False) -> Answers:
        """What (…, rows, outputs) say of rows with targets `y`."""

    @abstractmethod
    def right(self, answers: Answers, y: Tensor) -> Tensor:
        """How right one model is about each row; the mean over the rows is its score."""

    @abstractmethod
    def measured(self, answers: Answers, y: Tensor) -> Measured:
        """The metrics beside the score, of one model or of several one after another."""


def losses_of(outputs: Tensor, y: Tensor) -> Tensor:
    """The loss of every row, of one model's outputs or (with one dimension more) of several."""
    of_one = y.dim() + (0 if y.is_floating_point() or y.dtype == torch.bool else 1)
    if outputs.dim() == of_one:
        return losses(outputs, y)
    return torch.stack([losses_of(one, y) for one in outputs])


def spread(values: Sequence[float]) -> dict[str, Any]:
    """How unequal clients' personal scores are: the worst, what a tenth do not reach, and their
    variance; None where a model that diverged has a score of no finite number."""
    if not values:
        return {}
    with np.errstate(invalid="ignore"):
        tenth, variance = float(np.quantile(values, 0.1)), float(np.var(values))
    return {
        "personal_worst": finite(float(min(values))),
        "personal_tenth": finite(tenth),
        "personal_variance": finite(variance),
    }


def finite(value: float) -> float | None:
    """A number that a file can hold; None for others."""
    return value if math.isfinite(value) else None

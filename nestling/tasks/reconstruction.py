"""Reconstruction, for anomaly detection: who has seen normal rows only cannot rebuild others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nestling.tasks.task import Answers, Measured, Task, finite, losses_of

FALSE_ALARMS = 0.1
"""Up to which share of false alarms the partial area is taken, as DCASE and MLPerf Tiny do."""


@dataclass(frozen=True, eq=False)
class Reconstruction(Task):
    """A target is the sample itself; `odd` flags the test rows that are anomalous."""

    name: ClassVar[str] = "reconstruction"
    score: ClassVar[str] = "AUROC"
    network: ClassVar[str] = "autoencoder"
    alone: ClassVar[bool] = False

    odd: Tensor

    def answers(self, outputs: Tensor, y: Tensor, keep: bool = False) -> Answers:
        """How far (…, rows, values) are from the samples `y`: what is found is the error."""
        loss = losses_of(outputs.float(), y)
        return Answers(loss, loss, None, outputs if keep else None)

    def right(self, answers: Answers, y: Tensor) -> Tensor:  # noqa: ARG002 (as all tasks)
        """Of the rows of the other kind, the share on whose right side a row's error is, ties by
        half: over all rows that is the area under the receiver's curve."""
        odd = self._flags(answers)
        good, bad = answers.loss[~odd].double(), answers.loss[odd].double()
        found = torch.zeros(len(odd), dtype=torch.float64, device=odd.device)
        found[odd] = _share_below(good, bad)
        found[~odd] = 1 - _share_below(bad, good)
        return found

    def measured(self, answers: Answers, y: Tensor) -> Measured:
        """The area under the receiver's curve, the part of it with few false alarms, and the error
        on normal rows."""
        odd = self._flags(answers)
        normal = answers.loss[~odd].double()
        return {
            "auroc": finite(float(self.right(answers, y).mean())),
            "pauc": finite(partial_area(answers.loss.double(), odd, FALSE_ALARMS)),
            "test_loss": finite(float(normal.mean())),
        }, {}

    def _flags(self, answers: Answers) -> Tensor:
        """Flags of all the rows answered: those of several models stand one after another."""
        odd = self.odd.to(answers.loss.device)
        return odd.repeat(len(answers.loss) // len(odd))


def _share_below(some: Tensor, values: Tensor) -> Tensor:
    """For each value the share of `some` that is smaller, equal ones counted half."""
    ordered = some.nan_to_num(torch.inf).sort().values
    at = values.nan_to_num(torch.inf)
    left, right = (torch.searchsorted(ordered, at, right=side) for side in (False, True))
    return (left + right).double() / (2 * len(some))


def partial_area(error: Tensor, odd: Tensor, most: float) -> float:
    """The area under the receiver's curve up to a share of false alarms, standardised so that
    chance is 0.5 and perfect is 1 (McClish)."""
    order = error.nan_to_num(torch.inf).argsort(descending=True, stable=True)
    values, hits = error[order], odd[order].double()
    last = torch.ones(len(values), dtype=torch.bool, device=values.device)
    last[:-1] = values[1:] != values[:-1]  # equal errors are one step of the curve
    caught = torch.cat([hits.new_zeros(1), hits.cumsum(0)[last]]) / hits.sum()
    alarms = torch.cat([hits.new_zeros(1), (1 - hits).cumsum(0)[last]]) / (1 - hits).sum()
    start, end = alarms[:-1].clamp(max=most), alarms[1:].clamp(max=most)
    wide = (alarms[1:] - alarms[:-1]).clamp(min=1e-300)
    rise = (caught[1:] - caught[:-1]) / wide
    low, high = (caught[:-1] + rise * (edge - alarms[:-1]) for edge in (start, end))
    area = float(((low + high) / 2 * (end - start)).sum())
    chance = most**2 / 2
    return (1 + (area - chance) / (most - chance)) / 2

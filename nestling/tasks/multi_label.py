"""Multi-label: of several labels, each is true of a row or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nestling.tasks.task import Answers, Measured, Task, finite, losses_of


@dataclass(frozen=True)
class MultiLabel(Task):
    """A target is a flag for every label; an output above 0 says that the label is true."""

    name: ClassVar[str] = "multi-label"
    score: ClassVar[str] = "exact match"

    def answers(self, outputs: Tensor, y: Tensor, keep: bool = False) -> Answers:
        """What (…, rows, labels) logits say of rows with flags `y`."""
        return Answers(outputs > 0, losses_of(outputs.float(), y), None, outputs if keep else None)

    def right(self, answers: Answers, y: Tensor) -> Tensor:
        """Which rows it is right about in all labels."""
        return (answers.found == y).all(-1)

    def measured(self, answers: Answers, y: Tensor) -> Measured:
        """The share of flags that are right, the mean of the labels' F1, the test loss; by label,
        how many of its rows were found."""
        hits = (answers.found & y).sum(0).double().cpu()
        both = (answers.found.sum(0) + y.sum(0)).double().cpu()
        there, rows = both > 0, y.sum(0).cpu()
        metrics = {
            "label_accuracy": float((answers.found == y).double().mean()),
            "macro_f1": float((2 * hits[there] / both[there]).mean()) if there.any() else None,
            "test_loss": finite(float(answers.loss.double().mean())),
        }
        recall = torch.where(rows > 0, hits / rows.clamp(min=1), torch.nan).tolist()
        return metrics, {"recall": [finite(value) for value in recall]}

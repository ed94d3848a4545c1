"""Classification: one class of several.

A pass leaves three numbers a row (the class, the loss, how sure the model was); the confusion
matrix is counted from them, and accuracy, recall and F1 follow from the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from nestling.tasks.task import Answers, Measured, Task, finite

BINS = 15
"""Bins of confidence in which answers are compared with how often they are right."""


@dataclass(frozen=True)
class Classification(Task):
    """Every row is of one of so many classes."""

    name: ClassVar[str] = "classification"
    score: ClassVar[str] = "accuracy"
    has_classes: ClassVar[bool] = True

    classes: int

    def answers(self, outputs: Tensor, y: Tensor, keep: bool = False) -> Answers:
        """What (…, rows, classes) logits say of rows of classes `y`."""
        chances = outputs.float().log_softmax(-1)
        right = chances.gather(-1, y.expand(chances.shape[:-1]).unsqueeze(-1)).squeeze(-1)
        sure = chances.amax(-1).exp()
        return Answers(outputs.argmax(-1), -right, sure, outputs if keep else None)

    def right(self, answers: Answers, y: Tensor) -> Tensor:
        """Which rows it is right about."""
        return answers.found == y

    def measured(self, answers: Answers, y: Tensor) -> Measured:
        """Macro F1, test loss and calibration; recall and confusion by class."""
        confusion = confusion_of(answers.found, y, self.classes)
        metrics = {
            "macro_f1": macro_f1(confusion),
            "test_loss": finite(float(answers.loss.double().mean())),
            "calibration_error": finite(calibration_error(answers, y)),
        }
        return metrics, {"recall": recall(confusion), "confusion": confusion.tolist()}


def confusion_of(found: Tensor, y: Tensor, classes: int) -> np.ndarray:
    """(classes, classes) rows by what they are and by what they were taken for."""
    counts = torch.bincount(y * classes + found, minlength=classes * classes)
    return counts.reshape(classes, classes).cpu().numpy()


def recall(confusion: np.ndarray) -> list[float | None]:
    """Of the rows of each class, the share that was recognised; None where there are none."""
    rows = confusion.sum(1)
    return [
        float(right / of) if of else None
        for right, of in zip(confusion.diagonal(), rows, strict=True)
    ]


def macro_f1(confusion: np.ndarray) -> float:
    """The mean of the classes' F1, over classes that rows have or were taken for."""
    both = confusion.sum(0) + confusion.sum(1)
    there = both > 0
    return float((2 * confusion.diagonal()[there] / both[there]).mean())


def calibration_error(answers: Answers, y: Tensor) -> float:
    """By how much a model is surer, or less sure, than it is right: the mean over bins of
    confidence, weighted by their rows."""
    assert answers.sure is not None
    sure = answers.sure.double().nan_to_num(0.0)
    place = (sure * BINS).long().clamp(0, BINS - 1)
    gaps = (answers.found == y).double() - sure
    bins = torch.arange(BINS, device=sure.device)[:, None]
    # No scatter: on a GPU its sums differ from run to run.
    return float(torch.where(place == bins, gaps, 0.0).sum(1).abs().sum() / len(sure))

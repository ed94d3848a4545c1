"""What is measured of a classifier: everything from one pass over the test rows.

A pass leaves three numbers a row (the class, the loss, how sure the model was); the confusion
matrix is counted from them, and accuracy, recall and F1 follow from the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

BINS = 15
"""Bins of confidence in which answers are compared with how often they are right."""


@dataclass(frozen=True)
class Answers:
    """What a model says of rows; with a first dimension, what several say. `logits` are kept where
    somebody wants them."""

    classes: Tensor
    loss: Tensor
    confidence: Tensor
    logits: Tensor | None = None

    def hits(self, y: Tensor) -> Tensor:
        """Which rows it is right about."""
        return self.classes == y

    def each(self) -> list[Answers]:
        """Those of several models, one by one."""
        logits = [None] * len(self.classes) if self.logits is None else list(self.logits)
        return [
            Answers(*parts)
            for parts in zip(self.classes, self.loss, self.confidence, logits, strict=True)
        ]


def answers_of(logits: Tensor, y: Tensor, keep: bool = False) -> Answers:
    """What (…, rows, classes) outputs say of rows of classes `y`."""
    chances = logits.float().log_softmax(-1)
    right = chances.gather(-1, y.expand(chances.shape[:-1]).unsqueeze(-1)).squeeze(-1)
    return Answers(logits.argmax(-1), -right, chances.amax(-1).exp(), logits if keep else None)


def pooled(found: Sequence[Answers]) -> Answers | None:
    """The answers of several models to the same rows, one after another; None where nobody gave
    any."""
    if not found:
        return None
    logits = [one.logits for one in found if one.logits is not None]
    return Answers(
        torch.cat([one.classes for one in found]),
        torch.cat([one.loss for one in found]),
        torch.cat([one.confidence for one in found]),
        torch.cat(logits) if logits else None,
    )


def measured(answers: Answers, y: Tensor, classes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metrics that are one number each, and those by class."""
    confusion = confusion_of(answers.classes, y, classes)
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
    sure = answers.confidence.double().nan_to_num(0.0)
    place = (sure * BINS).long().clamp(0, BINS - 1)
    gaps = answers.hits(y).double() - sure
    bins = torch.arange(BINS, device=sure.device)[:, None]
    # No scatter: on a GPU its sums differ from run to run.
    return float(torch.where(place == bins, gaps, 0.0).sum(1).abs().sum() / len(sure))


def spread(values: Sequence[float]) -> dict[str, Any]:
    """How unequal clients' personal accuracies are: the worst, what a tenth do not reach, and their
    variance."""
    if not values:
        return {}
    return {
        "personal_worst": float(min(values)),
        "personal_tenth": float(np.quantile(values, 0.1)),
        "personal_variance": float(np.var(values)),
    }


def finite(value: float) -> float | None:
    """A number that a file can hold; None for others."""
    return value if math.isfinite(value) else None

"""Regression and forecasting: values instead of classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nestling.tasks.task import Answers, Measured, Task, finite, losses_of


@dataclass(frozen=True)
class Regression(Task):
    """A target is a row of values, standardised by the training rows: `mean` and `scale` give them
    back. `variance` is that of the test rows as they are standardised."""

    name: ClassVar[str] = "regression"
    score: ClassVar[str] = "R²"

    mean: tuple[float, ...]
    scale: tuple[float, ...]
    variance: tuple[float, ...]

    def answers(self, outputs: Tensor, y: Tensor, keep: bool = False) -> Answers:
        """What (…, rows, values) say of rows with values `y`."""
        found = outputs.float()
        return Answers(found, losses_of(found, y), None, outputs if keep else None)

    def right(self, answers: Answers, y: Tensor) -> Tensor:
        """One less the squared error in variances, the mean over the values: over all test rows
        that is R², 0 for who always tells the mean."""
        return 1 - ((answers.found - y).square() / y.new_tensor(self.variance)).mean(-1)

    def measured(self, answers: Answers, y: Tensor) -> Measured:
        """Mean absolute and root mean square error, in the units of the data."""
        off = (answers.found - y).double() * torch.tensor(
            self.scale, dtype=torch.float64, device=y.device
        )
        return {
            "mae": finite(float(off.abs().mean())),
            "rmse": finite(float(off.square().mean().sqrt())),
            "test_loss": finite(float(answers.loss.double().mean())),
        }, {}


@dataclass(frozen=True)
class Forecast(Regression):
    """Regression whose values are what comes next: the last steps of every sequence."""

    name: ClassVar[str] = "forecast"
    network: ClassVar[str] = "forecaster"

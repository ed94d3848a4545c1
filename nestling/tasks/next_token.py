"""Next token: at every step of a text, what comes after it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nestling.tasks.losses import FILLING, mean_over
from nestling.tasks.task import Answers, Measured, Task, finite, losses_of


@dataclass(frozen=True)
class NextToken(Task):
    """A target is the text moved by one token; a network says at every step, from what stands up to
    there, how likely each token of the vocabulary is."""

    name: ClassVar[str] = "next-token"
    score: ClassVar[str] = "token accuracy"
    network: ClassVar[str] = "gpt"

    def shape(self, target: Tensor, outputs: int) -> tuple[int, ...]:
        """(rows, steps, vocabulary)."""
        return (*target.shape, outputs)

    def answers(self, outputs: Tensor, y: Tensor, keep: bool = False) -> Answers:
        """What (…, rows, steps, vocabulary) logits say of texts `y`."""
        loss = losses_of(outputs.float(), y)
        return Answers(outputs.argmax(-1), loss, None, outputs if keep else None)

    def right(self, answers: Answers, y: Tensor) -> Tensor:
        """The share of its tokens that each row was told right."""
        return mean_over((answers.found == y).double(), y != FILLING)

    def measured(self, answers: Answers, y: Tensor) -> Measured:  # noqa: ARG002 (as all tasks)
        """Perplexity: how many tokens it is as undecided between as if all were equally likely."""
        loss = float(answers.loss.double().mean())
        most = 700.0  # beyond, no float holds it
        return {
            "perplexity": math.exp(loss) if loss < most else None,
            "test_loss": finite(loss),
        }, {}

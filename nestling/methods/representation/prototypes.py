"""What is shared by servers that train on the prototypes of a round: clients' rows by class as a small data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from nestling.methods.api import Replies, State
from nestling.methods.representation.class_means import TellsByClass
from nestling.methods.representation.class_table import STATISTICS
from nestling.settings import Count, Positive, Whole
from nestling.training.distiller import Forward, Student, rows_of
from nestling.training.objectives import Batch
from nestling.training.optimisers import Optim

RowLoss = Callable[..., Tensor]
"""(prototypes, their classes, what the student says of them, …) → the loss of each of them."""


def gathered(replies: Replies, name: str, place: torch.device) -> tuple[Tensor, Tensor]:
    """A statistic of all clients, (rows, …), and the class of each row."""
    rows = torch.cat([reply.message[STATISTICS][name].to(place) for reply in replies])
    labels = [label for reply in replies for label in reply.message.facts["classes"]]
    return rows, torch.tensor(labels, dtype=torch.int64, device=place)


def passes(
    x: Tensor, y: Tensor, epochs: int, batch: int, seed: int, *purpose: str | int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches of some passes over a data set, each in an order of its own, and which of their rows count. How many rows there are
    differs from round to round; batches are filled up, so that a server's step has one form and is recorded once."""
    for rows in islice(rows_of(len(x), batch, seed, *purpose, place=x.device), epochs * -(-len(x) // batch)):
        filled = torch.cat([rows, rows.new_zeros(batch - len(rows))])
        yield x[filled], y[filled], torch.arange(batch, device=x.device) < len(rows)


@dataclass
class TrainsOnPrototypes(TellsByClass):
    """Base of the methods whose server trains something of its own on the features that the clients of a round tell of.

    epochs:       passes of the server over the prototypes of a round.
    server_lr:    its learning rate, of plain steps.
    server_batch: prototypes per step.
    """

    epochs: Whole = 100
    server_lr: Positive = 0.01
    server_batch: Count = 10

    def taught(
        self, what: str, state: State, forward: Forward, loss: RowLoss, replies: Replies, round: int, *given: Tensor
    ) -> State:
        """A state after the server's steps of a round; the loss may read further tensors."""
        work, (x, y) = self.world.recorder, gathered(replies, "features", self.world.place)
        student = work.student(what, state, list(state), forward, Optim("sgd", self.server_lr))
        with work.session():
            for batch in passes(x, y, self.epochs, self.server_batch, self.world.seed, what, round):
                work.do(what, partial(_step, student, loss), *batch, *given)
            return student.state()


def _step(student: Student, loss: RowLoss, x: Tensor, y: Tensor, counts: Tensor, *given: Tensor) -> None:
    student.update(Batch(x, y, y, mask=counts).mean(loss(x, y, student(x), *given)))

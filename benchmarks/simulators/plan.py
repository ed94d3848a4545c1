"""What all contestants of a task share, on disk: data, clients of each round, rows of each client,
their order, start weights.

Nestling decides it and `write` puts it down; the others `read` it and so need nothing of Nestling
at run time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from tasks import Task

_FILE = "plan.pt"


@dataclass(frozen=True)
class Plan:
    """A task in numbers. Round and place count from 0; `place` is a client's place among those of
    its round.

    chosen: (rounds, participants) clients. rows: (clients, size) of the training data. order:
            (rounds, participants, epochs, size),
    in which order a client goes through its rows. network is "" where only Nestling can build it.
    """

    task: str
    network: str
    rounds: int
    epochs: int
    batch: int
    lr: float
    chosen: Tensor
    rows: Tensor
    order: Tensor
    start: dict[str, Tensor]
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor

    def on(self, device: str) -> Plan:
        """The same with its data and start weights on a device; who trains when stays where it
        is."""
        moved = {
            name: getattr(self, name).to(device)
            for name in ("rows", "order", "x", "y", "x_test", "y_test")
        }
        start = {name: tensor.to(device) for name, tensor in self.start.items()}
        return Plan(**{**vars(self), **moved, "start": start})

    def client(self, round: int, place: int) -> int:
        """The client at a place of a round."""
        return int(self.chosen[round, place])

    def epoch(self, round: int, place: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of one pass of a client over its rows, in their order."""
        rows = self.rows[self.client(round, place)][self.order[round, place, epoch]]
        return self.x[rows], self.y[rows]

    @property
    def participants(self) -> int:
        """Clients a round."""
        return self.chosen.shape[1]

    @property
    def clients(self) -> int:
        """Clients in all."""
        return len(self.rows)


def write(task: Task, folder: Path) -> None:
    """Puts the plan of a task into a folder."""
    from nestling.runs.assemble import assemble
    from nestling.training.order import order as order_of_rows

    settled, federation = assemble(task.experiment)
    world, bench, train = federation.world, federation.bench, settled.train
    plain = (train.optimizer, train.momentum, train.decay, train.augment, train.weight_decay) == (
        "sgd",
        0.0,
        1.0,
        "none",
        0.0,
    )
    if task.network and not plain:
        raise ValueError("contestants know plain SGD only")
    chosen = np.array(
        [world.fleet.choose(round, federation.participants) for round in range(1, task.rounds + 1)]
    )
    rows = np.array([world.split.indices(client) for client in range(len(world.fleet))])
    size = rows.shape[1]
    order = [
        [
            [
                order_of_rows(settled.seed, int(client), round, 0, epoch, size)
                for epoch in range(train.epochs)
            ]
            for client in clients
        ]
        for round, clients in enumerate(chosen, start=1)
    ]
    plan = Plan(
        task=task.name,
        network=task.name if task.network else "",
        rounds=task.rounds,
        epochs=train.epochs,
        batch=train.batch,
        lr=train.lr,
        chosen=torch.from_numpy(chosen),
        rows=torch.from_numpy(rows),
        order=torch.from_numpy(np.array(order)),
        start={name: tensor.clone() for name, tensor in world.main.initial.items()},
        x=bench.x,
        y=bench.y,
        x_test=bench.x_test,
        y_test=bench.y_test,
    )
    torch.save({field.name: getattr(plan, field.name) for field in fields(Plan)}, folder / _FILE)


def read(folder: Path, mapped: bool = False) -> Plan:
    """The plan of a folder. `mapped`: data stays in the file and is shared between processes."""
    return Plan(**torch.load(folder / _FILE, mmap=mapped, weights_only=True))

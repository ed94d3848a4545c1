"""The client's side of a round: from a task to an outcome.

It is the same function in every engine and on every machine: it reads the task, the client's own data and memory, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from nestling.data.split import Split
from nestling.message import Message
from nestling.training.phase import Phase, Train
from nestling.training.trainer import train
from nestling.views import Reference, State, View


@dataclass(frozen=True)
class Task:
    """One client's work in one round, as it leaves the server.

    `network` names the reference, `spec` is the view of it to train as plain data (see `views.to_spec`); `memory` is what the client
    kept from earlier rounds.
    """

    client: int
    round: int
    network: str
    spec: Mapping[str, Any]
    message: Message
    memory: State = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What came of a task: the reply that travels, and what stays on the client."""

    client: int
    reply: Message
    memory: State
    loss: float
    steps: int
    samples: int


@dataclass
class Client:
    """A client at work. `weights` is its network's state now; `memory` survives to its next round."""

    id: int
    round: int
    reference: Reference
    view: View
    x: Tensor
    y: Tensor
    classes: int
    train: Train
    public: Tensor | None
    weights: State
    memory: State

    @property
    def samples(self) -> int:
        """How many rows the client trains on."""
        return len(self.y)

    def class_counts(self) -> Tensor:
        """Its rows by class."""
        return torch.bincount(self.y, minlength=self.classes)


class ClientSide(Protocol):
    """What a method does on a client."""

    def start(self, client: Client, received: Message) -> State: ...
    def phases(self, client: Client, received: Message) -> Sequence[Phase]: ...
    def reply(self, client: Client, received: Message) -> Message: ...


@dataclass
class Site:
    """What a process needs to act for any client: data, split, networks, settings. Shared between processes, never written to."""

    x: Tensor
    y: Tensor
    split: Split
    references: dict[str, Reference]
    classes: int
    train: Train
    seed: int
    public: Tensor | None = None


def work(method: ClientSide, task: Task, site: Site) -> Outcome:
    """One client's round."""
    client = _client(task, site)
    client.weights = method.start(client, task.message)
    loss = steps = samples = 0.0
    for number, phase in enumerate(method.phases(client, task.message)):
        module = client.reference.network(client.view, client.weights)
        x, y = _source(phase, client)
        done = train(module, phase, x, y, site.seed, task.client, task.round, number)
        client.weights = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        loss, steps, samples = loss + done.loss * done.samples, steps + done.steps, samples + done.samples
    reply = method.reply(client, task.message)
    return Outcome(task.client, reply, client.memory, loss / max(samples, 1), int(steps), int(samples))


def _client(task: Task, site: Site) -> Client:
    reference = site.references[task.network]
    view = reference.view(task.spec)
    rows = torch.from_numpy(site.split.indices(task.client))
    return Client(
        id=task.client,
        round=task.round,
        reference=reference,
        view=view,
        x=site.x[rows],
        y=site.y[rows],
        classes=site.classes,
        train=site.train,
        public=site.public,
        weights={},
        memory=dict(task.memory),
    )


def _source(phase: Phase, client: Client) -> tuple[Tensor, Tensor]:
    if phase.source == "private":
        return client.x, client.y
    if client.public is None:
        raise ValueError("the phase trains on public data and there is none")
    return client.public, torch.zeros(len(client.public), dtype=torch.int64)

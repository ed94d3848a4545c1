"""The client's side of a round: from an errand to an outcome.

It is the same function in every engine and on every machine: it reads the errand, the client's own
data and memory, and nothing else.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, SupportsFloat

import numpy as np
import torch
from torch import Tensor

from nestling.data.split import Split
from nestling.message import Message
from nestling.seeds import stream
from nestling.training.phase import Phase, Train
from nestling.training.trainer import Trained, train
from nestling.views import Reference, State, View
from nestling.views.flat import pack
from nestling.where import CPU, Where

MOST_ROWS = 2**22
"""How many numbers of rows a site remembers."""


@dataclass(eq=False)
class Errand:
    """One client's work in one round, as it leaves the server.

    `network` names the reference, `spec` is the view of it to train as plain data (see
    `views.to_spec`); `memory` is what the client kept from earlier rounds.
    """

    client: int
    round: int
    network: str
    spec: Mapping[str, Any]
    message: Message
    memory: State = field(default_factory=dict)


@dataclass(eq=False)
class Outcome:
    """What came of an errand: the reply that travels, and what stays on the client. The mean loss
    over its samples may be one that a device is still computing."""

    client: int
    reply: Message
    memory: State
    loss: SupportsFloat
    steps: int
    samples: int


@dataclass(eq=False)
class Client:
    """A client at work. `weights` is its network's state now; `memory` survives to its next round.
    Its data is only touched when somebody asks for it: engines that hold all data on a device never
    do."""

    id: int
    round: int
    reference: Reference
    view: View
    site: Site
    weights: Mapping[str, Tensor]
    memory: State

    @property
    def classes(self) -> int:
        """How many classes the data has."""
        return self.site.classes

    @property
    def train(self) -> Train:
        """How clients train unless their method says otherwise."""
        return self.site.train

    @property
    def public(self) -> Tensor | None:
        """The inputs that the server shares with everybody, if any."""
        return self.site.public

    @property
    def place(self) -> torch.device:
        """The device that its data and weights are on."""
        return self.site.x.device

    @cached_property
    def rows(self) -> np.ndarray:
        """Which rows of the training data are the client's."""
        return self.site.rows_of(self.id)

    @cached_property
    def x(self) -> Tensor:
        """Its inputs."""
        return self.site.x[torch.from_numpy(self.rows).to(self.site.x.device)]

    @cached_property
    def y(self) -> Tensor:
        """Its labels."""
        return self.site.y[torch.from_numpy(self.rows).to(self.site.y.device)]

    @property
    def samples(self) -> int:
        """How many rows the client trains on."""
        return len(self.site.rows_of(self.id))

    def most_steps(self, epochs: int, batch: int) -> int:
        """The most batches that any client has in so many epochs."""
        return epochs * -(-max(self.site.most_rows, 1) // batch)

    @cached_property
    def counts(self) -> np.ndarray:
        """Its rows by class."""
        return self.site.counts_of(self.id)

    def secret_chance(self, *names: str) -> np.random.Generator:
        """Chance for what others must not be able to take off again, noise for privacy above all.
        In a simulation it follows from the seed like all chance; on a device of the client's own it
        is fresh entropy of that machine, which nobody else can draw again."""
        if self.site.real:
            return np.random.default_rng(secrets.randbits(256))
        return stream(self.site.seed, *names, self.id, self.round)

    def class_counts(self) -> Tensor:
        """Its rows by class, where the client is."""
        return torch.from_numpy(self.counts).to(self.site.y.device)


class ClientSide(Protocol):
    """What a method does on a client."""

    def start(self, client: Client, received: Message) -> Mapping[str, Tensor]:
        """The weights that the client starts its round with."""

    def phases(self, client: Client, received: Message) -> Iterable[Phase]:
        """What the client does with data, one phase after another."""

    def reply(self, client: Client, received: Message) -> Message:
        """What goes back to the server once all phases are done."""


@dataclass
class Site:
    """What a process needs to act for any client: data, split, networks, settings. Shared between
    processes, never written to."""

    x: Tensor
    y: Tensor
    split: Split
    references: dict[str, Reference]
    classes: int
    train: Train
    seed: int
    public: Tensor | None = None
    where: Where = CPU
    real: bool = False  # a client's own device, and not a simulation of it
    _rows: OrderedDict[int, np.ndarray] = field(
        default_factory=OrderedDict, init=False, repr=False, compare=False
    )
    _counts: dict[int, np.ndarray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _held: int = field(default=0, init=False, repr=False, compare=False)

    @cached_property
    def most_rows(self) -> int:
        """The most rows that any client trains on."""
        return self.split.most()

    def rows_of(self, client: int) -> np.ndarray:
        """A client's rows of the training data; those of recent clients are remembered, since
        drawing them can cost more than using them."""
        if client not in self._rows:
            self._rows[client] = self.split.indices(client)
            self._held += len(self._rows[client])
            while self._held > MOST_ROWS and len(self._rows) > 1:
                oldest, rows = self._rows.popitem(last=False)
                self._held -= len(rows)
                self._counts.pop(oldest, None)
        return self._rows[client]

    def counts_of(self, client: int) -> np.ndarray:
        """A client's rows by class, remembered as long as the rows are."""
        if client not in self._counts:
            self.rows_of(client)
            self._counts[client] = self.split.counts(client)
        return self._counts[client]


def work(method: ClientSide, errand: Errand, site: Site) -> Outcome:
    """One client's round."""
    return carry_out(working(method, errand, site), train_client)


Working = Generator[tuple["Client", Phase, int], Trained, Outcome]
"""A round under way: gives (client, phase, its number), is told what came of training it, and ends
with the outcome."""


def working(method: ClientSide, errand: Errand, site: Site) -> Working:
    """One client's round, its training left to somebody else, who leaves the new weights in the
    client."""
    client = client_of(errand, site)
    client.weights = method.start(client, errand.message)
    loss = steps = samples = 0.0
    for number, phase in enumerate(method.phases(client, errand.message)):
        done = yield client, phase, number
        loss, steps, samples = (
            loss + done.loss * done.samples,
            steps + done.steps,
            samples + done.samples,
        )
    reply = method.reply(client, errand.message)
    return Outcome(
        errand.client, reply, client.memory, loss / max(samples, 1), int(steps), int(samples)
    )


def carry_out(round: Working, train: Callable[[Client, Phase, int], Trained]) -> Outcome:
    """The outcome of a round whose phases `train` trains."""
    try:
        asked = next(round)
        while True:
            asked = round.send(train(*asked))
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome


def client_of(errand: Errand, site: Site) -> Client:
    """The client that an errand is for."""
    reference = site.references[errand.network]
    memory = {name: t.to(site.x.device) for name, t in errand.memory.items()}
    return Client(
        errand.client,
        errand.round,
        reference,
        reference.view(errand.spec),
        site,
        {},
        memory,
    )


def train_client(client: Client, phase: Phase, number: int) -> Trained:
    """One phase of one client; its weights are those after it."""
    module = client.reference.network(client.view, client.weights)
    x, y = source_of(phase, client)
    done = train(module, phase, x, y, client.site.seed, client.id, client.round, number)
    client.weights = pack(module.state_dict())
    return done


def source_of(phase: Phase, client: Client) -> tuple[Tensor, Tensor]:
    """The inputs and labels that a phase trains on; public ones have no labels."""
    if phase.source == "private":
        return client.x, client.y
    public = public_of(client.site)
    chosen = public if phase.rows is None else public[phase.rows.to(public.device)]
    return chosen, torch.zeros(len(chosen), dtype=torch.int64, device=public.device)


def public_of(site: Site) -> Tensor:
    """The public inputs, which a phase asked for."""
    if site.public is None:
        raise ValueError("the phase trains on public data and there is none")
    return site.public

"""The rounds of several clients side by side: what each does is as in `client.work`, but equal
phases run as one stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from nestling.message import Message
from nestling.training.client import (
    Client,
    ClientSide,
    Errand,
    Outcome,
    Site,
    client_of,
    train_client,
)
from nestling.training.phase import Phase
from nestling.training.stacks.group import Group, groups
from nestling.views import State
from nestling.views.flat import Fetched, FetchedRow

Blame = Callable[[Errand, Exception], Exception]
"""The error to raise for what happened while an errand was worked on."""


@dataclass(eq=False)
class Losses:
    """What came of a group's phase, one entry per client: loss summed over samples, steps,
    samples."""

    total: Tensor
    steps: list[int]
    samples: list[int]
    # the totals on their way to the host, where somebody has sent them already
    fetched: Fetched | FetchedRow | None = None

    def __post_init__(self) -> None:
        """Sends the totals to the host unless that has happened already."""
        self.fetched = self.fetched or Fetched(self.total)

    @cached_property
    def values(self) -> list[float]:
        """The sums as numbers; waits for a device that is still computing them, once for all
        clients."""
        assert self.fetched is not None
        return self.fetched.values()


@dataclass
class Loss:
    """A client's mean loss over its samples, looked up when somebody asks."""

    parts: list[tuple[Losses, int]] = field(default_factory=list)

    def __float__(self) -> float:
        """The mean over the samples of all its phases; waits for the device where it must."""
        if len(self.parts) == 1:
            part, k = self.parts[0]
            return part.values[k] / (part.samples[k] or 1)
        samples = sum([part.samples[k] for part, k in self.parts])
        return sum([part.values[k] for part, k in self.parts]) / max(samples, 1)


Train = Callable[[list[Group]], list[Losses]]
"""Trains the clients of some groups: their `weights` are the trained ones afterwards."""


@dataclass(eq=False)
class _Seat:
    errand: Errand
    client: Client
    phases: Iterator[Phase]
    loss: Loss = field(default_factory=Loss)


def _as_it_is(_task: Errand, error: Exception) -> Exception:
    return error


def work_together(
    method: ClientSide,
    errands: Sequence[Errand],
    site: Site,
    train: Train,
    blame: Blame = _as_it_is,
) -> list[Outcome]:
    """The round of every errand's client. A loss may be one that a device is still computing."""
    at = errands[0] if errands else None
    try:
        seats = []
        for at in errands:
            client = client_of(at, site)
            client.weights = method.start(client, at.message)
            seats.append(_Seat(at, client, iter(method.phases(client, at.message))))
        active, number = seats, 0
        while active:
            waiting: list[tuple[Client, Phase]] = []
            seated: dict[Client, _Seat] = {}
            for seat in active:
                at = seat.errand
                phase = next(seat.phases, None)
                if phase is not None:
                    waiting.append((seat.client, phase))
                    seated[seat.client] = seat
            if not waiting:
                break
            found = groups(waiting, number)
            for group, losses in zip(found, train(found), strict=True):
                for k, client in enumerate(group.clients):
                    seated[client].loss.parts.append((losses, k))
            active, number = list(seated.values()), number + 1
        outcomes = []
        for seat in seats:
            at = seat.errand
            outcomes.append(_outcome(seat, method.reply(seat.client, at.message)))
        return outcomes
    except Exception as error:
        if at is None:
            raise
        raise blame(at, error) from error


def train_one_by_one(group: Group) -> Losses:
    """The plain way: one client after another."""
    done = [
        train_client(client, phase, group.number)
        for client, phase in zip(group.clients, group.phases, strict=True)
    ]
    return Losses(
        torch.tensor([d.loss * d.samples for d in done]),
        [d.steps for d in done],
        [d.samples for d in done],
    )


def _outcome(seat: _Seat, reply: Message) -> Outcome:
    if len(seat.loss.parts) == 1 and not seat.client.memory:
        part, k = seat.loss.parts[0]
        return Outcome(seat.errand.client, reply, {}, seat.loss, part.steps[k], part.samples[k])
    steps = sum([part.steps[k] for part, k in seat.loss.parts])
    samples = sum([part.samples[k] for part, k in seat.loss.parts])
    memory = _own(seat.client.memory) if seat.client.memory else {}
    return Outcome(seat.errand.client, reply, memory, seat.loss, steps, samples)


def _own(memory: State) -> State:
    """What a client keeps, in storage of its own: a row would keep its whole stack alive."""
    return {
        name: t if t.untyped_storage().nbytes() == t.nbytes else t.clone()
        for name, t in memory.items()
    }

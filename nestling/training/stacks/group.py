"""Which clients do the same work: those whose phases differ in data and received tensors only can
be trained as one stack."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from nestling.training.client import Client, Site, public_of
from nestling.training.order import Schedule
from nestling.training.phase import Phase
from nestling.training.trainer import phase_schedule
from nestling.views import View
from nestling.views.flat import Layout


@dataclass(eq=False)
class Group:
    """Clients with networks of one form and, but for `given`, one phase. `key` is equal for equal
    work in every round: which channels of the reference a network has does not matter, only how
    many, unless the objective names them."""

    key: Hashable
    clients: list[Client]
    phases: list[Phase]
    number: int

    @property
    def phase(self) -> Phase:
        """The first client's phase; those of the others differ in `given` only."""
        return self.phases[0]

    @cached_property
    def nature(self) -> Hashable:
        """Equal for groups that do the same in networks of other sizes: what holds of one then
        holds of the other."""
        phase = self.phase
        hooks = tuple((hook.layers, hook.names, token(hook.change)) for hook in phase.hooks)
        functions = (token(phase.objective), token(phase.rule), token(phase.also), hooks)
        return (
            self.clients[0].reference.name,
            id(self.clients[0].reference),
            functions,
            tuple(phase.given),
            phase.source,
        )

    @property
    def site(self) -> Site:
        """The site that all clients share."""
        return self.clients[0].site

    @cached_property
    def module(self) -> nn.Module:
        """The skeleton of the network that all of them train."""
        network = self.clients[0].reference.network(self.clients[0].view)
        return network.train()

    @cached_property
    def layout(self) -> Layout:
        """Their states' layout, in the order of the network."""
        return self.clients[0].reference.layout(self.clients[0].view)

    @cached_property
    def schedule(self) -> Schedule:
        """Everybody's batches."""
        ids = [c.id for c in self.clients]
        return phase_schedule(
            self.phase,
            self.module,
            self.sizes,
            self.site.seed,
            ids,
            self.clients[0].round,
            self.number,
        )

    @property
    def width(self) -> int:
        """The rows of a full batch; the same in every round, whoever takes part."""
        most = self.site.most_rows if self.phase.source == "private" else self.sizes[0]
        return min(self.phase.batch, max(most, 1))

    @property
    def sizes(self) -> list[int]:
        """How many rows each client trains on."""
        if self.phase.source == "private":
            return [c.samples for c in self.clients]
        rows = public_of(self.site) if self.phase.rows is None else self.phase.rows
        return [len(rows)] * len(self.clients)

    def part(self, start: int, end: int) -> Group:
        """Some of the clients."""
        if (start, end) == (0, len(self.clients)):
            return self
        return Group(self.key, self.clients[start:end], self.phases[start:end], self.number)

    def shared(self, name: str) -> bool:
        """Whether a given tensor is one and the same for all clients."""
        first = self.phase.given[name]
        return all(p.given[name] is first for p in self.phases)


def groups(work: Sequence[tuple[Client, Phase]], number: int) -> list[Group]:
    """The clients by what they do, in the order in which each kind first appears."""
    found: dict[Hashable, Group] = {}
    tokens: dict[int, Hashable] = {}
    for client, phase in work:
        same = tokens.get(id(phase))
        if same is None:
            same = tokens[id(phase)] = phase_token(phase)
        key = (client.reference.name, client.view.form(), same)
        if key not in found:
            found[key] = Group(key, [], [], number)
        found[key].clients.append(client)
        found[key].phases.append(phase)
    return list(found.values())


def phase_token(phase: Phase) -> Hashable:
    """Equal for phases that do the same with whatever they are given. The learning rate is left
    out: it may change from round to round."""
    optim = phase.optim
    return (
        token(phase.objective),
        token(phase.rule),
        token(phase.also),
        tuple((hook.layers, hook.names, token(hook.change)) for hook in phase.hooks),
        (
            optim.name,
            optim.momentum,
            optim.weight_decay,
            optim.clip,
            optim.betas,
            optim.eps,
            optim.lazy,
        ),
        (
            phase.epochs,
            phase.batch,
            phase.steps,
            phase.source,
            phase.freeze,
            phase.drop_last,
            phase.augment,
        ),
        tuple((name, tuple(t.shape), t.dtype) for name, t in phase.given.items()),
        None if phase.rows is None else len(phase.rows),
    )


def token(thing: Any) -> Hashable:
    """Equal for functions that do the same: by code and by what is bound into them. What cannot be
    looked into is itself."""
    if isinstance(thing, (type(None), bool, int, float, str, bytes, torch.dtype)):
        return (type(thing).__name__, thing)
    if isinstance(thing, partial):
        return ("partial", token(thing.func), token(thing.args), token(thing.keywords))
    if isinstance(thing, FunctionType):
        bound = [cell.cell_contents for cell in thing.__closure__ or ()]
        return (
            "function",
            thing.__code__,
            token(thing.__defaults__),
            token(thing.__kwdefaults__),
            token(bound),
        )
    if isinstance(thing, View) and not thing.masks:
        return ("view", id(thing.axes), thing.key())
    if isinstance(thing, MethodType):
        return ("method", token(thing.__func__), ("object", id(thing.__self__)))
    if isinstance(thing, (list, tuple)):
        return (type(thing).__name__, tuple(token(part) for part in thing))
    if isinstance(thing, dict):
        return ("dict", tuple((name, token(part)) for name, part in thing.items()))
    return ("object", id(thing))

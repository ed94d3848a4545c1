"""What methods share that average weights within each architecture of a mixed fleet, and distil between architectures.

An architecture is a network that devices train, whole or in parts. Replies of one architecture are merged by the one operator;
between two that have nothing in common only what they say of inputs can pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nestling.methods.api import Contribution, Device, Message, Method, Model, Piece, Reference, Reply, State, View, World
from nestling.methods.kept import made
from nestling.seeds import torch_seeded
from nestling.training.distiller import Forward, logits_of, whole
from nestling.views import merge
from nestling.views.nested import forward


@dataclass
class PerArchitecture(Method):
    """Base of methods that keep one state an architecture: clients' weights travel down and up."""

    world: World = made()
    references: dict[str, Reference] = made()
    weights: dict[str, State] = made()
    _sent: dict[tuple[str, bytes], tuple[State, Message]] = made()

    def setup(self, world: World) -> None:
        self.world = world
        self.keep(world.references.values())

    def keep(self, references: Iterable[Reference]) -> None:
        """Starts with these architectures, each as it was built."""
        self.references = {reference.name: reference for reference in references}
        self.weights = {name: reference.initial.copy() for name, reference in self.references.items()}
        self._sent = {}

    def send(self, device: Device, piece: Piece, round: int) -> Message:
        """The device's part of its architecture's weights; devices with the same part get the same message."""
        state, key = self.weights[piece.reference.name], (piece.reference.name, piece.view.key())
        kept = self._sent.get(key)
        if kept is None or kept[0] is not state:
            kept = self._sent[key] = (state, Message({"weights": piece.view.extract(state)}, self.facts_for(piece)))
        return kept[1]

    def facts_for(self, piece: Piece) -> Mapping[str, Any]:
        """What a device is told beside its weights."""
        return {}

    def contribution(self, reply: Reply) -> Contribution:
        """How much a reply counts within its architecture: by its number of samples, unless the method decides otherwise."""
        return Contribution(reply.piece.view, reply.message["weights"], float(reply.samples))

    def average(self, replies: Sequence[Reply]) -> dict[str, State]:
        """Every architecture after merging its own replies; one that nobody sent stays as it is."""
        given: dict[str, list[Contribution]] = defaultdict(list)
        for reply in replies:
            given[reply.piece.reference.name].append(self.contribution(reply))
        return {name: merge(state, given[name]) for name, state in self.weights.items()}

    def model_for(self, device: Device) -> Model:
        piece = self.piece(device, 0)
        return Model(piece.reference, piece.view, piece.view.extract(self.weights[piece.reference.name]))

    def global_model(self) -> Model:
        return Model(self.world.main, self.world.main.full, self.weights[self.world.main.name])

    def state(self) -> dict[str, State]:
        return self.weights

    def restore(self, state: Mapping[str, State]) -> None:
        self.weights = {name: dict(tensors) for name, tensors in state.items()}


def said_of(replies: Iterable[Reply], x: Tensor) -> list[Tensor]:
    """What every received model says of some inputs."""
    return [logits_of(r.piece.reference.network(r.piece.view, r.message["weights"]), x) for r in replies]


def held_parts(world: World, reference: Reference) -> list[View]:
    """The parts of an architecture that devices hold at rest, or the whole where none does."""
    views = {plan.piece.view.key(): plan.piece.view for plan in world.plans.values() if plan.piece.reference is reference}
    return list(views.values()) or [reference.full]


def whole_and_parts(world: World, reference: Reference) -> Forward:
    """The pass of a student that devices hold in parts: the logits of the whole and, step by step in turn, of one of the parts, which
    would otherwise be cut out of a network that was fitted without them."""
    return _WholeAndParts(reference, held_parts(world, reference), whole(reference.network(reference.full)))


@dataclass(frozen=True, eq=False)
class _WholeAndParts:
    reference: Reference
    parts: list[View]
    everything: Forward

    @property
    def turns(self) -> int:
        return len(self.parts)

    def __call__(self, state: Mapping[str, Tensor], x: Tensor, number: int) -> list[Tensor]:
        part, said = self.parts[number % len(self.parts)], [self.everything(state, x, number)]
        return said if part is self.reference.full else [*said, forward(self.reference, part, state, x)]


def noise_inputs(world: World, rows: int, round: int) -> Tensor:
    """Inputs of pure noise, other ones every round, for servers that hold no data."""
    with torch_seeded(world.seed, "noise proxy", round):
        return torch.randn(rows, *world.main.shape).to(world.place)

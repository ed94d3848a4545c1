"""What is shared by methods that average weights within each architecture of a mixed fleet and distil between architectures.

An architecture is a network that devices train, whole or in parts. Replies of one architecture are merged by the one operator;
two that have nothing in common can exchange only what they say of inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nestling.methods.api import Device, Method, Model, Piece, Replies, Reply, World, kept, made
from nestling.models.record import words_of
from nestling.seeds import torch_seeded
from nestling.training.distiller import Check, Distillation, distil, logits_of, proxy, whole
from nestling.views import Contribution, Reference, State, Tensors, View
from nestling.views.nested import forward

Weighting = Literal["samples", "variance", "uniform"]
"""How teachers count: by n_k, per input by the spread of their logits, or all alike."""


@dataclass
class PerArchitecture(Method):
    """Base of methods that keep one state per architecture: clients' weights travel down and up."""

    world: World = made()
    references: dict[str, Reference] = made()
    weights: dict[str, State] = kept()

    def setup(self, world: World) -> None:
        """One state for each of the fleet's networks, as it was built."""
        self.world = world
        self.begin_with(world.references.values())

    def begin_with(self, references: Iterable[Reference]) -> None:
        """Starts with these architectures, each as it was built."""
        self.references = {reference.name: reference for reference in references}
        self.weights = {name: reference.initial.copy() for name, reference in self.references.items()}

    def weights_for(self, piece: Piece) -> Tensors:
        """The piece, cut out of its architecture's state."""
        return self._model(piece).state

    def weight(self, reply: Reply) -> float:
        """How much a reply counts within its architecture: by its number of samples, unless the method decides otherwise."""
        return float(reply.samples)

    def average(self, replies: Replies) -> dict[str, State]:
        """Every architecture after merging its own replies; one that nobody sent stays as it is."""
        given: dict[str, list[Contribution]] = defaultdict(list)
        for reply in replies:
            own = Contribution(reply.piece.view, reply.message["weights"], self.weight(reply), client=reply.device.id)
            given[reply.piece.reference.name].append(own)
        return {name: self.mean(state, given[name]) for name, state in self.weights.items()}

    def fitted(
        self, name: str, state: State, said: tuple[Tensor, Tensor], how: Distillation, round: int, check: Check | None = None
    ) -> State:
        """An architecture after it was fitted, as a whole and in parts, to some inputs and what teachers say of them."""
        work, seed, reference = self.world.recorder, self.world.seed, self.references[name]
        student = work.student(name, state, reference.parameters, _WholeAndParts(self.world, reference), how.optim)
        return distil(student, proxy(*said, how.batch, seed, name, round), how, seed, name, round, check=check, work=work)

    def model_for(self, device: Device) -> Model:
        """The part of its architecture that the device holds at rest."""
        return self._model(self.piece(device, 0))

    def _model(self, piece: Piece) -> Model:
        return Model(piece.reference, piece.view, piece.view.extract(self.weights[piece.reference.name]))

    def global_model(self) -> Model:
        """The main network's state, whole."""
        return Model(self.world.main, self.world.main.full, self.weights[self.world.main.name])


def said_of(replies: Iterable[Reply], x: Tensor) -> list[Tensor]:
    """What every received model says of some inputs."""
    return [logits_of(r.piece.reference.network(r.piece.view, r.message["weights"]), x) for r in replies]


def held_parts(world: World, reference: Reference) -> list[View]:
    """The parts of an architecture that devices hold at rest, or the whole where none does."""
    views = {plan.piece.view.key(): plan.piece.view for plan in world.plans.values() if plan.piece.reference is reference}
    return list(views.values()) or [reference.full]


class _WholeAndParts:
    """The pass of a student that devices hold in parts: the logits of the whole and, step by step in turn, of one of the parts, which
    would otherwise be cut out of a network that was fitted without them."""

    def __init__(self, world: World, reference: Reference) -> None:
        self.reference, self.parts = reference, held_parts(world, reference)
        self.everything, self.turns = whole(reference.network(reference.full)), len(self.parts)

    def __call__(self, state: Tensors, x: Tensor, number: int) -> list[Tensor]:
        part, said = self.parts[number % self.turns], [self.everything(state, x, number)]
        return said if part is self.reference.full else [*said, forward(self.reference, part, state, x)]


def noise_inputs(world: World, rows: int, round: int) -> Tensor:
    """Inputs of pure noise, different ones every round, for servers that hold no data."""
    words, shape = words_of(world.main.module), (rows, *world.main.shape)
    with torch_seeded(world.seed, "noise proxy", round):
        return (torch.randint(words, shape) if words else torch.randn(shape)).to(world.place)

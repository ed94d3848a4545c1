"""Shared-distill: unequal clients fused by distillation into one global model, and back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestling.message import Message
from nestling.methods.method import Info, Method, Reply
from nestling.schema import require
from nestling.seeds import torch_seeded
from nestling.training.distiller import WEIGHTINGS, Distillation, Student, combine, distil, logits_of, proxy
from nestling.training.optimisers import Optim
from nestling.views import Contribution, Reference, State, View, merge
from nestling.views.nested import forward
from nestling.world import Device, Model, Piece, World


@dataclass
class SharedDistill(Method):
    """Shared-distill: the TinyML architecture this project starts from, fused by knowledge distillation.

    Idea: devices train what fits them, parts of one super-network or structurally different compact networks; the server treats
    what returns as an ensemble of teachers and distils it into one unified global model on a small unlabelled proxy set. The global
    model then goes back: cut to each device's part, or distilled once more into the networks that share no structure with it.
    Loss: clients cross-entropy; server τ²·KL(teachers ‖ student), for the full student and for the devices' parts of it in turn.
    Travels: each client's network down and up. Merge: networks of one kind are averaged (n_k) to start the student from, then
    distillation.
    Differs from the paper: its abstract names the two fusions only; the proxy (1 % of the training rows, or noise when there is
    none), the start from the average and the turn over the parts are our reading.

    temperature, steps, batch, lr: the distillation.
    weighting:  how teachers are combined: "samples" (by n_k), "variance" (per input, by the spread of the logits) or "uniform".
    start_from: where the student starts: "average" of the clients' networks, or "keep" the last global model.
    noise:      how many noise inputs stand in for the proxy when there is no public data.
    """

    temperature: float = 3.0
    steps: int = 50
    batch: int = 50
    lr: float = 5e-4
    weighting: str = "samples"
    start_from: str = "average"
    noise: int = 256

    world: World = field(init=False, repr=False, compare=False)
    weights: dict[str, State] = field(init=False, repr=False, compare=False)

    info = Info(
        title="Shared-distill",
        family="fusion",
        heterogeneity="any: nested parts and unlike networks",
        auxiliary="server proxy, unlabelled",
        global_model=True,
        paper="TinyML model-heterogeneous FL (abstract)",
        evidence="from paper (abstract only); the design is ours",
        own_networks=True,
        group="D",
    )

    def __post_init__(self) -> None:
        require(
            self.weighting in WEIGHTINGS,
            f"unknown weighting {self.weighting!r}",
            "method.weighting",
            f"allowed: {', '.join(WEIGHTINGS)}",
        )
        require(
            self.start_from in ("average", "keep"),
            f"unknown start {self.start_from!r}",
            "method.start_from",
            "allowed: average, keep",
        )
        require(self.temperature > 0, "must be above 0", "method.temperature")
        require(self.steps >= 0, "must not be negative", "method.steps")
        require(self.batch >= 1 and self.noise >= 1, "must be at least 1", "method.batch")
        require(self.lr > 0, "must be above 0", "method.lr")

    def setup(self, world: World) -> None:
        self.world = world
        self.weights = {name: reference.initial.copy() for name, reference in world.references.items()}

    def send(self, device: Device, piece: Piece, round: int) -> Message:
        return Message({"weights": piece.view.extract(self.weights[piece.reference.name])})

    def merge(self, replies: Sequence[Reply], round: int) -> None:
        if not replies:
            return
        inputs = self._proxy(round)
        said = [logits_of(r.piece.reference.network(r.piece.view, r.message["weights"]), inputs) for r in replies]
        targets = combine(said, [r.samples for r in replies], self.weighting)
        averaged = self._average(replies)
        main = self.world.main
        self.weights[main.name] = self._distil(main, averaged[main.name], inputs, targets, round)
        unified = logits_of(main.network(main.full, self.weights[main.name]), inputs)
        for name, reference in self.world.references.items():
            if reference is not main:
                self.weights[name] = self._distil(reference, averaged[name], inputs, unified, round)

    def _average(self, replies: Sequence[Reply]) -> dict[str, State]:
        if self.start_from == "keep":
            return self.weights
        given: dict[str, list[Contribution]] = defaultdict(list)
        for r in replies:
            given[r.piece.reference.name].append(Contribution(r.piece.view, r.message["weights"], float(r.samples)))
        return {name: merge(state, given[name]) for name, state in self.weights.items()}

    def _distil(self, reference: Reference, state: State, x: Tensor, targets: Tensor, round: int) -> State:
        views = self._views(reference)

        def outputs(weights: Mapping[str, Tensor], x: Tensor, number: int) -> list[Tensor]:
            return [forward(reference, view, weights, x) for view in dict.fromkeys([reference.full, views[number % len(views)]])]

        settings = Distillation(self.steps, self.batch, self.temperature, Optim("adam", self.lr))
        student = Student(state, reference.parameters, outputs, settings.optim)
        seed, purpose = self.world.seed, (reference.name, round)
        return distil(student, proxy(x, targets, self.batch, seed, *purpose), settings, seed, *purpose)

    def _views(self, student: Reference) -> list[View]:
        """The parts of a network that devices hold, or the whole where none does."""
        views = {p.piece.view.key(): p.piece.view for p in self.world.plans.values() if p.piece.reference is student}
        return list(views.values()) or [student.full]

    def _proxy(self, round: int) -> Tensor:
        if self.world.public is not None:
            return self.world.public
        with torch_seeded(self.world.seed, "noise proxy", round):
            return torch.randn(self.noise, *self.world.main.shape).to(self.world.place)

    def model_for(self, device: Device) -> Model:
        piece = device.piece
        return Model(piece.reference, piece.view, piece.view.extract(self.weights[piece.reference.name]))

    def global_model(self) -> Model:
        return Model(self.world.main, self.world.main.full, self.weights[self.world.main.name])

    def state(self) -> dict[str, State]:
        return self.weights

    def restore(self, state: Mapping[str, State]) -> None:
        self.weights = {name: dict(tensors) for name, tensors in state.items()}

"""Decoupled: one FedAvg for every tier."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nestling.message import Message
from nestling.methods.method import Info, Method, Reply
from nestling.views import Contribution, State, merge
from nestling.world import Device, Model, Piece, World


@dataclass
class Decoupled(Method):
    """Decoupled (the baseline of FlexFL's tables: Chen et al., "FlexFL", 2024).

    Idea: devices of one tier run a FedAvg of their own on the piece that fits them; tiers never exchange anything.
    Loss: cross-entropy. Travels: the tier's network down and up. Merge: mean weighted by n_k, tier by tier. The model of the
    largest tier stands for the global one.
    Differs from the released code: the clients of a round are shared out between the tiers; the released code trains a full set of
    clients for every level, three times the work of the methods it is compared with.
    """

    world: World = field(init=False, repr=False, compare=False)
    weights: dict[str, State] = field(init=False, repr=False, compare=False)

    info = Info(
        title="Decoupled",
        family="baseline",
        heterogeneity="any: tiers never meet",
        auxiliary="none",
        global_model=True,
        paper="Chen et al. (FlexFL), 2024",
        evidence="official code read",
        own_networks=True,
        group="A",
    )

    def setup(self, world: World) -> None:
        self.world = world
        self.weights = {name: plan.piece.view.extract(plan.piece.reference.initial) for name, plan in world.plans.items()}

    def piece(self, device: Device, round: int) -> Piece:
        return self.world.plans[device.tier].piece

    def send(self, device: Device, piece: Piece, round: int) -> Message:
        return Message({"weights": self.weights[device.tier]})

    def merge(self, replies: Sequence[Reply], round: int) -> None:
        by_tier: dict[str, list[Reply]] = defaultdict(list)
        for reply in replies:
            by_tier[reply.device.tier].append(reply)
        for tier, own in by_tier.items():
            view = self.world.plans[tier].piece.view
            whole = view.scatter(self.world.plans[tier].piece.reference.initial, self.weights[tier])
            merged = merge(whole, [Contribution(view, r.message["weights"], float(r.samples)) for r in own])
            self.weights[tier] = view.extract(merged)

    def model_for(self, device: Device) -> Model:
        return self._model(device.tier)

    def global_model(self) -> Model:
        return self._model(max(self.world.plans, key=lambda name: self.world.plans[name].cost.params))

    def _model(self, tier: str) -> Model:
        piece = self.world.plans[tier].piece
        return Model(piece.reference, piece.view, self.weights[tier])

    def state(self) -> dict[str, State]:
        return {f"tier {name}": state for name, state in self.weights.items()}

    def restore(self, state: Mapping[str, State]) -> None:
        self.weights = {name.removeprefix("tier "): dict(tensors) for name, tensors in state.items()}

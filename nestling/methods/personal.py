"""What is common to methods whose clients each have a network of their own, of any kind, that never travels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from nestling.devices.fit import RATIOS
from nestling.methods.api import Client, Device, InputError, Message, Method, Model, Piece, State, Tensors, World, made
from nestling.methods.part import Parts
from nestling.models.taps import Taps
from nestling.seeds import torch_seeded
from nestling.training.memory import section, sectioned
from nestling.world import Plan, ratio_view

Tailor = Callable[[nn.Module, Taps], nn.Module]
"""(a network, where its features and head are) → the network as a method needs it: itself, or another one."""


@dataclass
class Personal(Method):
    """Base of the methods that exchange knowledge: every client keeps its network, and something else travels.

    A client's network is the one that fits its device at rest; it does not shrink when memory is short for a while.
    """

    world: World = made()
    pieces: dict[str, Piece] = made()
    parts: ClassVar[Parts] = ()

    def tailor(self, module: nn.Module, taps: Taps) -> nn.Module:
        """A tier's network as the method needs it, for methods that have to change it."""
        raise NotImplementedError

    def alike(self, device: Device, piece: Piece) -> Hashable | None:
        """The same for all: what the server knows is for everybody, whatever network a client has."""
        return ""

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """Gives every tier the piece of its plan, tailored where the method needs that."""
        tailored = type(self).tailor is not Personal.tailor
        self.world = world
        self.pieces = own_pieces(world, self.tailor) if tailored else {tier: plan.piece for tier, plan in world.plans.items()}

    def piece(self, device: Device, round: int) -> Piece:
        """The network of the device's tier, in every round."""
        return self.pieces[device.tier]

    def model_for(self, device: Device) -> Model:
        """The tier's network with the weights that the client has kept, or with the initial ones."""
        piece = self.piece(device, 0)
        kept = own_weights(self.world.store.get(device.id))
        weights = {name: t.to(self.world.place) for name, t in kept.items()}
        return Model(piece.reference, piece.view, weights or piece.view.extract(piece.reference.initial))

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def start(self, client: Client, received: Message) -> Tensors:
        """The weights that the client has kept; in its first round the initial ones."""
        return own_weights(client.memory) or client.view.extract(client.reference.initial)

    def keep(self, client: Client, received: Message) -> None:
        """Keeps the trained weights."""
        client.memory = sectioned(weights=client.weights)


def own_weights(memory: Tensors) -> State:
    """The weights among what a client keeps; nothing before its first round."""
    return section(memory, "weights")


def common_features(world: World, wanted: int = 0) -> int:
    """How many features all networks are to have: as many as wanted, or (0) as many as the network with the fewest."""
    pieces = [plan.piece for plan in world.plans.values()]
    return wanted or min(p.reference.taps.cut(p.reference.network(p.view)).features for p in pieces)


def own_pieces(world: World, tailor: Tailor) -> dict[str, Piece]:
    """Every tier's network, tailored: the largest that still fits the tier's device. A tailored one is a network of its own."""
    return {tier: _own_piece(world, plan, tailor) for tier, plan in world.plans.items()}


def _own_piece(world: World, plan: Plan, tailor: Tailor) -> Piece:
    found = plan.piece
    for piece in _candidates(plan):
        found = _tailored(world, plan, piece, tailor)
        # A network that a tier brings without a device is taken with whatever the method adds to it.
        if plan.fits(world.cost(found)) or (plan.tier.model and plan.fit is None):
            return found
    if plan.fit is not None:
        limit = plan.too_little(world.cost(found))
        raise InputError(
            f"with what the method adds, no network of tier {plan.tier.name!r} trains on {plan.profile.name}: too little {limit}",
            field=f"fleet.tiers ({plan.tier.name})",
            fix="take a larger device, a smaller network or a smaller batch",
        )
    return found


def _candidates(plan: Plan) -> Iterator[Piece]:
    """The tier's own piece, then smaller ones, where there are any."""
    yield plan.piece
    if not plan.tier.model:
        for ratio in sorted(RATIOS, reverse=True):
            if ratio < plan.ratio:
                yield Piece(plan.piece.reference, ratio_view(plan.piece.reference, ratio))


def _tailored(world: World, plan: Plan, piece: Piece, tailor: Tailor) -> Piece:
    start = piece.view.extract(piece.reference.initial)
    module = copy.deepcopy(piece.reference.network(piece.view, start)).to("cpu")
    with torch_seeded(world.seed, "network", plan.tier.name, "tailored"):
        made = tailor(module, piece.reference.taps.cut(module))
    if made is module:
        return piece
    own = world.add_network(f"{plan.tier.name} (tailored)", made)
    return Piece(own, own.full)

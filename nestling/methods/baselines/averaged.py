"""HeteroAvg: averaging by name over unequal networks, and what the methods built on it share."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from nestling.devices.fit import RATIOS
from nestling.methods.allocation import Ladder, ladder
from nestling.methods.api import Client, Device, Info, Method, Model, Piece, Replies, Reply, Share, World, kept, made
from nestling.views import Contribution, Reference, State, Tensors, prefix
from nestling.views.depth import depth_views


@dataclass
class Averaged(Method):
    """HeteroAvg: layer-wise averaging of unequal networks (Chan et al., "Internal Cross-layer Gradients for Extending Homogeneity to
    Heterogeneity in Federated Learning", ICLR 2024; FedIN, eqs. 19-21).

    Idea: parameters are matched by name, and each entry is averaged over the clients that own it, so that a method made for equal
    networks runs on unequal ones; or clients are averaged only with those that hold an equal piece.
    Loss: cross-entropy. Travels: the client's piece down and up. Merge: per entry, mean over the clients that own it; entries that
    nobody trained keep their value.
    Differs from the released code: nothing is known to; means are taken of weights rather than of deltas, which is the same.

    averaging: "layer" (by name, over all who own an entry) or "group" (among equal pieces only, each group with a state of its own;
               that of the largest device stands for the global model).
    cut:       how networks are made unequal: "width" (first channels of every layer) or "depth" (first blocks of every stage).
    weighting: what a client counts: "uniform" (as published for layer-wise averaging) or "samples" (n_k).
    """

    shares_weights: ClassVar[bool] = True
    averaging: Literal["layer", "group"] = "layer"
    cut: Literal["width", "depth"] = "width"
    weighting: Literal["uniform", "samples"] = "uniform"

    world: World = made()
    reference: Reference = made()
    weights: dict[str, State] = kept()
    _ladder: Ladder | None = made()

    info = Info("baseline", "width or depth: averaged by name, or among equals", "official code read", "B", any_task=True)

    @property
    def as_set(self) -> Info:
        """Cut in width it belongs to group A instead of B; a subclass of another group stays in that one."""
        return self.info if self.cut == "depth" or self.info.group != "B" else replace(self.info, group="A")

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """Makes the ladder of the network's views; by layer one state serves all, by group each begins at its first merge."""
        world.refuse_own_networks(self.info.title)
        self.world, self.reference = world, self.network(world)
        self._ladder = self._make_ladder()
        self.weights = {} if self.averaging == "group" else {"": self.reference.initial.copy()}

    def network(self, world: World) -> Reference:
        """The network that clients hold pieces of."""
        return world.main

    def _make_ladder(self) -> Ladder | None:
        if self.cut == "depth":
            # A head that its client never trains must not be averaged with those that were.
            return ladder(self.world, self.reference, depth_views(self.reference, exits="last"))
        if self.reference is self.world.main:
            return None
        return ladder(self.world, self.reference, [prefix(self.reference.axes, ratio) for ratio in RATIOS])

    def piece(self, device: Device, round: int) -> Piece:
        """The largest view on the ladder that fits; where there is no ladder, the device's own piece."""
        return self._ladder.of(device, round) if self._ladder else device.piece

    def group_of(self, piece: Piece) -> str:
        """Whom a piece is averaged with: all, or those with an equal one."""
        return hashlib.sha256(piece.view.key()).hexdigest()[:16] if self.averaging == "group" else ""

    def state_of(self, group: str) -> State:
        """A group's weights, in the reference's shape."""
        return self.weights.get(group, self.reference.initial)

    def weights_for(self, piece: Piece) -> State:
        """The piece, cut out of the weights of its group."""
        return piece.view.extract(self.state_of(self.group_of(piece)))

    def merge(self, replies: Replies, round: int) -> None:
        """Merges every group by itself; a group without replies stays as it is."""
        for group, own in self._by_group(replies).items():
            self.merge_group(group, own)

    def _by_group(self, replies: Replies) -> dict[str, list[Reply]]:
        groups: dict[str, list[Reply]] = defaultdict(list)
        for reply in replies:
            groups[self.group_of(reply.piece)].append(reply)
        return groups

    def shares(self, replies: Replies) -> dict[str, Share]:
        """One share for every group that has replied."""
        trained, groups = self.reference.parameters, self._by_group(replies)
        return {g: Share(self.state_of(g), trained, [self.contribution(r) for r in own]) for g, own in groups.items()}

    def shared_weights(self) -> dict[str, State]:
        """The weights of every group that has some; by layer, the one state under the empty name."""
        return dict(self.weights)

    def take_weights(self, weights: Mapping[str, State]) -> None:
        """Replaces the weights of the given groups; the others keep theirs."""
        self.weights = {**self.weights, **weights}

    def merge_group(self, group: str, replies: Replies) -> None:
        """Fuses the replies of clients that are averaged with one another."""
        self.weights[group] = self.fuse(self.state_of(group), [self.contribution(reply) for reply in replies])

    def contribution(self, reply: Reply, part: str = "weights") -> Contribution:
        """A reply's part of the mean."""
        return Contribution(reply.piece.view, reply.message[part], self.weight(reply), client=reply.device.id)

    def weight(self, reply: Reply) -> float:
        """How much a reply counts."""
        return float(reply.samples) if self.weighting == "samples" else 1.0

    def model_for(self, device: Device) -> Model:
        """The device's piece at rest, with the weights of its group."""
        return self._model(self.piece(device, 0))

    def global_model(self) -> Model | None:
        """By layer the whole network; by group the largest piece that any tier holds."""
        if self.averaging == "layer":
            return self._model(Piece(self.reference, self.reference.full))
        pieces = [self.piece(Device(0, tier, plan.piece, 0), 0) for tier, plan in self.world.plans.items()]
        return self._model(max(pieces, key=lambda piece: self.world.cost(piece).params))

    def _model(self, piece: Piece) -> Model:
        return Model(piece.reference, piece.view, piece.view.extract(self.state_of(self.group_of(piece))))


def parameters_of(client: Client, tensors: Tensors) -> State:
    """The trained tensors among some of a client's state."""
    return {name: tensor for name, tensor in tensors.items() if name in client.reference.parameters}

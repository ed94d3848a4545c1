"""InclusiveFL: depth groups, and momentum from deeper groups to shallower ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from nestling.methods.api import Device, Info, Model, Piece, Replies, Reply, World, kept, made, pack
from nestling.methods.labels import output_layer
from nestling.methods.submodel.by_depth import ByDepth
from nestling.models import ExitNet
from nestling.settings import UnitShare
from nestling.views import Contribution, Reference, State, Tensors, View, without
from nestling.views.depth import columns, depth_views
from nestling.views.depth import kept as units


@dataclass
class InclusiveFL(ByDepth):
    """InclusiveFL (Liu, Wu, Wu, Wang, Lyu, Chen, Xie, "No One Left Behind: Inclusive Federated Learning over Heterogeneous Devices",
    KDD 2022).

    Idea: devices of one size form a group that trains the first layers of the network with a classifier of its own. The last layer
    of a shallow group has to do what several layers do in the next deeper one, so it also takes a share of their updates.
    Loss: cross-entropy. Travels: the group's layers and classifier down and up. Merge: mean weighted by n_k over the groups that
    have a layer; classifiers stay in their group. Before it, momentum distillation: the update g of a group's last layer becomes
    β·G + (1-β)·g, where G is the mean update, in the next deeper group that took part, of that layer and those beyond it.
    Differs from the released code: there the momentum never acts (it is overwritten); here it does, on updates of weights. In a
    residual network every stage has its own last layer and extra blocks; updates of tensors of another shape are left out of G.

    beta:      the share β of the deeper group's update; 0 turns momentum distillation off.
    local_one: the deepest layer of every group stays in its group too.
    """

    beta: UnitShare = 0.2
    local_one: bool = False

    columns: list[list[str]] = made()
    shared: list[View] = made()
    own: list[State] = kept()

    info = Info("depth", "depth: the first layers, a classifier a group", "official code read", "B", model="tinyresnet")

    def setup(self, world: World) -> None:
        """Finds what every group shares and what it keeps to itself, all with initial weights."""
        super().setup(world)
        self.columns = columns(world.main)
        views = [piece.view for piece in self.ladder.pieces]
        self.shared = [without(view, self._kept_in_group(view)) for view in views]
        both = zip(views, self.shared, strict=True)
        self.own = [{n: self.weights[n] for n in view.names if n not in shared.shapes} for view, shared in both]

    def views(self, reference: Reference) -> list[View]:
        """The first layers at every depth, with the last exit only where there are exits."""
        return depth_views(reference, exits="last")

    def _kept_in_group(self, view: View) -> list[str]:
        main = self.world.main
        deepest = [self.columns[-1][units(view, self.columns[-1]) - 1]] if self.local_one else []
        # Every group has an output layer of its own; in a network with exits each depth has one anyway.
        exits = isinstance(main.module, ExitNet)
        return deepest if exits else [*deepest, output_layer(main, self.world.classes)[0].rpartition(".")[0]]

    def _group(self, view: View) -> int:
        return next(g for g, piece in enumerate(self.ladder.pieces) if piece.view.key() == view.key())

    def weights_for(self, piece: Piece) -> State:
        """The shared weights of the piece, with what its group keeps to itself."""
        return pack(self._model(self._group(piece.view)).state)

    def contribution(self, reply: Reply) -> Contribution:
        """The reply's weights, by samples."""
        return Contribution(reply.piece.view, reply.message["weights"], float(reply.samples), client=reply.device.id)

    def merge(self, replies: Replies, round: int) -> None:
        """Momentum distillation from each group to the next shallower one, then the mean over groups and within each."""
        groups: dict[int, list[Reply]] = {}
        for reply in replies:
            groups.setdefault(self._group(reply.piece.view), []).append(reply)
        given = {group: [self.contribution(reply) for reply in own] for group, own in groups.items()}
        sent = {group: own[0].sent["weights"] for group, own in groups.items()}
        # From shallow to deep: what a group takes over is the deeper one's own update, not one that was mixed already.
        for group, deeper in pairwise(sorted(groups)) if self.beta else ():
            taught = self._taught(group, deeper, self._update(sent[deeper], given[deeper]))
            given[group] = [_blend(c, sent[group], taught, self.beta) for c in given[group]]
        self.own = [self.fuse(own, given.get(group, ())) for group, own in enumerate(self.own)]
        self.weights = self.fuse(self.weights, [replace(c, view=self.shared[g]) for g, own in given.items() for c in own])

    def _update(self, sent: Tensors, given: Sequence[Contribution]) -> State:
        mean = self.fuse(sent, given)
        return {name: mean[name] - tensor for name, tensor in sent.items()}

    def shared_weights(self) -> dict[str, State]:
        """The weights that all groups share, and by number what each keeps to itself."""
        return {**super().shared_weights(), **{f"group{number}": own for number, own in enumerate(self.own)}}

    def take_weights(self, weights: Mapping[str, State]) -> None:
        """Replaces the shared weights, and those of the groups that are given."""
        super().take_weights(weights)
        self.own = [weights.get(f"group{number}", own) for number, own in enumerate(self.own)]

    def _taught(self, group: int, deeper: int, update: Tensors) -> State:
        """G by tensor of the group's last layers."""
        view, beyond, taught = self.ladder.pieces[group].view, self.ladder.pieces[deeper].view, {}
        for column in self.columns:
            last, end = units(view, column) - 1, units(beyond, column)
            if end > last + 1:
                for name in sorted(n for n in self.world.main.parameters if n.startswith(column[last] + ".")):
                    leaf = name.removeprefix(column[last])
                    others = [unit + leaf for unit in column[last:end] if unit + leaf in update]
                    alike = [update[other] for other in others if update[other].shape == update[name].shape]
                    taught[name] = torch.stack(alike).mean(0)
        return taught

    def model_for(self, device: Device) -> Model:
        """The model of the group that the device belongs to at rest."""
        return self._model(self.ladder.rung(device))

    def global_model(self) -> Model:
        """The model of the deepest group."""
        return self._model(len(self.ladder.pieces) - 1)

    def _model(self, group: int) -> Model:
        view = self.ladder.pieces[group].view
        return Model(self.world.main, view, {**view.extract(self.weights), **self.own[group]})


def _blend(given: Contribution, sent: Tensors, taught: Tensors, beta: float) -> Contribution:
    """The contribution with its last layers' updates mixed. All members of a group shift alike, so their mean shifts by that."""
    mixed = {n: sent[n] + (1 - beta) * (given.state[n] - sent[n]) + beta * taken for n, taken in taught.items()}
    return replace(given, state={**given.state, **mixed}) if mixed else given

"""FedTGP: common prototypes that the server trains to keep classes apart, instead of means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.methods.api import Info, Replies, State, Tensors, World, kept, made
from nestling.methods.representation.class_table import ClassTable
from nestling.methods.representation.fedproto import FedProto
from nestling.methods.representation.prototypes import TrainsOnPrototypes
from nestling.models.prototypes import Prototypes
from nestling.seeds import torch_seeded
from nestling.settings import NotNegative, Whole


@dataclass
class FedTGP(TrainsOnPrototypes, FedProto):
    """FedTGP (Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data and Model
    Heterogeneity in Federated Learning", AAAI 2024).

    Idea: means of prototypes of unlike clients lie close to one another. The server instead trains common prototypes (a vector per
    class, through two layers) to be near the clients' own of the class and, by a margin, far from those of other classes.
    Loss: the client's is FedProto's: cross-entropy + λ·mean square of (features − the class's common prototype). The server's, for a
    client's prototype p of class c: cross-entropy of −|p − g_k| − [k = c]·δ over the classes k, with the margin
    δ = min(τ, the largest distance of a class's mean prototype in this round from its nearest other one).
    Travels: what FedProto's clients tell (by "uniform" no counts), and the common prototypes of the classes that anybody has told of:
    at most C·d each way. Merge: the server's training, which goes on from what it has. There is no global model.
    Differs from HtFLlib, by the same authors, which was read: prototypes of classes that nobody ever told of stay on the server;
    where only one class is told of δ is τ here too; the root of a distance has a gradient at 0. As in FedProto, a client that decides
    by prototypes chooses among the classes it holds, there among all. The paper is from memory.

    lam, size, predict: see FedProto.
    weighting:    what a client counts in the mean prototypes that δ is taken from: "uniform" (as published) or "samples".
    threshold:    τ.
    epochs:       passes of the server over the prototypes of a round.
    server_lr:    its learning rate, of plain steps.
    server_batch: prototypes per step.
    hidden:       width between the two layers (0: d).
    """

    weighting: Literal["samples", "uniform"] = "uniform"
    threshold: NotNegative = 100.0
    hidden: Whole = 0

    network: Prototypes = made()
    trained: State = kept()

    by_rule = False  # the server trains on single prototypes: there is no mean that a rule could take the place of
    info = Info.of_own_networks(
        "representation",
        "any: networks never meet, features have one size",
        "authors' code (HtFLlib) read; paper from memory",
        "F",
    )

    def setup(self, world: World) -> None:
        """FedProto's state, and common prototypes that are not trained yet."""
        super().setup(world)
        with torch_seeded(world.seed, "prototypes"):
            network = Prototypes(world.classes, self.wide, self.hidden or self.wide)
        self.network = network.to(world.place)
        self.trained = {name: t.detach().clone() for name, t in self.network.state_dict().items()}

    def merge(self, replies: Replies, round: int) -> None:
        """Trains the common prototypes on those of the round, with the margin that these give."""
        if not any(reply.message.facts["classes"] for reply in replies):
            return
        nothing = ClassTable.empty(self.shapes(self.world.classes), self.world.classes, self.world.place)
        now = nothing.after(replies, self.weighting, most=self.most_of_class)
        apart = margin(now.rows["features"], now.known, self.threshold)
        self.trained = self.taught("fedtgp", self.trained, self._prototypes, contrast, replies, round, apart)
        with torch.no_grad():
            rows = self._prototypes(self.trained)
        known = self.table.known | now.known
        self.table = ClassTable({"features": torch.where(known[:, None], rows, 0.0)}, known)

    def _prototypes(self, state: Tensors, *asked: object) -> Tensor:
        """The prototypes that a state makes, whatever it is asked about."""
        found: Tensor = torch.func.functional_call(self.network, dict(state), ())
        return found


def margin(centres: Tensor, known: Tensor, threshold: float) -> Tensor:
    """The largest distance of a known class from its nearest other one, and no more than a threshold."""
    own = centres[known]
    far = (own[:, None] - own[None]).square().sum(-1).sqrt().fill_diagonal_(torch.inf)
    return far.amin(1).amax().clamp(max=threshold)


def contrast(x: Tensor, y: Tensor, prototypes: Tensor, apart: Tensor) -> Tensor:
    """For every row, the cross-entropy that makes the prototype of its class the nearest one, by a margin."""
    far = (x[:, None] - prototypes[None]).square().sum(-1).add(1e-12).sqrt()
    return F.cross_entropy(-far - apart * F.one_hot(y, len(prototypes)), y, reduction="none")

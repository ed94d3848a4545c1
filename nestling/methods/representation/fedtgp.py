"""FedTGP: common prototypes that the server trains to keep classes apart, instead of means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.methods.api import Info, Reply, State, World
from nestling.methods.kept import made
from nestling.methods.representation.class_means import Table
from nestling.methods.representation.fedproto import FedProto
from nestling.methods.representation.prototypes import gathered, passes
from nestling.schema import require
from nestling.seeds import torch_seeded
from nestling.training.distiller import Student
from nestling.training.objectives import Batch
from nestling.training.optimisers import Optim


class Prototypes(nn.Module):
    """A vector for every class, through two layers."""

    def __init__(self, classes: int, size: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(classes, size))
        self.layers = nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, size))

    def forward(self) -> Tensor:
        return self.layers(self.embedding)


@dataclass
class FedTGP(FedProto):
    """FedTGP (Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data and Model
    Heterogeneity in Federated Learning", AAAI 2024).

    Idea: means of prototypes of unlike clients lie close to one another. The server instead trains common prototypes (a vector a
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
    server_batch: prototypes a step.
    hidden:       width between the two layers (0: d).
    """

    weighting: str = "uniform"
    threshold: float = 100.0
    epochs: int = 100
    server_lr: float = 0.01
    server_batch: int = 10
    hidden: int = 0

    network: Prototypes = made()
    trained: State = made()

    info = Info.of_own_networks(
        "representation",
        "any: networks never meet, features have one size",
        "the authors' code (HtFLlib) read; the paper from memory",
        "F",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("threshold", "epochs", "hidden"):
            require(getattr(self, name) >= 0, "must not be negative", f"method.{name}")
        require(self.server_lr > 0, "must be above 0", "method.server_lr")
        require(self.server_batch >= 1, "must be at least 1", "method.server_batch")

    def setup(self, world: World) -> None:
        super().setup(world)
        with torch_seeded(world.seed, "prototypes"):
            made = Prototypes(world.classes, self.wide, self.hidden or self.wide)
        self.network = made.to(world.place)
        self.trained = {name: t.detach().clone() for name, t in self.network.state_dict().items()}

    def merge(self, replies: Sequence[Reply], round: int) -> None:
        if not any(reply.message.facts["classes"] for reply in replies):
            return
        nothing = Table.empty(self.shapes(self.world.classes), self.world.classes, self.world.place)
        now = nothing.told(replies, self.weighting)
        self._teach(replies, margin(now.rows["features"], now.known, self.threshold), round)
        with torch.no_grad():
            rows = self._prototypes(self.trained)
        known = self.table.known | now.known
        self.table, self._sent = Table({"features": torch.where(known[:, None], rows, 0.0)}, known), None

    def _teach(self, replies: Sequence[Reply], apart: Tensor, round: int) -> None:
        """The server's steps of a round."""
        work, (x, y) = self.world.recorder, gathered(replies, "features", self.world.place)
        forward, optim = lambda state, x, number: self._prototypes(state), Optim("sgd", self.server_lr)
        student = work.student("prototypes", self.trained, list(self.trained), forward, optim)
        with work.session():
            for batch in passes(x, y, self.epochs, self.server_batch, self.world.seed, "fedtgp", round):
                work.do("prototypes", partial(_step, student), *batch, apart)
            self.trained = student.state()

    def _prototypes(self, state: Mapping[str, Tensor]) -> Tensor:
        made: Tensor = torch.func.functional_call(self.network, dict(state), ())
        return made

    def state(self) -> dict[str, State]:
        return {**super().state(), "trained": self.trained}

    def restore(self, state: Mapping[str, State]) -> None:
        super().restore(state)
        self.trained = dict(state["trained"])


def margin(centres: Tensor, known: Tensor, threshold: float) -> Tensor:
    """How far a class is at most from its nearest other one, among those that are known, and no more than a threshold."""
    own = centres[known]
    far = (own[:, None] - own[None]).square().sum(-1).sqrt().fill_diagonal_(torch.inf)
    return far.amin(1).amax().clamp(max=threshold)


def contrast(x: Tensor, y: Tensor, prototypes: Tensor, apart: Tensor) -> Tensor:
    """Of every row, the cross-entropy by which its class's prototype is to be the nearest one, by a margin."""
    far = (x[:, None] - prototypes[None]).square().sum(-1).add(1e-12).sqrt()
    return F.cross_entropy(-far - apart * F.one_hot(y, len(prototypes)), y, reduction="none")


def _step(student: Student, x: Tensor, y: Tensor, counts: Tensor, apart: Tensor) -> None:
    student.update(Batch(x, y, y, mask=counts).mean(contrast(x, y, student(x), apart)))

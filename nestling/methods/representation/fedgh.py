"""FedGH: one global header, trained by the server on the clients' prototypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from nestling.methods.api import Client, Info, Reply, State
from nestling.methods.representation.class_means import ByClass, class_means, look
from nestling.methods.representation.common_head import PREDICTIONS, CommonHead
from nestling.methods.representation.prototypes import gathered, passes
from nestling.schema import require
from nestling.training.distiller import Student
from nestling.training.objectives import Batch
from nestling.training.optimisers import Optim
from nestling.views.flat import pack


@dataclass
class FedGH(CommonHead, ByClass):
    """FedGH (Yi et al., "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM MM 2023).

    Idea: a client tells the mean features of every class it holds. The server trains one classifier on all of them, and every client
    puts it on top of its own network before it trains: so a classifier learns classes that a client does not hold.
    Loss: cross-entropy, of the client on its rows and of the server's classifier on the prototypes of a round, each of which is a
    sample. Travels: a row of d numbers a class up, for those the client holds; the classifier, C·(d + 1) numbers, down. Merge: the
    server's training, which goes on from the classifier it has. There is no global model.
    Differs from HtFLlib, which was read: there the order of prototypes and their batches come from a loader of its own, and a client
    that was not asked keeps the classifier it has. Networks with different numbers of features have them pooled to the fewest.
    The paper is from memory, and so is that its server goes through the prototypes client by client, which `batch` does not follow.

    size:         d, the number of features (0: as many as the network with the fewest has).
    epochs:       passes of the server over the prototypes of a round (100 as in HtFLlib).
    server_lr:    its learning rate, of plain steps.
    server_batch: prototypes a step.
    predict:      what a client decides with: the "common" classifier as it is now, as in HtFLlib, or its "own" as it last trained it.
                  The other one is reported beside it.
    """

    epochs: int = 100
    server_lr: float = 0.01
    server_batch: int = 10

    info = Info.of_own_networks(
        "representation",
        "any: bodies are personal, features and classifier have one form",
        "reimplementation (HtFLlib) read; the paper from memory",
        "F",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.epochs >= 0, "must not be negative", "method.epochs")
        require(self.server_lr > 0, "must be above 0", "method.server_lr")
        require(self.server_batch >= 1, "must be at least 1", "method.server_batch")
        allowed = f"allowed: {', '.join(PREDICTIONS)}"
        require(self.predict in PREDICTIONS, f"unknown predict {self.predict!r}", "method.predict", allowed)

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        return {"features": (self.wide,)}

    @property
    def counted(self) -> bool:
        return False

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def merge(self, replies: Sequence[Reply], round: int) -> None:
        if not any(reply.message.facts["classes"] for reply in replies):
            return
        work, (x, y) = self.world.recorder, gathered(replies, "features", self.world.place)
        student = work.student("header", self.head, list(self.head), _said, Optim("sgd", self.server_lr))
        with work.session():
            for batch in passes(x, y, self.epochs, self.server_batch, self.world.seed, "fedgh", round):
                work.do("header", partial(_step, student), *batch)
            self.head = pack(student.state())

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def statistics(self, client: Client) -> State:
        features, _, y = look(client)
        return {"features": class_means(features, y, client.classes)}


def _said(head: Mapping[str, Tensor], x: Tensor, number: int) -> Tensor:
    return F.linear(x, head["weight"], head.get("bias"))


def _step(student: Student, x: Tensor, y: Tensor, counts: Tensor) -> None:
    student.update(Batch(x, y, y, mask=counts).mean(F.cross_entropy(student(x), y, reduction="none")))

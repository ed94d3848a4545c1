"""FedGH: one global header, trained by the server on the clients' prototypes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from nestling.methods.api import Client, Replies, State, Tensors, pack
from nestling.methods.representation.class_means import class_means, outputs_of
from nestling.methods.representation.common_head import CLASSIFIER, INFO, CommonHead
from nestling.methods.representation.prototypes import TrainsOnPrototypes


@dataclass
class FedGH(CommonHead, TrainsOnPrototypes):
    """FedGH (Yi et al., "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM MM 2023).

    Idea: a client tells the mean features of every class it holds. The server trains one classifier on all of them, and every client
    puts it on top of its own network before it trains: so a classifier learns classes that a client does not hold.
    Loss: cross-entropy, of the client on its rows and of the server's classifier on the prototypes of a round, each of which is a
    sample. Travels: a row of d numbers per class up, for those the client holds; the classifier, C·(d + 1) numbers, down. Merge: the
    server's training, which goes on from the classifier it has. There is no global model.
    Differs from HtFLlib, which was read: there the order of prototypes and their batches come from a loader of its own, and a client
    that was not asked keeps the classifier it has. Networks with different numbers of features have them pooled to the fewest.
    The paper is from memory, and so is that its server goes through the prototypes client by client, which `batch` does not follow.

    size:         d, the number of features (0: as many as the network with the fewest has).
    epochs:       passes of the server over the prototypes of a round (100 as in HtFLlib).
    server_lr:    its learning rate, of plain steps.
    server_batch: prototypes per step.
    predict:      what a client decides with: the "common" classifier as it is now, as in HtFLlib, or its "own" as it last trained it.
                  The other one is reported beside it.
    """

    info = INFO
    parts = (replace(CLASSIFIER, up=None), *TrainsOnPrototypes.parts)
    counted = False

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        """One mean of features per class."""
        return {"features": (self.wide,)}

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def merge(self, replies: Replies, round: int) -> None:
        """Trains the common classifier on the prototypes of the round, if there are any."""
        if any(reply.message.facts["classes"] for reply in replies):
            self.head = pack(self.taught("fedgh", self.head, _said, _wrong, replies, round))

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def statistics(self, client: Client) -> State:
        """The client's mean features per class."""
        features, _, y = outputs_of(client)
        return {"features": class_means(features, y, client.classes)}


def _said(head: Tensors, x: Tensor, _number: int) -> Tensor:
    return F.linear(x, head["weight"], head.get("bias"))


def _wrong(_x: Tensor, y: Tensor, said: Tensor) -> Tensor:
    return F.cross_entropy(said, y, reduction="none")

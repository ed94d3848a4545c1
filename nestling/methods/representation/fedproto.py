"""FedProto: clients of any kind agree on what a class looks like in feature space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.message import Message
from nestling.methods.method import Info, Reply
from nestling.methods.representation.class_means import STATISTICS, WEIGHTINGS, ByClass, class_means, gap, look, spread
from nestling.models.embedding import ACTIVATIONS, with_embedding
from nestling.models.taps import Taps
from nestling.schema import require
from nestling.training.client import Client
from nestling.training.objectives import Batch, Given, Net, see
from nestling.training.phase import Phase
from nestling.views import State
from nestling.world import Device, Model


@dataclass
class FedProto(ByClass):
    """FedProto (Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022).

    Idea: a class's prototype is the mean of its features on a client. The server averages prototypes, and every client pulls its
    features towards the common ones, so that networks which share nothing come to share a feature space.
    Loss: cross-entropy + λ·mean square of (features − the class's common prototype), over the classes that have one. Travels: a row of
    d numbers for each class, up for those the client holds (and, with weighting "samples", how many rows it has of them), down for
    those the server knows: at most C·d. Merge: per class, the mean over the clients that hold it.
    Differs from the released code: prototypes are taken after local training in evaluation mode over all of the client's rows, not
    during the last epoch in training mode while the network still moves; means are weighted as in the paper (its further factor
    1/|N_j| would shrink prototypes with every client and is left out); a class that nobody tells of in a round keeps its prototype.
    The features are those of an embedding in front of the classifier, which every network is given.

    lam:        λ (0.1 for CIFAR in the paper).
    size:       d, the number of features.
    activation: what bounds the embedding: relu, sigmoid, tanh or none.
    weighting:  what a client counts in a class's mean: "samples" (its rows of the class, the paper) or "uniform" (the code).
    predict:    what a client decides with: its "head", or the nearest common "prototype" among the classes it holds. The latter is
                the linear layer 2⟨f, c⟩ − |c|² in the head's place.
    """

    lam: float = 1.0
    activation: str = "relu"
    weighting: str = "samples"
    predict: str = "head"

    info = Info(
        title="FedProto",
        family="representation",
        heterogeneity="any: networks never meet, features have one size",
        auxiliary="none",
        global_model=False,
        paper="Tan et al., AAAI 2022",
        evidence="official code read",
        own_networks=True,
        personal=True,
        group="F",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.lam >= 0, "must not be negative", "method.lam")
        for name, allowed in (("activation", tuple(ACTIVATIONS)), ("weighting", WEIGHTINGS), ("predict", ("head", "prototype"))):
            value = getattr(self, name)
            require(value in allowed, f"unknown {name} {value!r}", f"method.{name}", f"allowed: {', '.join(allowed)}")

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        return {"features": (self.size,)}

    @property
    def counted(self) -> bool:
        return self.weighting == "samples"

    def tailor(self, module: nn.Module, taps: Taps) -> nn.Module:
        return with_embedding(module, taps, self.size, self.activation)

    def merge(self, replies: Sequence[Reply], round: int) -> None:
        self.table, self._sent = self.table.told(replies, self.weighting), None

    def model_for(self, device: Device) -> Model:
        model = super().model_for(device)
        held = torch.from_numpy(self.world.split.counts(device.id) > 0).to(self.table.known.device) & self.table.known
        if self.predict == "head" or not bool(held.any()):
            return model
        return Model(model.reference, model.view, {**model.state, **nearest(model.reference.taps.head, self._prototypes, held)})

    @property
    def _prototypes(self) -> Tensor:
        return self.table.rows["features"]

    def phases(self, client: Client, received: Message) -> Sequence[Phase]:
        if STATISTICS not in received:
            return [client.train.phase(client.round)]
        objective = partial(_near_prototypes, lam=self.lam, head=client.reference.taps.head)
        return [client.train.phase(client.round, objective=objective, given=spread(received, client.classes))]

    def statistics(self, client: Client) -> State:
        features, _, y = look(client)
        return {"features": class_means(features, y, client.classes)}


def nearest(head: str, prototypes: Tensor, among: Tensor) -> State:
    """The linear layer that says, of some classes, whose prototype is nearest: −|f − c|² without |f|², which is the same for all."""
    weight = torch.where(among[:, None], 2 * prototypes, 0.0)
    bias = torch.where(among, -prototypes.square().sum(1), -torch.inf)
    return {f"{head}.weight": weight, f"{head}.bias": bias}


def _near_prototypes(net: Net, batch: Batch, given: Given, *, lam: float, head: str) -> Tensor:
    logits, features = see(net, batch.x, head)
    return batch.mean(F.cross_entropy(logits, batch.y, reduction="none") + lam * gap(features, batch.y, given))

"""FedProto: clients of any kind agree on what a class looks like in feature space."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from nestling.methods.api import Client, Device, Info, Message, Model, Phases, Replies, State
from nestling.methods.representation.class_means import ByClass, class_means, gap, outputs_of, spread
from nestling.methods.representation.class_table import STATISTICS
from nestling.settings import NotNegative
from nestling.tasks import losses
from nestling.training.objectives import Batch, Given, Net, forward_with_features


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
    The features are what the classifier sees; where networks have different numbers of them, they are pooled to the fewest.

    lam:        λ (0.1 for CIFAR in the paper).
    size:       d, the number of features (0: as many as the network with the fewest has).
    weighting:  what a client counts in a class's mean: "samples" (its rows of the class, the paper) or "uniform" (the code).
    predict:    what a client decides with: the nearest common "prototype" among the classes it holds, as published, or its "head".
                The former is the linear layer 2⟨f, c⟩ − |c|² in the head's place. The other one is reported beside it.
    """

    lam: NotNegative = 1.0
    weighting: Literal["samples", "uniform"] = "samples"
    predict: Literal["prototype", "head"] = "prototype"

    by_rule = True
    info = Info.of_own_networks("representation", "any: networks never meet, features have one size", "official code read", "F")

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        """One prototype per class."""
        return {"features": (self.wide,)}

    @property
    def counted(self) -> bool:
        """Only if means are weighted by rows."""
        return self.weighting == "samples"

    def merge(self, replies: Replies, round: int) -> None:
        """The mean prototype per class over the clients that tell of it, weighted as set."""
        self.table = self.table.after(replies, self.weighting, robust=self.robust, most=self.most_of_class)

    def model_for(self, device: Device) -> Model:
        """The device's network, deciding by prototypes or by its head as `predict` says."""
        return self._deciding_by(self.predict, device)

    def other_models(self, device: Device) -> dict[str, Model]:
        """The device's network, deciding in the other way."""
        other = "head" if self.predict == "prototype" else "prototype"
        return {f"by {other}": self._deciding_by(other, device)}

    def _deciding_by(self, way: str, device: Device) -> Model:
        model = super().model_for(device)
        held = torch.from_numpy(self.world.split.counts(device.id) > 0).to(self.table.known.device) & self.table.known
        if way == "head" or not bool(held.any()):
            return model
        layer = nearest(model.reference.taps.head, self.table.rows["features"], held)
        return Model(model.reference, model.view, {**model.state, **layer})

    def phases(self, client: Client, received: Message) -> Phases:
        """Local training, with the pull towards common prototypes once any are known."""
        if STATISTICS not in received:
            return [client.train.phase(client.round)]
        objective = partial(_near_prototypes, lam=self.lam, head=client.reference.taps.head)
        return [client.train.phase(client.round, objective=objective, given=spread(received, client.classes))]

    def statistics(self, client: Client) -> State:
        """The client's prototypes: its mean features per class."""
        features, _, y = outputs_of(client)
        return {"features": class_means(features, y, client.classes)}


def nearest(head: str, prototypes: Tensor, among: Tensor) -> State:
    """The linear layer that says, of some classes, whose prototype is nearest: −|f − c|² without |f|², which is the same for all."""
    weight = torch.where(among[:, None], 2 * prototypes, 0.0)
    bias = torch.where(among, -prototypes.square().sum(1), -torch.inf)
    return {f"{head}.weight": weight, f"{head}.bias": bias}


def _near_prototypes(net: Net, batch: Batch, given: Given, *, lam: float, head: str) -> Tensor:
    logits, features = forward_with_features(net, batch.x, head)
    return batch.mean(losses(logits, batch.y) + lam * gap(features, batch.y, given))

"""FedMD: unlike networks that agree on logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.methods.api import Client, Device, Info, Message, Phase, Phases, Piece, Replies, State, World, made, require
from nestling.methods.part import Part
from nestling.methods.personal import own_weights
from nestling.methods.public import SAID, PublicExchange, epochs_for
from nestling.settings import Count, Positive, Whole
from nestling.store import Records
from nestling.training.distiller import combine
from nestling.training.objectives import Batch, Given, Net
from nestling.training.optimisers import Optim

_CONSENSUS = Part("consensus", lambda method, *_: method.known)
_LABELS = Part("labels", lambda method, device, *_: method.labels_for(device))


@dataclass
class FedMD(PublicExchange):
    """FedMD (Li, Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS 2019 workshop).

    Idea: networks with nothing in common still put out logits of the same classes. Clients exchange theirs on a public set, and each
    learns the consensus ("digest") before it goes back to its own data ("revisit").
    Loss: in a client's first round cross-entropy on the public labels, then on its own data. In every later one digest: mean absolute
    error to the consensus logits as they are, then revisit: cross-entropy on its own data.
    Travels: up logits (N_align × C); down the consensus (N_align × C), and until a client has answered once the public labels, one
    byte each. Merge: the plain mean of the logits. There is no global model.
    Differs from the paper: a round is digest, revisit, and the logits that the next consensus is made of (see `PublicExchange`),
    which is the paper's order shifted by half a round. Training to convergence at the start is `pretrain` epochs on the public rows
    and one round's epochs on the client's own. Revisiting uses the run's training settings (published: Adam 1e-3, 4 epochs, batch 5).

    align:        N_align, the public rows of a round (5000 as published, all where there are fewer).
    pretrain:     epochs on the public labels in a client's first round; 0 leaves them out, and labels are not needed then.
    digest:       steps on the consensus (published: 20, an epoch of 5000 rows in batches of 256), however few rows there are; 0
                  leaves the consensus out: what the public labels do alone.
    digest_batch: rows per batch there.
    digest_lr:    its learning rate (Adam).
    """

    pretrain: Whole = 20
    digest: Whole = 20
    digest_batch: Count = 256
    digest_lr: Positive = 1e-3

    told: Records = made()

    by_rule = True
    info = Info.of_own_networks(
        "public data",
        "any: only logits travel",
        "official code read",
        "D",
        "public inputs on every client, labelled for the start",
    )
    parts = (_CONSENSUS, _LABELS, SAID)

    @property
    def as_set(self) -> Info:
        """Without pretraining the public inputs need no labels."""
        return self.info if self.pretrain else replace(self.info, auxiliary="public inputs on every client, unlabelled")

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """Records of who has had the public labels, which must exist unless `pretrain` is 0."""
        super().setup(world)
        self.told = Records(world.store)
        there = world.public_labels is not None or not self.pretrain
        require(there, "FedMD starts from public labels, and there are none", "split.public", "set method.pretrain = 0")

    def alike(self, device: Device, piece: Piece) -> bool:
        """Devices that may lack labels get one message, all others another."""
        return self._new(device)

    def _new(self, device: Device) -> bool:
        """Whether a device may lack labels: one that has answered has had and used them, one that vanished may not have."""
        return bool(self.pretrain) and not self.told.get(device.id)

    def labels_for(self, device: Device) -> State:
        """The public labels, as they travel to a device that is new."""
        labels = self.world.public_labels if self._new(device) else None
        return {} if labels is None else {"labels": labels.to(torch.uint8 if self.world.classes <= 256 else torch.int32)}

    def merge(self, replies: Replies, round: int) -> None:
        """Notes who has had the labels; the plain mean of the logits becomes the consensus."""
        for reply in replies:
            if "labels" in reply.sent:
                self.told.put(reply.device.id, {"labels": torch.tensor(True)}, round)
        if replies:
            said = [reply.message["logits"]["logits"] for reply in replies]
            agreed = self.robust.agree(said) if self.robust else combine(said, [reply.samples for reply in replies], "uniform")
            self.know({"logits": agreed}, round)

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def phases(self, client: Client, received: Message) -> Phases:
        """The public labels in a client's first round, the digest of the consensus, then its own data."""
        found = []
        if "labels" in received and not own_weights(client.memory):
            start = {"epochs": self.pretrain, "objective": _labelled, "given": received["labels"]}
            found.append(client.train.phase(client.round, source="public", **start))
        if "consensus" in received and self.digest:
            rows, optim, given = self.rows(client, received), Optim("adam", self.digest_lr), received["consensus"]
            epochs = epochs_for(self.digest, len(rows), self.digest_batch)
            found.append(
                Phase(_digest, optim, epochs, batch=self.digest_batch, steps=self.digest, source="public", given=given, rows=rows)
            )
        return [*found, client.train.phase(client.round)]


def _labelled(net: Net, batch: Batch, given: Given) -> Tensor:
    return batch.mean(F.cross_entropy(net(batch.x), given["labels"][batch.rows].long(), reduction="none"))


def _digest(net: Net, batch: Batch, given: Given) -> Tensor:
    return batch.mean((net(batch.x) - given["logits"][batch.rows]).abs())

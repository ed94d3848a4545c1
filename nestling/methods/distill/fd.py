"""FD: what the others say of a class, on average, teaches everybody."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from nestling.methods.api import Client, Device, Info, Message, Phases, Piece, Replies, State, World, kept, made
from nestling.methods.representation.class_means import TOLD, TellsByClass, class_means, gap, outputs_of, spread
from nestling.methods.representation.class_table import STATISTICS
from nestling.settings import NotNegative, Positive
from nestling.store import Records
from nestling.tasks import losses
from nestling.training.objectives import Batch, Given, Net, divergence

LOGITS = "logits"


@dataclass
class FD(TellsByClass):
    """FD, federated distillation (Jeong et al., "Communication-Efficient On-Device Machine Learning: Federated Distillation and
    Augmentation under Non-IID Private Data", 2018).

    Idea: a client tells its mean logits of every class it holds. The mean of the other clients' is its teacher for the inputs of
    that class: C numbers per class travel, whatever the networks are.
    Loss: cross-entropy + γ·distance of (the network's logits, the others' mean logits of the input's class), where there are any:
    T²·KL of their softmax, or mean square. Travels: a row of C numbers per class, up for those the client holds, down for those that
    another one has told of: at most C². Merge: per class, the plain mean over what every other client told last.
    Differs from the paper: logits are taken after local training in evaluation mode, not gathered while the network still moves; not
    everybody has to take part in a round, so that of an absent client its last word counts; the augmentation by a generator (FAug) is
    left out. The paper is from memory: whether it averages logits before or after the softmax, and γ, we do not know; here they
    are averaged before. Differs from HtFLlib, which was read: there a client's own logits are in its teacher (`others` off), a class
    that nobody told of in a round is forgotten, and the loss is cross-entropy against logits that are no distribution.

    gamma:       γ.
    distance:    "kl" or "mse".
    temperature: T, of "kl".
    others:      whether a client's own logits are left out of its teacher.
    """

    gamma: NotNegative = 1.0
    distance: Literal["kl", "mse"] = "kl"
    temperature: Positive = 1.0
    others: bool = True

    total: Tensor = kept()
    tellers: Tensor = kept()
    records: Records = made()

    info = Info.of_own_networks(
        "data-free", "any: only mean logits of classes travel", "reimplementation (HtFLlib) read; the paper from memory", "F"
    )

    counted = False
    parts = (replace(TOLD, down=lambda method, device, _piece, round: method.rows_for(device, round)),)

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        """One row of mean logits per class."""
        return {LOGITS: (classes,)}

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """Sums of logits and numbers of tellers that are zero, since nobody has told anything yet."""
        super().setup(world)
        self.total = torch.zeros(world.classes, world.classes, dtype=torch.float64, device=world.place)
        self.tellers = torch.zeros(world.classes, dtype=torch.int64, device=world.place)
        self.records = Records(world.store)

    def alike(self, device: Device, piece: Piece) -> str | None:
        """With `others` every device has a teacher of its own; else all share one."""
        return None if self.others else ""

    def facts(self, device: Device, piece: Piece, round: int) -> dict[str, list[int]]:
        """The classes that the device's teacher knows."""
        return {"classes": self._teacher(device, round)[0].tolist()}

    def rows_for(self, device: Device, round: int) -> State:
        """A device's teacher: one row per class."""
        classes, total, tellers = self._teacher(device, round)
        return {LOGITS: (total[classes] / tellers[classes, None]).float()} if len(classes) else {}

    def _teacher(self, device: Device, round: int) -> tuple[Tensor, Tensor, Tensor]:
        """The classes that a device's teacher knows, the sum of what was told of all classes, and by how many."""
        return self.once(round, ("teacher", self.others and device.id), lambda: self._taught_by(device))

    def _taught_by(self, device: Device) -> tuple[Tensor, Tensor, Tensor]:
        total, tellers = self.total, self.tellers
        if self.others:
            own, told = self._last(device.id)
            total, tellers = total - own, tellers - told
        return (tellers > 0).nonzero().flatten(), total, tellers

    def _last(self, client: int) -> tuple[Tensor, Tensor]:
        """What a client told last, as a part of the total: its logits, and 1 for each class it told of."""
        known, place = self.records.get(client), self.world.place
        if not known:
            return torch.zeros_like(self.total), torch.zeros_like(self.tellers)
        return known[LOGITS].to(place, torch.float64), known["told"].to(place, torch.int64)

    def merge(self, replies: Replies, round: int) -> None:
        """Replaces in the sums what each client told last by what it tells now."""
        for reply in replies:
            old, was_told = self._last(reply.device.id)
            classes = torch.tensor(reply.message.facts["classes"], dtype=torch.int64, device=self.world.place)
            rows = reply.message[STATISTICS][LOGITS].to(self.world.place)
            new = torch.zeros_like(old, dtype=rows.dtype).index_copy(0, classes, rows)
            told = torch.zeros_like(was_told).index_fill(0, classes, 1)
            self.total, self.tellers = self.total + (new - old), self.tellers + (told - was_told)
            self.records.put(reply.device.id, {LOGITS: new, "told": told}, round)

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def phases(self, client: Client, received: Message) -> Phases:
        """Local training, with the distance from the teacher's logits once there is a teacher."""
        if STATISTICS not in received:
            return [client.train.phase(client.round)]
        objective = partial(_taught, gamma=self.gamma, distance=self.distance, temperature=self.temperature)
        return [client.train.phase(client.round, objective=objective, given=spread(received, client.classes))]

    def statistics(self, client: Client) -> State:
        """The client's mean logits per class."""
        _, logits, y = outputs_of(client)
        return {LOGITS: class_means(logits, y, client.classes)}


def _taught(net: Net, batch: Batch, given: Given, *, gamma: float, distance: str, temperature: float) -> Tensor:
    logits = net(batch.x)
    if distance == "mse":
        far = gap(logits, batch.y, given, LOGITS)
    else:
        far = divergence(given[LOGITS][batch.y], logits, temperature) * given["known"][batch.y]
    return batch.mean(losses(logits, batch.y) + gamma * far)

"""A method of your own that moves knowledge: unlike networks learn from what all of them say of public inputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from nestling.methods.api import Client, Info, Message, Phases, Replies
from nestling.methods.part import Part
from nestling.methods.public import SAID, PublicExchange
from nestling.settings import NotNegative
from nestling.training.distiller import combine
from nestling.training.objectives import Batch, Given, Net, distillation


def like_all(net: Net, batch: Batch, given: Given, *, weight: float) -> Tensor:
    return weight * distillation(given["logits"][batch.rows], net(batch.x), batch=batch)


@dataclass
class Consensus(PublicExchange):
    """Idea: before they train, clients learn to say what everybody said in the mean. Networks never travel, logits do."""

    weight: NotNegative = 1.0

    info = Info.of_own_networks("public data", "any: only logits travel", "ours", "D", "public inputs on every client")
    parts = (Part("consensus", lambda method, device, piece, round: method.known), SAID)

    def merge(self, replies: Replies, round: int) -> None:
        if replies:
            self.know({"logits": combine([r.message["logits"]["logits"] for r in replies], [1] * len(replies), "uniform")}, round)

    def phases(self, client: Client, received: Message) -> Phases:
        given, objective = received.parts.get("consensus", {}), partial(like_all, weight=self.weight)
        learn = client.train.phase(
            client.round, source="public", rows=self.rows(client, received), objective=objective, given=given
        )
        return [*([learn] if given else []), client.train.phase(client.round)]

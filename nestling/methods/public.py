"""What is common to methods whose clients say something of public inputs that everybody holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from nestling.methods.api import Client, Device, InputError, Message, Piece, State, World, kept
from nestling.methods.part import Part
from nestling.methods.personal import Personal
from nestling.seeds import derive, stream
from nestling.settings import Count
from nestling.training.distiller import logits_of


@dataclass
class PublicExchange(Personal):
    """Base of the methods in which every round is about some rows of the public data, the same for all clients.

    Round t: the server tells what it made of the last replies, and names the rows of round t + 1. A client learns from the first,
    trains on its own data, and replies with what its model, as it is then, says of the second. What it learns from in round t + 1 is
    thus about the rows of that round and comes from the models as they stood when it began, as if clients were asked first and told
    afterwards, at half the messages. Rows travel as the number that they are drawn from, a fact of the message.

    align: how many public rows a round is about, drawn anew for every round (all of them where there are fewer).
    """

    align: Count = 5000

    known: State = kept()
    about: int = kept()  # the round whose rows `known` is about

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """Refuses a run without public inputs; before the first round nothing is known."""
        if world.public is None:
            raise InputError(
                f"{self.info.title} needs public inputs that all clients hold, and there are none",
                field="split.public",
                fix="set the share of rows that are public, e.g. 0.01",
            )
        super().setup(world)
        self.know({}, 0)

    def know(self, known: State, round: int) -> None:
        """The server makes this of the replies of a round; it is about the rows of the next."""
        self.known, self.about = known, round + 1

    def facts(self, device: Device, piece: Piece, round: int) -> dict[str, int]:
        """Which rows a message of the round is about, and which its reply."""
        return {
            "rows": derive(self.world.seed, "public rows", self.about),
            "next": derive(self.world.seed, "public rows", round + 1),
        }

    @property
    def asked(self) -> int:
        """How many rows a reply is about."""
        assert self.world.public is not None
        return min(self.align, len(self.world.public))

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def rows(self, client: Client, received: Message, which: str = "rows") -> Tensor:
        """The public rows that a message is about ("rows"), or that the reply must be about ("next")."""
        assert client.public is not None
        return drawn(int(received.facts[which]), self.align, len(client.public), client.place)

    def inputs(self, client: Client, received: Message) -> Tensor:
        """The inputs that the reply must be about."""
        assert client.public is not None
        return client.public[self.rows(client, received, "next")]

    def said_of(self, client: Client, received: Message) -> Tensor:
        """What the client's network, as it is now, says of them."""
        return logits_of(client.reference.network(client.view, client.weights), self.inputs(client, received))


SAID = Part(
    "logits",
    up=lambda method, client, received: {"logits": method.said_of(client, received)},
    like=lambda method, *_: {"logits": torch.empty(method.asked, method.world.classes)},
)
"""What a client's network says of the rows of the next round, up."""


def epochs_for(steps: int, rows: int, batch: int) -> int:
    """How many passes over the rows it takes to train at least so many batches."""
    return -(-steps // -(-rows // batch))


@lru_cache(maxsize=16)
def drawn(number: int, count: int, size: int, place: torch.device) -> Tensor:
    """At most `count` of `size` rows, in ascending order; the same tensor every time, so that clients can share it."""
    rows = np.sort(stream(number, "rows").permutation(size)[:count])
    return torch.from_numpy(rows.astype(np.int64)).to(place)

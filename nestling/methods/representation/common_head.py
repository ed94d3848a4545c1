"""What methods share whose clients have bodies of their own under one common classifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from nestling.methods.api import Client, Device, Message, Model, Piece, State, World
from nestling.methods.heads import common_head, with_head
from nestling.methods.kept import made
from nestling.methods.personal import Personal
from nestling.views.flat import pack

HEAD = "classifier"
PREDICTIONS = ("common", "own")


@dataclass
class CommonHead(Personal):
    """Base of the methods in which every client puts the server's classifier on top of its own network before it trains.

    predict: what a client decides with: the "common" classifier as it is now, or its "own" as it last trained it. The other one is
             reported beside it.
    """

    predict: str = "common"

    head: State = made()

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        super().setup(world)
        self.head = common_head(self.pieces.values())

    def send(self, device: Device, piece: Piece, round: int) -> Message:
        return Message({HEAD: self.head})

    def model_for(self, device: Device) -> Model:
        return self._deciding_by(self.predict, device)

    def other_models(self, device: Device) -> dict[str, Model]:
        return {f"by {way} head": self._deciding_by(way, device) for way in PREDICTIONS if way != self.predict}

    def _deciding_by(self, way: str, device: Device) -> Model:
        own = super().model_for(device)
        if way == "own" and self.world.store.get(device.id):
            return own
        return Model(own.reference, own.view, with_head(own.state, own.reference.taps.head, self.head))

    def state(self) -> dict[str, State]:
        return {HEAD: self.head}

    def restore(self, state: Mapping[str, State]) -> None:
        self.head = pack(state[HEAD])

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def start(self, client: Client, received: Message) -> Mapping[str, Tensor]:
        return with_head(super().start(client, received), client.reference.taps.head, received[HEAD])

"""Local: nobody talks to anybody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from nestling.message import Message
from nestling.methods.method import Info, Method, Reply
from nestling.training.client import Client
from nestling.world import Device, Model, Piece, World


@dataclass
class Local(Method):
    """Local training.

    Idea: every client trains the largest piece that fits it on its own data, and nothing travels: the floor that sharing must beat.
    Loss: cross-entropy. Travels: nothing. Merge: none. There is no global model: its column is the mean of the clients' models on
    the global test set.
    """

    world: World = field(init=False, repr=False, compare=False)

    info = Info(
        title="Local",
        family="baseline",
        heterogeneity="any: networks never meet",
        auxiliary="none",
        global_model=False,
        paper="–",
        evidence="ours",
        own_networks=True,
        personal=True,
    )

    def setup(self, world: World) -> None:
        self.world = world

    def send(self, device: Device, piece: Piece, round: int) -> Message:
        return Message()

    def merge(self, replies: Sequence[Reply], round: int) -> None:
        """Nothing to merge."""

    def model_for(self, device: Device) -> Model:
        kept = self.world.store.get(device.id)
        return Model(device.piece.reference, device.piece.view, kept or device.piece.view.extract(device.piece.reference.initial))

    def start(self, client: Client, received: Message) -> Mapping[str, Tensor]:
        return client.memory or client.view.extract(client.reference.initial)

    def reply(self, client: Client, received: Message) -> Message:
        client.memory = dict(client.weights)
        return Message({}, {"samples": client.samples})

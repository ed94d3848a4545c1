"""What is shared by methods whose clients have bodies of their own under one common classifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from nestling.methods.api import Client, Device, Info, Message, Model, State, Tensors, World, kept, made
from nestling.methods.heads import common_head, head_of, with_head
from nestling.methods.part import Part, Parts
from nestling.methods.personal import Personal, common_features
from nestling.models.embedding import with_features
from nestling.models.taps import Taps
from nestling.settings import Whole

HEAD = "classifier"

INFO = Info.of_own_networks(
    "representation",
    "any: bodies are personal, features and classifier have one form",
    "reimplementation (HtFLlib) read; the paper from memory",
    "F",
)
"""What the methods of one common classifier are."""


CLASSIFIER = Part(
    HEAD,
    lambda method, *_: method.head,
    lambda _method, client, _: head_of(client.weights, client.reference.taps.head),
)
"""The common classifier, down and up."""


@dataclass
class CommonHead(Personal):
    """Base of the methods in which every client puts the server's classifier on top of its own network before it trains. Networks with
    another number of features than the common one have theirs pooled to it.

    size:    how many features (0: as many as the network with the fewest has).
    predict: what a client decides with: the "common" classifier as it is now, or its "own" as it last trained it. The other one is
             reported beside it.
    """

    size: Whole = 0
    predict: Literal["common", "own"] = "common"

    wide: int = made()
    head: State = kept()
    parts: ClassVar[Parts] = (CLASSIFIER,)

    def tailor(self, module: nn.Module, taps: Taps) -> nn.Module:
        """The network with its features pooled to the common number."""
        return with_features(module, taps, self.wide)

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """Settles the common number of features, tailors the networks to it, and takes one classifier for all."""
        self.wide = common_features(world, self.size)
        super().setup(world)
        self.head = common_head(self.pieces.values())

    def model_for(self, device: Device) -> Model:
        """The device's network with the classifier that `predict` names."""
        return self._deciding_by(self.predict, device)

    def other_models(self, device: Device) -> dict[str, Model]:
        """The device's network with the other one of the two classifiers."""
        other = "own" if self.predict == "common" else "common"
        return {f"by {other} head": self._deciding_by(other, device)}

    def _deciding_by(self, way: str, device: Device) -> Model:
        own = super().model_for(device)
        if way == "own" and self.world.store.get(device.id):
            return own
        return Model(own.reference, own.view, with_head(own.state, own.reference.taps.head, self.head))

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def start(self, client: Client, received: Message) -> Tensors:
        """The client's own network with the received classifier on top."""
        return with_head(super().start(client, received), client.reference.taps.head, received[HEAD])

"""HeteroFL: width levels of one network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nestling.methods.api import Client, Contribution, Device, Info, Message, Model, Phases, Piece, Reply, SharedWeights, World
from nestling.methods.kept import made
from nestling.methods.labels import PRESENT, counted_rows, held_classes, output_layer
from nestling.methods.part import WEIGHTS
from nestling.methods.submodel.scaler import dividing, narrowed, scaled
from nestling.seeds import stream
from nestling.tasks import Task
from nestling.training.objectives import present_cross_entropy, supervised


@dataclass
class HeteroFL(SharedWeights):
    """HeteroFL (Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
    Clients", ICLR 2021).

    Idea: a client of level r trains the first ⌈r·K⌉ channels of every hidden layer; the server averages each entry over the clients
    that have it. What a convolution puts out is divided by the share of its channels that is left, so that wide and narrow networks
    see the same scale.
    Loss: cross-entropy with the logits of absent classes set to 0. Travels: the client's part down and up. Merge: uniform mean over
    holders; a classifier row counts only from clients that hold its class; the rest keep their value.
    Differs from the released code: channel ties come from tracing, so bottleneck networks work too; a part is also tested with the
    division it was trained with (in its weights), which the released code leaves out there: before batch statistics it makes no
    difference, without them it does. Layers that keep all their channels are not divided. Use
    `model.norm = "sbn"` for the paper's static batch norm, and gradient clipping at 1 (`train.clip = 1`), as published.

    dynamic:     levels are drawn anew every round from the tiers' shares (how the published tables were made).
    mask_labels: the label mask, in the loss and in the merge.
    scaler:      the division by the share of the channels.
    """

    dynamic: bool = False
    mask_labels: bool = True
    scaler: bool = True

    output: tuple[str, ...] = made()

    info = Info("width", "width: nested prefixes", "official code read", "A", any_task=True)
    parts = (WEIGHTS, replace(PRESENT, when=lambda method: method.mask_labels))

    def settings_for(self, task: Task) -> Mapping[str, Any]:
        """Without classes there is no label mask."""
        return {**super().settings_for(task), **({} if task.has_classes else {"mask_labels": False})}

    @property
    def blocks(self) -> tuple[str, ...]:
        """Room for the flags of the classes held, where the label mask is on."""
        return ("present",) if self.mask_labels else ()

    def setup(self, world: World) -> None:
        """Finds the output layer, whose rows the label mask leaves out of the merge."""
        super().setup(world)
        self.output = output_layer(world.main, world.classes) if self.mask_labels else ()

    def piece(self, device: Device, round: int) -> Piece:
        """What fits the device; with `dynamic`, the piece of a tier drawn by the tiers' numbers of devices."""
        if not self.dynamic or round == 0:
            return device.piece
        plans = list(self.world.plans.values())
        shares = [self.world.fleet.count_of(plan.tier) for plan in plans]
        drawn = stream(self.world.seed, "level", device.id, round).choice(len(plans), p=[s / sum(shares) for s in shares])
        return plans[drawn].piece

    def model_for(self, device: Device) -> Model:
        """The device's part at rest, with the scaler in its weights."""
        return self.as_trained(super().model_for(device))

    def as_trained(self, model: Model) -> Model:
        """A model with the scaler that its part was trained with."""
        return scaled(model, narrowed(model.reference, model.view)) if self.scaler else model

    def phases(self, client: Client, received: Message) -> Phases:
        """One training phase with the scaler and the label mask, where they are on."""
        hooks = dividing(client.reference, client.view) if self.scaler else ()
        given = {"present": held_classes(client).float()} if self.mask_labels else {}
        objective = present_cross_entropy if self.mask_labels else supervised
        return [client.train.phase(client.round, objective=objective, given=given, hooks=hooks)]

    def contribution(self, reply: Reply) -> Contribution:
        """The reply's weights, all clients alike; with the label mask, output rows only of classes that the client holds."""
        weights = reply.message["weights"]
        present = counted_rows(reply.message["present"]["classes"], weights, self.output) if self.mask_labels else {}
        return Contribution(reply.piece.view, weights, 1.0, present)

"""The label mask: a client says something about the classes it holds, and nothing about the others.

In the loss the logits of absent classes are 0 (`training.objectives.present_cross_entropy`); in the merge a row of the output layer
counts only from clients that hold its class. HeteroFL, FedRolex and FedHM share it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nestling.methods.api import Client, InputError, Reference, Tensors
from nestling.methods.part import Part, can_count


def held_classes(client: Client) -> Tensor:
    """One flag per class: whether the client has a sample of it."""
    return client.class_counts() > 0


PRESENT = Part(
    "present",
    up=lambda _method, client, *_: {"classes": held_classes(client)},
    like=lambda method, *_: {"classes": torch.zeros(method.world.classes, dtype=torch.bool)},
    can=lambda _method, reply: can_count(reply["present"]["classes"], reply),
)
"""Which classes a client holds, up."""


def output_layer(reference: Reference, classes: int) -> tuple[str, ...]:
    """The tensors of the output layer: the last weight of the state that has one row per class, and its bias."""
    rows = [name for name, shape in reference.axes.shapes.items() if len(shape) >= 2 and shape[0] == classes]
    if not rows:
        raise InputError(
            f"no layer of the network has {classes} rows, one a class, that a label mask could leave out",
            field="method.mask_labels",
            fix="set it to false, or end the network with a linear layer",
        )
    layer = rows[-1].rpartition(".")[0]
    return tuple(name for name in reference.axes.shapes if name.rpartition(".")[0] == layer)


def counted_rows(held: Tensor, weights: Tensors, names: Sequence[str]) -> dict[str, Tensor]:
    """For the named tensors, flags of the entries in rows of held classes (see `Contribution.present`)."""
    present = {name: weights[name] for name in names if name in weights}
    return {name: held.reshape(-1, *[1] * (t.dim() - 1)).expand(t.shape) for name, t in present.items()}

"""How many samples of every class clients have: what they tell of it, and how large each one's share of a class is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nestling.methods.api import Client, Part, Reply, State


def own_counts(client: Client) -> State:
    """A client's counts, as they travel."""
    return {"classes": client.class_counts().to(torch.int32)}


def any_counts(classes: int) -> State:
    """What they look like."""
    return {"classes": torch.zeros(classes, dtype=torch.int32)}


COUNTS = Part(
    "counts",
    up=lambda method, client, received: own_counts(client),
    like=lambda method, piece, sent: any_counts(method.world.classes),
)
"""How many samples of every class a client has, up."""


def counts_of(replies: Sequence[Reply]) -> Tensor:
    """What clients counted, (clients, classes)."""
    # It is their word: fewer than none would make other clients' shares negative.
    return torch.stack([reply.message["counts"]["classes"] for reply in replies]).clamp(min=0)


def shares(counts: Tensor, compat: str = "paper") -> Tensor:
    """a_{k,y} from (clients, classes) numbers of samples: each client's share of a class, 0 where nobody has any."""
    counted = counts.double() + (1 if compat == "code" else 0)
    return (counted / counted.sum(0).clamp(min=1)).float()

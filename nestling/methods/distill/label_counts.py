"""How many samples of every class clients have: what they tell of it, and how large each one's share of a class is."""

from __future__ import annotations

import torch
from torch import Tensor

from nestling.methods.api import Replies
from nestling.methods.part import Part, can_count
from nestling.trust.weighing import fair_caps

COUNTS = Part(
    "counts",
    up=lambda _method, client, _: {"classes": client.class_counts().to(torch.int32)},
    like=lambda method, *_: {"classes": torch.zeros(method.world.classes, dtype=torch.int32)},
    can=lambda _method, reply: can_count(reply["counts"]["classes"], reply),
)
"""How many samples of every class a client has, up."""


def counts_of(replies: Replies, most: float = 0.0) -> Tensor:
    """What clients counted, (clients, classes); nobody has more than the share `most` of a class (0 or 1: any)."""
    # It is their word: fewer than none would make other clients' shares negative.
    told = torch.stack([reply.by_class(reply.message["counts"]["classes"]) for reply in replies]).clamp(min=0)
    if not 0 < most < 1:
        return told
    caps = fair_caps(told.to("cpu", torch.float64), most).clamp(max=2**31 - 1).floor()
    return torch.minimum(told, caps.to(told))


def shares(counts: Tensor, compat: str = "paper") -> Tensor:
    """a_{k,y} from (clients, classes) numbers of samples: each client's share of a class, 0 where nobody has any."""
    counted = counts.double() + (1 if compat == "code" else 0)
    return (counted / counted.sum(0).clamp(min=1)).float()

"""What travels, as data: the parts of messages, and what replies say beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nestling.message import Message
from nestling.training.client import Client
from nestling.views import Tensors
from nestling.views.flat import only
from nestling.world import Device, Piece


@dataclass(frozen=True)
class Part:
    """One thing that travels, said once. Messages, what a reply must look like, and bytes follow from a method's list of them. Where
    there are no tensors it is left out.

    name: what it is called in messages.
    down: (method, device, piece, round) → its tensors for a device, and for all that are `alike`.
    up:   (method, client, received) → its tensors from a client that has trained.
    like: (method, piece, sent) → tensors like those that come up; left out: those that went down under its name.
    when: (method) → whether it travels at all; left out: always.
    can:  (method, reply) → whether what came up can be so, for parts whose values mean something that can be checked; names, shapes,
          types and the number of samples are right by then. Left out: it can. Whatever it looks at must be small, and not on a GPU.
    """

    name: str
    down: Callable[[Any, Device, Piece, int], Tensors] | None = None
    up: Callable[[Any, Client, Message], Tensors] | None = None
    like: Callable[[Any, Piece, Message], Tensors] | None = None
    when: Callable[[Any], bool] | None = None
    can: Callable[[Any, Message], bool] | None = None


WEIGHTS = Part(
    "weights",
    lambda method, _device, piece, round: method.weights_once(piece, round),
    lambda _method, client, received: only(client.weights, client.view.names) if "weights" in received else {},
)
"""A piece's weights: down, and up from clients that got some."""


def can_count(counts: Tensor, reply: Message) -> bool:
    """Whether these can be numbers of rows by class (or flags of classes held): none negative, and together no more than the samples
    claimed. What is on a GPU is believed: only this process itself puts replies there, and to look would wait for it."""
    return counts.is_cuda or (not bool((counts < 0).any()) and int(counts.sum()) <= reply.facts["samples"])


@dataclass(frozen=True)
class Fact:
    """Something a reply says beside its parts, as a plain value. A client's word: if it cannot be true, the reply is refused.

    name: what it is called in the reply.
    say:  (method, client, received) → what a client says.
    can:  (method, sent, said) → whether it can be so.
    what: what it is, as the refusal calls it.
    """

    name: str
    say: Callable[[Any, Client, Message], Any]
    can: Callable[[Any, Message, Any], bool]
    what: str


__all__ = ["WEIGHTS", "Fact", "Facts", "Part", "Parts", "Tensors", "can_count"]

Parts = tuple[Part, ...]
Facts = tuple[Fact, ...]

"""What a client began with, as its reply is to be compared with it."""

from __future__ import annotations

import torch

from nestling.attacks import received_as
from nestling.message import Message
from nestling.methods import Method
from nestling.views import Tensors
from nestling.world import Piece


def received_by(method: Method, piece: Piece, sent: Message, reply: Message) -> Tensors:
    """The weights that a client began with, in the shapes of its reply. An update begins at
    zero."""
    weights = sent.parts.get("weights", {})
    if "update" in reply.parts:
        trained = piece.reference.parameters
        return {n: torch.zeros_like(t) if n in trained else t for n, t in weights.items()}
    own = reply.parts.get("weights", {})
    if all(n in weights and weights[n].shape == t.shape for n, t in own.items()):
        return weights
    returned = method.returned(piece, sent, reply.facts)
    return received_as(weights, piece.view, returned.view)

"""Weights of which a mask keeps some: only these travel."""

from __future__ import annotations

from dataclasses import replace

from nestling.methods.part import WEIGHTS
from nestling.views.sparse import like_survivors, survivors

SURVIVORS = replace(
    WEIGHTS,
    up=lambda method, client, received: survivors(client.view, client.weights),
    like=lambda method, piece, sent: like_survivors(piece.view, method.weights),
)
"""What a piece's mask keeps of its weights, down and up."""

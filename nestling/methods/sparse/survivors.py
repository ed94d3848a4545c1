"""Weights under a mask: only those that it keeps travel."""

from __future__ import annotations

from dataclasses import replace

from nestling.methods.part import WEIGHTS
from nestling.views.sparse import like_survivors, survivors

SURVIVORS = replace(
    WEIGHTS,
    up=lambda _method, client, _: survivors(client.view, client.weights),
    like=lambda method, piece, _: like_survivors(piece.view, method.weights),
)
"""What a piece's mask keeps of its weights, down and up."""

"""The nouns that a method's file speaks of (see `docs/design.md`), in one place."""

from __future__ import annotations

from nestling.message import Message
from nestling.methods.method import Info, Method, Reply, Share, SharedWeights
from nestling.training.client import Client
from nestling.training.phase import Phase
from nestling.views import Contribution, Reference, State, View
from nestling.world import Device, Model, Piece, World

__all__ = [
    "Client", "Contribution", "Device", "Info", "Message", "Method", "Model", "Phase", "Piece", "Reference", "Reply", "Share",
    "SharedWeights", "State", "View", "World",
]  # fmt: skip

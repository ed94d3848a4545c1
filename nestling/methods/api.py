"""What a method's file speaks of (see `docs/design.md`): the nouns, the mean over views, and what marks a method's fields."""

from __future__ import annotations

from nestling.errors import InputError
from nestling.message import Message
from nestling.methods.info import Info
from nestling.methods.kept import kept, made
from nestling.methods.method import Method, Phases, Replies, Reply, Share, SharedWeights
from nestling.schema import require
from nestling.training.client import Client
from nestling.training.phase import Phase
from nestling.views import Contribution, Reference, State, Tensors, View, merge
from nestling.views.flat import only, pack
from nestling.world import Device, Model, Piece, World

__all__ = [
    "Client", "Contribution", "Device", "Info", "InputError", "Message", "Method", "Model", "Phase", "Phases", "Piece",
    "Reference", "Replies", "Reply", "Share", "SharedWeights", "State", "Tensors", "View", "World",
    "kept", "made", "merge", "only", "pack", "require",
]  # fmt: skip

"""The networks of a fleet as DraftFed sees them: how deep each is, and what its drafts look like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nestling.methods.api import Piece, World, require
from nestling.methods.distill.drafts import LOGITS, Weights, drafts_of, taps_of

Key = tuple[str, bytes]


@dataclass(frozen=True)
class DraftNetwork:
    """One of the fleet's networks: its name, how many convolutions it has, and the shapes of one row of its drafts."""

    name: str
    depth: int
    shapes: Mapping[str, torch.Size]


def key_of(piece: Piece) -> Key:
    """Equal for tiers that train the same network."""
    return piece.reference.name, piece.view.key()


def networks_of(pieces: Iterable[Piece], inputs: Tensor, weights: Weights) -> dict[Key, DraftNetwork]:
    """The networks of all tiers, with the shapes of those drafts that count."""
    found = {key_of(piece): (piece.reference.network(piece.view), taps_of(piece.reference, piece.view)) for piece in pieces}
    depths = [taps.depth for _, taps in found.values()]
    networks = {}
    for number, (key, (module, taps)) in enumerate(found.items()):
        drafts = drafts_of(module, taps, depths, inputs, weights)
        networks[key] = DraftNetwork(f"network {number}", taps.depth, {name: t.shape[1:] for name, t in drafts.items()})
    axes = {len(shape) for network in networks.values() for name, shape in network.shapes.items() if name != LOGITS}
    require(len(axes) < 2, "DraftFed cannot align maps of one and of two axes", "fleet.tiers", "take networks of one kind")
    return networks


def refuse_without_convolutions(world: World, pieces: Mapping[str, Piece]) -> None:
    """Refuses a fleet in which a tier's network has no convolution."""
    for number, (tier, piece) in enumerate(pieces.items()):
        require(
            taps_of(piece.reference, piece.view).depth > 0,
            f"DraftFed compares what convolutions put out, and the network of tier {tier!r} has none",
            f"fleet.tiers[{number}].model" if world.plans[tier].tier.model else "model.name",
            "take a convolutional network, e.g. tinycnn",
        )

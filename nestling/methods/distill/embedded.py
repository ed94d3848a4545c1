"""Parts of one network whose features have one size, however wide they are (FedHKD with weights)."""

from __future__ import annotations

import numpy as np

from nestling.devices.fit import RATIOS
from nestling.methods.allocation import Ladder, ladder
from nestling.methods.api import Reference, View, World
from nestling.models.embedding import with_embedding
from nestling.seeds import torch_seeded
from nestling.views import prefix


def embedded_ladder(world: World, size: int) -> Ladder:
    """The main network with an embedding, at every width."""
    with torch_seeded(world.seed, "network", "embedded"):
        module = with_embedding(world.main.module, world.main.taps, size)
    reference = world.add_network("main (embedded)", module)
    return ladder(world, reference, _views(reference))


def _views(reference: Reference) -> list[View]:
    """The network at every width; the embedding, whose size is common to all, stays whole."""
    axes, (body, _, _) = reference.axes, reference.taps.head.rpartition(".")
    channel = axes.dims[f"{body}.embed.weight"][0]
    assert channel is not None
    whole = axes.names[int(np.searchsorted(axes.offsets, channel[0], side="right")) - 1]
    return [prefix(axes, {name: 1.0 if name == whole else ratio for name in axes.names}) for ratio in RATIOS]

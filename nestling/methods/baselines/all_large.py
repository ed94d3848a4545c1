"""All-Large: FedAvg with the full model everywhere."""

from __future__ import annotations

from dataclasses import dataclass

from nestling.methods.api import Device, Info, Piece, SharedWeights


@dataclass
class AllLarge(SharedWeights):
    """All-Large (the reference of FlexFL's tables: Chen et al., "FlexFL", 2024).

    Idea: FedAvg with the full model on every device, whether or not it fits. It shows what unlimited devices would reach; a fleet
    that needs this library cannot run it.
    Loss: cross-entropy. Travels: the full network down and up. Merge: mean weighted by n_k.
    Differs from the released code: nothing.
    """

    info = Info(
        "baseline",
        "ignored: the full model on every device",
        "official code read",
        "A",
        paper="Chen et al. (FlexFL), 2024",
        any_task=True,
    )

    def piece(self, device: Device, round: int) -> Piece:
        """The whole network, whether or not it fits the device."""
        return Piece(self.world.main, self.world.main.full)

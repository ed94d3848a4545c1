"""FedAvg, on the model that fits the smallest device."""

from __future__ import annotations

from dataclasses import dataclass

from nestling.methods.api import Device, Info, Model, Piece, SharedWeights


@dataclass
class FedAvg(SharedWeights):
    """FedAvg (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017).

    Idea: every client trains the same network for a few epochs; the server takes the mean of what returns. A mixed fleet can only
    run it with the network that fits the smallest device, so that is what everybody trains here.
    Loss: cross-entropy. Travels: the network down and up. Merge: mean weighted by n_k.
    Differs from the paper: nothing; the common network is the part of the reference that all tiers can train.
    """

    info = Info("baseline", "none: the smallest device decides", "from paper", any_task=True)

    def piece(self, device: Device, round: int) -> Piece:
        """The part that the smallest device can train, for everybody."""
        return self.world.smallest

    def global_model(self) -> Model:
        """The part that everybody trains: nothing outside it ever changes."""
        piece = self.world.smallest
        return Model(piece.reference, piece.view, piece.view.extract(self.weights))

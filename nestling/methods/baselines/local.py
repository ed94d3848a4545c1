"""Local: nobody talks to anybody."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from nestling.methods.api import Info, Replies
from nestling.methods.personal import Personal
from nestling.models.embedding import with_features
from nestling.models.taps import Taps
from nestling.settings import Whole


@dataclass
class Local(Personal):
    """Local training.

    Idea: every client trains the largest piece that fits it on its own data, and nothing travels: the floor that sharing must beat. So
    nobody waits to be asked: all reachable clients train in every round, as long as a client that is asked in every round would.
    Loss: cross-entropy. Travels: nothing. Merge: none. There is no global model: its column is the mean of the clients' models on
    the global test set.

    everybody: whether all train in every round; else those who are asked, as other methods' clients.
    size: features that every network is pooled to, as methods need it that compare them (0: networks as they are). The floor of such a
          method has the same networks.
    """

    everybody: bool = True
    size: Whole = 0

    info = replace(
        Info.of_own_networks("baseline", "any: networks never meet", "ours", ""), any_task=True, title="Local", paper="–"
    )

    def choose(self, round: int, clients: int) -> list[int]:
        """All reachable clients, or only as many as are asked where `everybody` is off."""
        return super().choose(round, len(self.world.fleet) if self.everybody else clients)

    def tailor(self, module: nn.Module, taps: Taps) -> nn.Module:
        """The network with its features pooled to `size`, or as it is where that is 0."""
        return with_features(module, taps, self.size) if self.size else module

    def merge(self, replies: Replies, round: int) -> None:
        """Nothing to merge."""

"""What the methods that cut a network in depth share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from nestling.methods.allocation import Ladder, ladder
from nestling.methods.api import Contribution, Device, InputError, Model, Piece, Reference, Reply, SharedWeights, View, World
from nestling.methods.kept import made
from nestling.models import ExitNet
from nestling.training.objectives import Net
from nestling.views.depth import depth_views


@dataclass
class ByDepth(SharedWeights):
    """Base: a device trains the deepest view that fits it, and every tensor becomes the plain mean over those that have it."""

    ladder: Ladder = made()

    def setup(self, world: World) -> None:
        """Sorts the views to choose from into a ladder."""
        super().setup(world)
        self.ladder = ladder(world, world.main, self.views(world.main))

    def views(self, reference: Reference) -> list[View]:
        """The views to choose from."""
        return depth_views(reference)

    def piece(self, device: Device, round: int) -> Piece:
        """The largest of the views that fits the device."""
        return self.ladder.of(device, round)

    def contribution(self, reply: Reply) -> Contribution:
        """The reply's weights; all clients count the same."""
        return Contribution(reply.piece.view, reply.message["weights"])


def need_exits(reference: Reference, method: str) -> ExitNet:
    """The network, if it has early exits."""
    if not isinstance(reference.module, ExitNet):
        fix = "use tinyexits, exitcnn or exitresnet"
        raise InputError(f"{method} needs a network with an exit behind every stage", field="model.name", fix=fix)
    return reference.module


def exits_of(net: Net, x: Tensor) -> list[Tensor]:
    """The logits of all exits of the network that an objective is given."""
    return cast(ExitNet, net.module).all_exits(x)


@torch.no_grad()
def exit_accuracies(model: Model, x: Tensor, y: Tensor) -> list[float]:
    """The accuracy of every exit on its own, the shallowest first."""
    network = cast(ExitNet, model.reference.network(model.view, model.state).eval())
    return [float((logits.argmax(-1) == y).float().mean()) for logits in network.all_exits(x)]

"""A method of your own that moves weights: the mean over views, but with momentum on the server."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import nestling
from nestling.methods.api import Info, Replies, SharedWeights, State, World, kept
from nestling.settings import ShareBelowOne


@dataclass
class ServerMomentum(SharedWeights):
    """Idea: what the merge changed last round goes on changing, damped. Loss, messages and views are the base's."""

    beta: ShareBelowOne = 0.5
    velocity: State = kept()

    info = Info("width", "width: nested prefixes", "ours", title="Server momentum", paper="an example")

    def setup(self, world: World) -> None:
        super().setup(world)
        self.velocity = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}

    def merge(self, replies: Replies, round: int) -> None:
        before = self.weights
        super().merge(replies, round)
        self.velocity = {n: self.beta * self.velocity[n] + self.weights[n] - before[n] for n in before}
        self.weights = {n: before[n] + self.velocity[n] for n in before}


if __name__ == "__main__":
    result = nestling.run(nestling.Experiment(method=ServerMomentum(beta=0.3), rounds=5))
    print(f"global accuracy after {result.summary['rounds']} rounds: {result.summary['global_score']['last']:.1%}")

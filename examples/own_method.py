"""A method of your own in one short file: the mean over views, but with momentum on the server.

python examples/own_method.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

import nestling
from nestling.methods import Info, Reply, SharedWeights
from nestling.views import State
from nestling.world import World


@dataclass
class ServerMomentum(SharedWeights):
    """Idea: what the merge changed last round goes on changing, damped. Loss, messages and views are the base's."""

    beta: float = 0.5
    velocity: State = field(init=False, repr=False, compare=False)

    info = Info("Server momentum", "width", "width: nested prefixes", "none", True, "an example", "ours")

    def setup(self, world: World) -> None:
        super().setup(world)
        self.velocity = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}

    def merge(self, replies: Sequence[Reply], round: int) -> None:
        before = self.weights
        super().merge(replies, round)
        self.velocity = {n: self.beta * self.velocity[n] + self.weights[n] - before[n] for n in before}
        self.weights = {n: before[n] + self.velocity[n] for n in before}

    def state(self) -> dict[str, State]:
        return {"weights": self.weights, "velocity": self.velocity}

    def restore(self, state: Mapping[str, State]) -> None:
        self.weights, self.velocity = dict(state["weights"]), dict(state["velocity"])


if __name__ == "__main__":
    result = nestling.run(nestling.Experiment(method=ServerMomentum(beta=0.3), rounds=5))
    print(f"global accuracy after {result.summary['rounds']} rounds: {result.summary['global_accuracy']['last']:.1%}")

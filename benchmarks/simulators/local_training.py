"""One client's training and the test of a network, as plain PyTorch: used by the bare loop and by
Flower's clients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from plan import Plan
from torch import Tensor, nn

TEST_BATCH = 500


def train(
    network: nn.Module, optimiser: torch.optim.Optimizer, plan: Plan, round: int, place: int
) -> None:
    """Trains the network in place on the rows of one client of a round."""
    network.train()
    for epoch in range(plan.epochs):
        x, y = plan.epoch(round, place, epoch)
        for inputs, labels in zip(x.split(plan.batch), y.split(plan.batch), strict=True):
            optimiser.zero_grad(set_to_none=True)
            F.cross_entropy(network(inputs), labels).backward()
            optimiser.step()


@torch.no_grad()
def accuracy(network: nn.Module, x: Tensor, y: Tensor) -> float:
    """The share of right answers."""
    network.eval()
    answers = torch.cat([network(inputs).argmax(-1) for inputs in x.split(TEST_BATCH)])
    return float((answers == y).float().mean())

"""Federated averaging as one writes it by hand in PyTorch: one network, one optimiser, a running
weighted mean."""

from __future__ import annotations

import torch
from contest import Stopwatch
from entry import enter
from local_training import train
from plan import Plan
from torch import nn


def fedavg(network: nn.Module, plan: Plan, watch: Stopwatch) -> None:
    """Trains the network in place for all rounds of the plan."""
    weights = list(network.parameters())
    if any(True for _ in network.buffers()):
        raise ValueError("the bare loop averages parameters only")
    # Plain SGD keeps nothing between steps, so that one optimiser serves all clients.
    optimiser = torch.optim.SGD(weights, lr=plan.lr, foreach=True)
    common = [w.detach().clone() for w in weights]
    total = [torch.zeros_like(w) for w in common]
    share = 1 / plan.participants  # all clients have equally many rows
    watch.start()
    for round in range(plan.rounds):
        for place in range(plan.participants):
            with torch.no_grad():
                torch._foreach_copy_(weights, common)
            train(network, optimiser, plan, round, place)
            with torch.no_grad():
                torch._foreach_add_(total, weights, alpha=share)
        common, total = total, common
        torch._foreach_zero_(total)
        watch.lap()
    with torch.no_grad():
        torch._foreach_copy_(weights, common)


if __name__ == "__main__":
    enter("bare", fedavg)

"""How far a client's optimiser carries it: steps taken, and what they amount to."""

from __future__ import annotations

from functools import lru_cache

from nestling.training.client import Client
from nestling.training.optimisers import Optim
from nestling.training.phase import Phase
from nestling.training.trainer import phase_schedule


def steps_of(client: Client, phase: Phase, number: int = 0) -> int:
    """The steps that a client takes in a phase."""
    network = client.reference.network(client.view)
    plan = phase_schedule(
        phase, network, [client.samples], client.site.seed, [client.id], client.round, number
    )
    return plan.steps_taken[0]


def effective_steps(optim: Optim, steps: int, mu: float = 0.0) -> float:
    """How many steps of plain descent would lead as far along a constant gradient: the 1-norm of
    FedNova's a_k.

    Plain: τ. With momentum ρ: [τ − ρ(1 − ρ^τ)/(1 − ρ)]/(1 − ρ). With a proximal term: [1 − (1 −
           ημ)^τ]/(ημ); with both, their joint
    recursion. Adam's way has no such factor: τ.
    """
    if optim.adaptive:
        return float(steps)
    return _effective(steps, optim.momentum, optim.lr * mu)


@lru_cache(maxsize=1024)
def _effective(steps: int, momentum: float, pull: float) -> float:
    far = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1.0 - pull * far
        far += velocity
    return far

"""A federation small enough for a test: four clients of three widths on a slice of the embedded digits."""

from __future__ import annotations

from typing import Any

from nestling import EngineConfig, Evaluation, Experiment, FleetConfig, Named, SplitConfig, Tier, Train
from nestling.rounds import Federation
from nestling.training.client import Task

TIERS = (
    Tier(name="small", ratio=0.25, count=2),
    Tier(name="middle", ratio=0.5, count=1),
    Tier(name="large", ratio=1.0, count=1),
)


def small(method: Any = "shared-average", **changes: Any) -> Experiment:
    """The experiment; `changes` replace its fields."""
    settings: dict[str, Any] = {
        "method": method,
        "rounds": 2,
        "participants": 3,
        "model": Named("tinycnn", {"channels": [8, 16, 16]}),
        "fleet": FleetConfig(tiers=TIERS),
        "split": SplitConfig(kind="dirichlet", alpha=1.0, size=60),
        "train": Train(epochs=1, batch=20, lr=0.02),
        "engine": EngineConfig("inline"),
        "evaluate": Evaluation(clients=4),
    }
    return Experiment(**{**settings, **changes})


def tasks_of(federation: Federation, clients: int = 3) -> list[Task]:
    """What the first clients would get in round 1."""
    world, method, found = federation.world, federation.method, []
    for client in range(clients):
        device = world.device(client)
        piece = method.piece(device, 1)
        found.append(Task(client, 1, piece.reference.name, piece.spec(), method.send(device, piece, 1)))
    return found

"""A federation small enough for a test: four clients of three widths on a slice of the embedded
digits."""

from __future__ import annotations

from typing import Any

from nestling import (
    EngineConfig,
    Evaluation,
    Experiment,
    FleetConfig,
    Named,
    SplitConfig,
    Tier,
    Train,
)
from nestling.methods import method_class
from nestling.runs.federation import Federation
from nestling.training.client import Errand

TIERS = (
    Tier(name="small", ratio=0.25, count=2),
    Tier(name="middle", ratio=0.5, count=1),
    Tier(name="large", ratio=1.0, count=1),
)


QUICK: dict[str, dict[str, Any]] = {
    "distreal": {"pareto": [[0.5, 0.5, 0.5], [0.25, 0.25, 0.25], [0.0, 0.0, 0.0]]},
    "fedet": {"steps": 2},
    "fedftg": {"iterations": 1, "student_steps": 1, "generator_lr": 1e-4},
    "fedgh": {"epochs": 5},
    "fedmd": {"pretrain": 1},
    "fedtgp": {"epochs": 5},
    "fedzkt": {"iterations": 2, "student_steps": 1, "back": 1},
    "flexfl": {"pretrain": 2},
    "prunefl": {"stage_one": 10, "every": 2},
}
"""Settings that make short what a method does before its first round, and on the server."""

NETWORKS = {
    "": Named("tinycnn", {"channels": [8, 16, 16]}),
    "tinyexits": Named("tinyexits"),
    "tinyresnet": Named("tinyresnet"),
}
"""The network of a test, by what the method takes where nobody names one."""


def small(method: Any = "shared-average", **changes: Any) -> Experiment:
    """The experiment; `changes` replace its fields."""
    wanted = method_class(method).info.model if isinstance(method, str) else ""
    settings: dict[str, Any] = {
        "method": Named(method, QUICK[method])
        if isinstance(method, str) and method in QUICK
        else method,
        "rounds": 2,
        "participants": 3,
        "model": NETWORKS[wanted],
        "fleet": FleetConfig(tiers=TIERS),
        "split": SplitConfig(kind="dirichlet", alpha=1.0, size=60),
        "train": Train(epochs=1, batch=20, lr=0.02),
        "engine": EngineConfig("inline"),
        "evaluate": Evaluation(clients=4),
    }
    return Experiment(**{**settings, **changes})


def errands_of(federation: Federation, clients: int = 3) -> list[Errand]:
    """What the first clients would get in round 1."""
    world, method, found = federation.world, federation.method, []
    for client in range(clients):
        device = world.device(client)
        piece = method.piece(device, 1)
        found.append(
            Errand(client, 1, piece.reference.name, piece.spec(), method.send(device, piece, 1))
        )
    return found

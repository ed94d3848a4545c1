"""Whether a method learns: a small fleet of three widths on a slice of the embedded digits, three
seeds, a budget of seconds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import nestling
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

SEEDS = (0, 1, 2)
TIERS = (
    Tier(name="small", ratio=0.25, count=3),
    Tier(name="middle", ratio=0.5, count=3),
    Tier(name="large", ratio=1.0, count=3),
)
TINY = Named("tinycnn", {"channels": [8, 16, 32]})


def experiment(method: Any, seed: int, **changes: Any) -> Experiment:
    """The experiment of all learning tests; `changes` replace its fields."""
    settings: dict[str, Any] = {
        "method": method,
        "seed": seed,
        "rounds": 8,
        "participants": 6,
        "model": TINY,
        "fleet": FleetConfig(tiers=TIERS),
        "split": SplitConfig(kind="dirichlet", alpha=0.5, size=120),
        "train": Train(epochs=2, batch=20, lr=0.05),
        "engine": EngineConfig("inline"),
        "evaluate": Evaluation(every=8, clients=9),
    }
    return Experiment(**{**settings, **changes})


def learned(method: Any, kind: str = "global_score", **changes: Any) -> list[float]:
    """The last accuracy of every seed."""
    return [
        nestling.run(experiment(method, seed, **changes)).summary[kind]["last"] for seed in SEEDS
    ]


def alone(kind: str = "global_score", **changes: Any) -> float:
    """What the same clients reach with the same budget when nothing travels: the mean over the
    seeds."""
    return _alone(kind, _Changes(changes))


class _Changes(dict[str, Any]):
    """Changes that can be looked up: equal by what they say."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items(), key=lambda item: item[0])))


@lru_cache(maxsize=32)
def _alone(kind: str, changes: Mapping[str, Any]) -> float:
    found = learned("local", kind, **changes)
    return sum(found) / len(found)


def mean(values: list[float]) -> float:
    """The mean."""
    return sum(values) / len(values)

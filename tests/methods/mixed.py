"""A fleet whose networks have nothing in common, for the methods that exchange knowledge: three
MLPs, three CNNs, three depth-wise CNNs on a slice of the embedded digits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import nestling
from nestling import EngineConfig, Experiment, FleetConfig, SplitConfig, Tier
from tests.methods.learning import learned

UNLIKE = FleetConfig(
    tiers=(
        Tier(name="mlp", model="mlp", model_options={"hidden": [32]}, count=3),
        Tier(name="cnn", ratio=1.0, count=3),
        Tier(name="depthwise", model="dscnn", model_options={"width": 0.25}, count=3),
    )
)
SPLIT = SplitConfig(kind="dirichlet", alpha=0.5, size=120, public=0.05)
SETTING: dict[str, Any] = {"fleet": UNLIKE, "split": SPLIT, "participants": 0}
"""Everybody takes part in every round, as in the papers."""


def unlike(method: Any, kind: str = "personal_score", **changes: Any) -> list[float]:
    """The last accuracy of every seed on the mixed fleet."""
    return learned(method, kind, **{**SETTING, **changes})


def clearly_above(ours: list[float], others: list[float]) -> bool:
    """Whether one mean is above the other by more than the seeds' spread."""
    return mean(ours) - mean(others) > max(stdev(ours), stdev(others))


def goes_on_where_it_stood(make: Callable[..., Experiment], folder: Path) -> None:
    """Stopped after a round and gone on to two, against two in one go: the server's states are the
    same to the bit."""
    nestling.run(make(rounds=1), out=folder / "parts")
    parts = nestling.resume(folder / "parts", overrides=("rounds=2",)).federation.method.state()
    whole = nestling.run(make(rounds=2)).federation.method.state()
    assert parts.keys() == whole.keys()
    for name, state in whole.items():
        assert all(torch.equal(parts[name][key], tensor) for key, tensor in state.items())


def same_in_a_stack(make: Callable[..., Experiment]) -> None:
    """Clients that are trained together give the server's states that they give one by one."""
    one, other = (
        nestling.run(make(engine=EngineConfig(name, 1))).federation.method.state()
        for name in ("inline", "cohort")
    )
    for name, state in one.items():
        flat = [
            torch.cat([s[key].reshape(-1).double() for key in state]) for s in (state, other[name])
        ]
        assert float((flat[0] - flat[1]).norm()) <= 1e-4 * float(flat[0].norm())

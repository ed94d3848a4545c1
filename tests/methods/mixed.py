"""A fleet whose networks have nothing in common, for the methods that exchange knowledge: three MLPs, three CNNs, three depth-wise
CNNs on a slice of the embedded digits."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

from nestling import FleetConfig, SplitConfig, Tier
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


def unlike(method: Any, kind: str = "personal_accuracy", **changes: Any) -> list[float]:
    """The last accuracy of every seed on the mixed fleet."""
    return learned(method, kind, **{**SETTING, **changes})


def clearly_above(ours: list[float], others: list[float]) -> bool:
    """Whether one mean is above the other by more than the seeds' spread."""
    return mean(ours) - mean(others) > max(stdev(ours), stdev(others))

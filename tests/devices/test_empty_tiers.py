"""Tiers whose share of a small fleet comes to no device: nobody is there, and nothing depends on
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import nestling
from nestling import FleetConfig, Named, Tier
from nestling.methods import METHODS
from tests.small import small

SHARES = (
    Tier(name="tiny", ratio=0.25, share=0.1),
    Tier(name="half", ratio=0.5, share=0.4),
    Tier(name="whole", ratio=1.0, share=0.5),
)
COUNTS = (Tier(name="half", ratio=0.5, count=1), Tier(name="whole", ratio=1.0, count=1))
QUICK = {"shared-average", "fedavg", "decoupled", "flexfl", "depthfl", "prism", "fedproto"}
"""One of every kind; the others are played where there is time."""


def _parameters() -> list[Any]:
    every = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in METHODS]
    return [Named("heterofl", {"dynamic": True}), *every]


def _two(method: Any, tiers: tuple[Tier, ...]) -> nestling.Experiment:
    return small(method, participants=0, fleet=FleetConfig(size=2, tiers=tiers))


@pytest.mark.parametrize("method", _parameters(), ids=lambda m: getattr(m, "name", m))
def test_a_tier_without_devices_is_as_if_it_were_not_there(method: Any) -> None:
    given, without = (nestling.run(_two(method, tiers)) for tiers in (SHARES, COUNTS))
    assert list(given.summary["by_tier"]) == ["half", "whole"]
    states = [r.federation.method.state() for r in (given, without)]
    assert states[0].keys() == states[1].keys()
    assert all(
        torch.equal(t, states[1][kind][name])
        for kind, part in states[0].items()
        for name, t in part.items()
    )
    told = [note for note in given.summary["notes"] if note.startswith("tier")]
    assert told == ["tier 'tiny' takes no part: its share of 2 devices comes to none"]
    assert not any(note.startswith("tier") for note in without.summary["notes"])


@pytest.mark.parametrize("size", [1, 3, 6])
def test_the_default_fleet_may_have_fewer_devices_than_kinds(size: int, tmp_path: Path) -> None:
    result = nestling.run(
        small(participants=0, fleet=FleetConfig(size=size), rounds=1), out=tmp_path / "run"
    )
    assert len(result.summary["by_tier"]) == size
    told = json.loads((tmp_path / "run" / "federation.json").read_text())
    assert [tier["count"] for tier in told["tiers"]] == [1] * size
    again = nestling.resume(tmp_path / "run", overrides=("rounds=2",))
    assert again.summary["rounds_done"] == 2 and list(again.summary["by_tier"]) == list(
        result.summary["by_tier"]
    )

"""What a run says of loss terms that are too small to do anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nestling
from nestling import FleetConfig, Named, Tier, Watcher
from nestling.training.terms import weak
from tests.small import small


def notes(method: str, **options: Any) -> list[str]:
    found: list[str] = nestling.run(small(Named(method, options), rounds=4)).summary["notes"]
    return found


@pytest.mark.parametrize(
    ("method", "option"), [("fedprox", "mu"), ("fedhenn", "eta"), ("kt-pfl", "weight")]
)
def test_a_term_without_effect_is_named(method: str, option: str) -> None:
    """Terms that vanish where training begins (a pull to the weights received) and terms in a phase
    of their own are seen too."""
    (note,) = notes(method, **{option: 1e-6})
    assert note.startswith("WEAK TERM: in round 2 ") and "% of cross-entropy's gradient" in note
    assert notes(method, **{option: 100.0}) == []


@pytest.mark.parametrize("method", ["fedavg", "heterofl", "shared-average"])
def test_methods_without_a_weak_term_are_left_alone(method: str) -> None:
    assert notes(method) == []


def test_nothing_added_is_a_choice() -> None:
    assert weak([0.002, 0.0]) and not weak([0.0]) and not weak([]) and not weak([0.002, 0.5])


@pytest.mark.parametrize("method", ["fedprox", "kt-pfl", "scaffold"])
def test_looking_changes_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client that is looked at trains beside the round: models and what clients keep are the
    same bits without it."""

    def played() -> dict[str, torch.Tensor]:
        federation = nestling.run(small(method, rounds=4)).federation
        kept = {
            f"{c}/{n}": t
            for c in federation.world.store.clients()
            for n, t in federation.world.store.get(c).items()
        }
        return {
            **kept,
            **{
                f"{kind}/{n}": t
                for kind, part in federation.method.state().items()
                for n, t in part.items()
            },
        }

    looked = played()
    monkeypatch.setattr("nestling.runs.run._weak_terms", lambda *_: [])
    plain = played()
    assert looked.keys() == plain.keys() and all(
        torch.equal(t, plain[name]) for name, t in looked.items()
    )


def test_a_round_in_which_nobody_is_there_is_not_looked_at() -> None:
    away = FleetConfig(tiers=(Tier(name="away", ratio=1.0, count=3, availability=1e-9),))
    told = nestling.run(small("fedprox", rounds=3, fleet=away)).summary["notes"]
    assert len(told) == 1 and told[0].startswith("NOTHING WAS MERGED")  # and no word of a weak term


def test_a_client_that_does_not_fit_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any) -> list[float]:
        raise torch.OutOfMemoryError("no room beside the others")

    monkeypatch.setattr("nestling.runs.run.shares", too_large)
    assert nestling.run(small("fedprox", rounds=3)).summary["rounds_done"] == 3


def test_it_is_told_when_it_is_seen() -> None:
    """And not at the end, which a run may not reach."""
    told: list[str] = []
    watcher = Watcher(note=told.append, round=lambda row: told.append(f"round {row['round']}"))
    nestling.run(small(Named("fedprox", {"mu": 1e-6}), rounds=4), watcher=watcher)
    assert [line[:9] for line in told] == ["round 1", "round 2", "WEAK TERM", "round 3", "round 4"]

"""Rounds that overlap: the next one starts before the last is looked at, and nothing comes of it but speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nestling
from nestling import EngineConfig, FleetConfig, Train
from nestling.assemble import assemble, site_of
from nestling.engines import Cohort
from nestling.rounds import play
from nestling.training.client import Outcome, Task
from nestling.views.flat import Row
from tests.small import TIERS, small
from tests.test_bad_input import SMALL, call

HOPELESS = Train(epochs=1, batch=20, lr=1e30)
"""After a step no weight is finite, so that every reply is refused."""


class Ahead(Cohort):
    """A cohort that says it works asynchronously, and that can spoil a client's reply."""

    lookahead = 1

    def __init__(self, spoil: dict[int, int] | None = None) -> None:
        super().__init__(1)
        self.spoil, self.started = spoil or {}, list[int]()

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        self.started.append(tasks[0].round)
        for outcome in super().run(tasks):
            row: Any = outcome.reply.parts.get("weights")
            if self.spoil.get(tasks[0].round) == outcome.client and isinstance(row, Row):
                row.stack.flat[row.number, 5] = float("nan")
            yield outcome


def played(
    engine: Ahead, method: str = "all-large", rounds: int = 4
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], list[Any]]:
    experiment, federation = assemble(small(method, rounds=rounds, participants=4, engine=EngineConfig("inline")))
    federation.engine = engine
    refusals: list[Any] = []
    federation.on_refusal = lambda client, round, reason: refusals.append((client, round))
    engine.open(experiment.make_method(), site_of(federation))
    metrics = list(play(federation))
    state = {f"{kind}/{n}": t for kind, part in federation.method.state().items() for n, t in part.items()}
    return metrics, state, refusals


def without_time(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in metrics]


@pytest.mark.parametrize("method", ["all-large", "heterofl", "shared-distill", "local"])
def test_overlapping_rounds_change_nothing(method: str) -> None:
    ahead, alone = Ahead(), Ahead()
    alone.lookahead = 0
    fast, slow = played(ahead, method), played(alone, method)
    assert without_time(fast[0]) == without_time(slow[0])
    assert all(torch.equal(fast[1][n], t) for n, t in slow[1].items())
    assert ahead.started == [1, 2, 3, 4]


def test_a_broken_reply_is_left_out_as_if_it_had_been_seen_at_once() -> None:
    ahead, alone = Ahead({2: 1}), Ahead({2: 1})
    alone.lookahead = 0
    fast, slow = played(ahead), played(alone)
    assert fast[2] == slow[2] == [(1, 2)]
    assert [m["refused"] for m in fast[0]] == [0, 1, 0, 0]
    assert without_time(fast[0]) == without_time(slow[0])
    assert all(torch.isfinite(t).all() for t in fast[1].values())
    assert all(torch.equal(fast[1][n], t) for n, t in slow[1].items())
    assert ahead.started == [1, 2, 3, 2, 3, 4]  # round 3 was under way when round 2 turned out to be broken


def test_everybody_broken_keeps_the_model() -> None:
    class AllBroken(Ahead):
        def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
            for outcome in super().run(tasks):
                row: Any = outcome.reply["weights"]
                row.stack.flat[row.number, 0] = float("inf")
                yield outcome

    metrics, state, refusals = played(AllBroken(), rounds=2)
    before = nestling.run(small("all-large", rounds=1)).federation.world.main.initial
    assert len(refusals) == 8 and [m["refused"] for m in metrics] == [4, 4]
    assert all(torch.equal(state[f"weights/{n}"], t) for n, t in before.items())


def test_a_run_that_merged_nothing_says_so() -> None:
    result = nestling.run(small(train=HOPELESS))
    summary = result.summary
    assert summary["nothing_merged"] and summary["empty_rounds"] == 2 and [row["merged"] for row in result.metrics] == [0, 0]
    assert len(summary["notes"]) == 1 and summary["notes"][0].startswith(
        "NOTHING WAS MERGED in any of 2 rounds (6 replies refused"
    )


def test_a_run_with_some_empty_rounds_says_how_many() -> None:
    tiers = tuple(replace(tier, dropout=0.6) for tier in TIERS)
    result = nestling.run(small(fleet=FleetConfig(tiers=tiers), participants=2, rounds=12))
    empty = sum(row["dropped"] == len(row["clients"]) for row in result.metrics)
    assert 0 < empty < 12 and result.summary["empty_rounds"] == empty and not result.summary["nothing_merged"]
    assert any(note.startswith(f"{empty} of 12 rounds merged nothing") for note in result.summary["notes"])


def test_a_run_in_which_all_is_well_says_nothing() -> None:
    result = nestling.run(small())
    assert result.summary["empty_rounds"] == 0 and not result.summary["nothing_merged"] and not result.summary["notes"]
    assert [row["merged"] for row in result.metrics] == [3, 3]


@pytest.mark.parametrize("how", [[], ["--json"], ["--quiet"]], ids=str)
def test_the_command_line_ends_otherwise_where_nothing_was_merged(
    how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["--set", "train.lr=1e30", "--out", str(tmp_path / "run")]
    assert call(["run", *SMALL, *how, *wrong], monkeypatch) == 3
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1].startswith("nestling: NOTHING WAS MERGED")
    assert ("NOTHING WAS MERGED" in shown.out) == ("--quiet" not in how)
    assert "Rounds that merged nothing" in (tmp_path / "run" / "report.html").read_text()
    # Going on without a round to play is no success either.
    assert call(["run", "--resume", str(tmp_path / "run"), "--quiet"], monkeypatch) == 3

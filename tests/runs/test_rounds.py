"""Rounds that overlap: the next one starts before the last is looked at, and nothing comes of it
but speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nestling
from nestling import EngineConfig, FleetConfig, SplitConfig, Train
from nestling.engines import Cohort
from nestling.message import Message
from nestling.methods import Reply, SharedWeights
from nestling.runs.assemble import assemble, site_of
from nestling.runs.loop import play
from nestling.training.client import Errand, Outcome
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

    def run(self, errands: Sequence[Errand]) -> Iterator[Outcome]:
        self.started.append(errands[0].round)
        for outcome in super().run(errands):
            row: Any = outcome.reply.parts.get("weights")
            if self.spoil.get(errands[0].round) == outcome.client and isinstance(row, Row):
                row.stack.flat[row.number, 5] = float("nan")
            yield outcome


def played(
    engine: Ahead, method: str = "all-large", rounds: int = 4
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], list[Any]]:
    experiment, federation = assemble(
        small(method, rounds=rounds, participants=4, engine=EngineConfig("inline"))
    )
    federation.engine = engine
    refusals: list[Any] = []
    federation.on_refusal = lambda client, round, reason: refusals.append((client, round))
    engine.open(experiment.make_method(), site_of(federation))
    metrics = list(play(federation))
    state = {
        f"{kind}/{n}": t
        for kind, part in federation.method.state().items()
        for n, t in part.items()
    }
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
    # round 3 was under way when round 2 turned out to be broken
    assert ahead.started == [1, 2, 3, 2, 3, 4]


def test_everybody_broken_keeps_the_model() -> None:
    class AllBroken(Ahead):
        def run(self, errands: Sequence[Errand]) -> Iterator[Outcome]:
            for outcome in super().run(errands):
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
    assert (
        summary["nothing_merged"]
        and summary["empty_rounds"] == 2
        and [row["merged"] for row in result.metrics] == [0, 0]
    )
    assert len(summary["notes"]) == 1 and summary["notes"][0].startswith(
        "NOTHING WAS MERGED in any of 2 rounds (6 replies refused"
    )


def test_a_run_with_some_empty_rounds_says_how_many() -> None:
    tiers = tuple(replace(tier, dropout=0.6) for tier in TIERS)
    result = nestling.run(small(fleet=FleetConfig(tiers=tiers), participants=2, rounds=12))
    empty = sum(row["dropped"] == len(row["clients"]) for row in result.metrics)
    assert (
        0 < empty < 12
        and result.summary["empty_rounds"] == empty
        and not result.summary["nothing_merged"]
    )
    assert any(
        note.startswith(f"{empty} of 12 rounds merged nothing") for note in result.summary["notes"]
    )


def test_a_run_in_which_all_is_well_says_nothing() -> None:
    result = nestling.run(small())
    assert (
        result.summary["empty_rounds"] == 0
        and not result.summary["nothing_merged"]
        and not result.summary["notes"]
    )
    assert [row["merged"] for row in result.metrics] == [3, 3]


@pytest.mark.parametrize("how", [[], ["--json"], ["--quiet"]], ids=str)
def test_the_command_line_ends_otherwise_where_nothing_was_merged(
    how: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = ["--set", "train.lr=1e30", "--out", str(tmp_path / "run")]
    assert call(["run", *SMALL, *how, *wrong], monkeypatch) == 3
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1].startswith("nestling: NOTHING WAS MERGED")
    assert ("NOTHING WAS MERGED" in shown.out) == ("--quiet" not in how)
    assert "Rounds that merged nothing" in (tmp_path / "run" / "report.html").read_text()
    # Going on without a round to play is no success either.
    assert call(["run", "--resume", str(tmp_path / "run"), "--quiet"], monkeypatch) == 3


def test_a_merge_that_fails_on_what_is_not_finite_is_done_again_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some arithmetic (a singular value decomposition) raises where it meets such values, others
    only spoil what they make."""
    merge = SharedWeights.merge

    def strict(self: SharedWeights, replies: Sequence[Reply], round: int) -> None:
        merge(self, replies, round)
        if not all(t.isfinite().all() for t in self.weights.values()):
            raise ArithmeticError("not finite")

    alone = Ahead({2: 1})
    alone.lookahead = 0
    expected = played(alone)
    monkeypatch.setattr(SharedWeights, "merge", strict)
    for lookahead in (0, 1):
        engine = Ahead({2: 1})
        engine.lookahead = lookahead
        metrics, state, refusals = played(engine)
        assert refusals == [(1, 2)] and without_time(metrics) == without_time(expected[0])
        assert all(torch.equal(state[n], t) for n, t in expected[1].items())


def test_an_error_with_another_cause_is_raised_after_the_rounds_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    merge = SharedWeights.merge

    def fails(self: SharedWeights, replies: Sequence[Reply], round: int) -> None:
        merge(self, replies, round)
        if round == 3:
            raise ArithmeticError("a mistake")

    monkeypatch.setattr(SharedWeights, "merge", fails)
    experiment, federation = assemble(small("all-large", rounds=4, participants=4))
    federation.engine = Ahead()
    federation.engine.open(experiment.make_method(), site_of(federation))
    rows = play(federation)
    assert [next(rows)["round"], next(rows)["round"]] == [1, 2]
    with pytest.raises(ArithmeticError, match="a mistake"):
        next(rows)


def test_a_round_is_played_again_as_often_as_replies_turn_out_to_be_broken() -> None:
    """Where a device does not compute the same twice, a reply may be broken the second time
    only."""

    class Moody(Ahead):
        def run(self, errands: Sequence[Errand]) -> Iterator[Outcome]:
            self.spoil = {2: self.started.count(2)} if self.started.count(2) < 3 else {}
            return super().run(errands)

    engine = Moody()
    engine.lookahead = 0
    _, state, refusals = played(engine)
    assert refusals == [(0, 2), (1, 2), (2, 2)] and engine.started == [1, 2, 2, 2, 2, 3, 4]
    assert all(torch.isfinite(t).all() for t in state.values())


def test_a_reply_that_is_refused_for_something_else_is_so_again() -> None:
    class Liar(Ahead):
        def run(self, errands: Sequence[Errand]) -> Iterator[Outcome]:
            for outcome in super().run(errands):
                facts = (
                    {"samples": -1}
                    if (errands[0].round, outcome.client) == (2, 3)
                    else outcome.reply.facts
                )
                yield replace(outcome, reply=Message(outcome.reply.parts, facts))

    experiment, federation = assemble(small("all-large", participants=4))
    federation.engine, told = Liar({2: 1}), dict[int, str]()
    federation.on_refusal = lambda client, round, reason: told.update({client: reason})
    federation.engine.open(experiment.make_method(), site_of(federation))
    list(play(federation))
    assert told.keys() == {1, 3} and "not finite" in told[1] and "-1" in told[3]


@pytest.mark.parametrize("method", ["scaffold", "fedproto"])
def test_who_is_late_goes_on_from_what_it_had(method: str) -> None:
    """A reply after the deadline does not count, and neither does what its client made of the
    round."""
    made = small(
        method,
        fleet=FleetConfig(tiers=TIERS, deadline=1e-9),
        rounds=2,
        participants=0,
        split=SplitConfig(size=20),
    )
    result = nestling.run(made)
    asked = [len(row["clients"]) for row in result.metrics]
    assert [
        row["late"] for row in result.metrics
    ] == asked and result.federation.world.store.clients() == []

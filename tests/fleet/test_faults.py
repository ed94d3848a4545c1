"""Whatever happens to letters, workers and the server, a run ends as the run in one process in
which the same clients missed the same rounds, bit for bit, on the server and on the devices."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fleet.loop import same, state_of
from tests.fleet.storm import (
    CLIENTS,
    HARMLESS,
    LIES,
    ROUNDS,
    Fate,
    Places,
    Storm,
    memory_at,
    missed_in,
    reference,
    served,
)

# with memory on the device, without, with the server's records of clients
METHODS = ("fedproto", "shared-average", "fedmd")

# The same examples every time: a new one that fails belongs here by name, and not in the way of
# somebody else.
MODEST = settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def same_as_the_run_in_one_process(storm: Storm, method: str, root: Path) -> Places:
    """Plays the run in the storm and holds it against its reference; gives who missed what."""
    result, spoiled = served(storm, method, root / "run")
    rows = result.metrics
    missed = missed_in(rows, CLIENTS)
    there = reference(method, missed, spoiled)
    assert [row["round"] for row in rows] == list(range(1, ROUNDS + 1))
    assert same(state_of(result.federation), there.state), storm.happened
    assert [row["loss"] for row in rows] == [row["loss"] for row in there.rows]
    if not spoiled:
        assert [row["bytes_up"] for row in rows] == [row["bytes_up"] for row in there.rows]
    for client in range(CLIENTS):
        counted = max((r for r in range(1, ROUNDS + 1) if (client, r) not in missed), default=0)
        if counted:
            kept = memory_at(root / f"device-{client}", client, counted)
            assert same(kept, there.kept[client]), (client, storm.happened)
    return missed


def stormy(
    method: str, plan: dict[tuple[int, int], Fate], cuts: list[int] | None = None
) -> tuple[Places, Storm]:
    with TemporaryDirectory() as root:
        storm = Storm(Path(root), plan, cuts or ())
        return same_as_the_run_in_one_process(storm, method, Path(root)), storm


fates = st.builds(Fate, st.sampled_from(HARMLESS), st.integers(0, 8))
letters = st.tuples(st.integers(0, CLIENTS - 1), st.integers(1, 8))
cuts = st.lists(st.integers(1, 90), max_size=3)


@MODEST
@given(method=st.sampled_from(METHODS), plan=st.dictionaries(letters, fates, max_size=6), at=cuts)
def test_what_can_be_mended_costs_no_reply(
    method: str, plan: dict[tuple[int, int], Fate], at: list[int]
) -> None:
    missed, storm = stormy(method, plan, at)
    # A round starts with those that are there: who was just lost sight of, or whose hello was, may
    # miss it.
    away = {
        int(line.split()[-2])
        for line in storm.happened
        if line.startswith("welcome") or line.endswith("moved")
    }
    assert storm.restarts or {c for c, _ in missed} <= away, storm.happened


anything = st.one_of(
    st.builds(Fate, st.sampled_from(HARMLESS), st.integers(0, 200)),
    st.builds(Fate, st.sampled_from(("garbled", "lie")), st.integers(0, 5000)),
    st.just(Fate("gone")),
)


@MODEST
@given(
    method=st.sampled_from(METHODS), plan=st.dictionaries(letters, anything, max_size=12), at=cuts
)
def test_anything_may_happen(method: str, plan: dict[tuple[int, int], Fate], at: list[int]) -> None:
    # Somebody stays, or there is no run.
    kept = {place: fate for place, fate in plan.items() if place[0] or fate.kind != "gone"}
    stormy(method, kept, at)


@pytest.mark.parametrize("method", METHODS)
def test_fair_weather(method: str) -> None:
    missed, storm = stormy(method, {})
    assert not missed and not storm.happened
    # a welcome, and an order a round
    assert storm.count == dict.fromkeys(range(CLIENTS), 1 + ROUNDS)


def test_work_that_came_too_late_is_forgotten_by_the_client() -> None:
    """It worked, but its answers never came: what it kept of that round must not count in the next
    one."""
    plan = {(1, n): Fate("unanswered") for n in range(3, 8)}
    missed, storm = stormy("fedproto", plan)
    assert (1, 2) in missed and (1, 1) not in missed and (1, 3) not in missed, storm.happened


def test_an_old_order_that_comes_after_a_younger_one_changes_nothing() -> None:
    """The first order arrives again in the second round, after the client's work of that, and
    before its work of the third."""
    slow = {(0, n): Fate("late", 60) for n in range(3, 12)}  # so that the rounds go on long enough
    missed, storm = stormy("fedproto", {(2, 2): Fate("twice", 30), **slow})
    assert not missed, storm.happened


@pytest.mark.parametrize("lie", range(len(LIES)))
def test_a_liar_costs_its_own_reply_at_most(lie: int) -> None:
    missed, _ = stormy("shared-average", {(1, 3): Fate("lie", lie)})
    assert {client for client, _ in missed} <= {1}


@pytest.mark.minutes
def test_a_server_cut_off_at_any_step_goes_on() -> None:
    """One cut at every step of the second round, and of what lies around it, one run each."""
    _, storm = stormy("fedproto", {})
    for step in range(storm.steps // 3, 2 * storm.steps // 3 + 4):
        missed, again = stormy("fedproto", {}, [step])
        assert again.restarts == 1 and not missed, step


def test_nodes_that_answer_more_slowly_than_they_are_asked_are_heard() -> None:
    plan = {(client, n): Fate("late", 50) for client in range(CLIENTS) for n in range(1, 6)}
    missed, storm = stormy("shared-average", plan)
    assert not missed and not storm.restarts, storm.happened


def test_a_node_gone_for_good_costs_its_own_replies_only() -> None:
    missed, _ = stormy("fedmd", {(1, 3): Fate("gone")})
    assert missed == {(1, 2), (1, 3)}

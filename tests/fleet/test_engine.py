"""The engine of a fleet: the same result as in one process, whatever happens to letters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nestling import Data, Named
from nestling.fleet.node import worker as worker_module
from nestling.fleet.node.worker import Worker
from nestling.fleet.protocol.courier import Failure, LoopCourier
from nestling.fleet.protocol.wire import Answer, kind_of
from nestling.fleet.server.engine import FleetEngine, NoQuorum, Patience
from nestling.message import Message
from nestling.runs.federation import Federation
from nestling.runs.loop import play
from tests.fleet.loop import (
    METHODS,
    inline,
    live,
    memory_of,
    over_the_loop,
    plain,
    same,
    six,
    state_of,
    workers_of,
)

STUCK = 3.0
"""Seconds of a look for an answer that was announced and does not come (`flower/grid.py`)."""
PATIENCE = Patience(deadline=100.0, most=1000.0, resend=10.0, poll=1.0, refresh=2.0)


class Time:
    """A clock that only moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Weather(LoopCourier):
    """A loop that loses and delays. What is to happen to the n-th order of a node stands in `plan`:
    "lost" (the node never gets it), "unanswered" (it works, and the answer is lost), "fails" (an
    error comes back), or how many seconds the answer is late."""

    def __init__(
        self,
        workers: Mapping[int, Worker],
        time: Time,
        plan: Mapping[tuple[int, int], Any] | None = None,
    ) -> None:
        super().__init__({node: w.handle for node, w in workers.items()})
        self.time, self.plan, self.orders = time, dict(plan or {}), dict.fromkeys(workers, 0)
        self.ready: dict[str, float] = {}

    def _answer(self, node: int, letter: bytes) -> bytes | Failure:
        if kind_of(letter) == "welcome":
            return super()._answer(node, letter)
        self.orders[node] = self.orders.get(node, 0) + 1
        fate = self.plan.get((node, self.orders[node]))
        if fate == "lost":
            return b""
        if fate == "fails":
            return Failure("the process was killed")
        answer = super()._answer(node, letter)
        if isinstance(fate, (int, float)):
            self.held = (self.time.now + fate, answer)
            return answer
        return b"" if fate == "unanswered" else answer

    def push(self, letters: Mapping[int, bytes]) -> dict[int, str]:
        tickets = {}
        for node, letter in letters.items():
            self.held: Any = None
            tickets.update(super().push({node: letter}))
            if self.held:
                self.ready[tickets[node]] = self.held[0]
        return tickets

    def pull(self, tickets: Collection[str]) -> list[tuple[str, bytes | Failure]]:
        due = [
            t
            for t in tickets
            if self.ready.get(t, 0.0) <= self.time.now and self._answers.get(t) != b""
        ]
        return super().pull(due)


def stormy(
    method: str,
    home: Path,
    plan: Mapping[tuple[int, int], Any],
    patience: Patience = PATIENCE,
    rounds: int = 3,
) -> tuple[Federation, Weather, dict[int, Worker]]:
    """The federation of six clients in bad weather; client c is behind node 100 + c."""
    time, workers = Time(), workers_of(home)
    courier = Weather({100 + c: w for c, w in workers.items()}, time, plan)
    _, federation = live(
        six(method, rounds=rounds), courier, patience, clock=time.clock, sleep=time.sleep
    )
    assert isinstance(federation.engine, FleetEngine) and federation.engine.greeter is not None
    federation.engine.greeter.clock = time.clock
    return federation, courier, workers


def without(method: str, missing: set[tuple[int, int]], rounds: int = 3) -> Federation:
    """The run in this process in which some clients vanish in some rounds."""
    from nestling.runs.assemble import assemble, site_of

    settled, federation = assemble(six(method, rounds=rounds))
    federation.world.fleet.drops = lambda i, round: (i, round) in missing  # type: ignore[method-assign]
    federation.engine.open(settled.make_method(), site_of(federation))
    list(play(federation))
    return federation


def without_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tested = (
        "personal_score",
        "global_score",
        "by_tier",
        "others",
        "metrics",
        "by_class",
        "worst_clients",
    )
    # Models that stay with clients are tested here alone; how much memory is free, so that what
    # is trained is told round by round, changes on devices alone.
    dropped = ("seconds", "trained", *tested)
    return [{k: v for k, v in row.items() if k not in dropped} for row in rows]


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(client, round) of all work that workers really did."""
    found: list[tuple[int, int]] = []
    real = worker_module.work

    def counted(method: Any, task: Any, site: Any) -> Any:
        found.append((task.client, task.round))
        return real(method, task, site)

    monkeypatch.setattr(worker_module, "work", counted)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_real_bytes_change_nothing(method: str, tmp_path: Path) -> None:
    there, rows, workers = over_the_loop(six(method), tmp_path)
    here, plainly = plain(method)
    assert len(state_of(here)) > 0 and same(state_of(there), state_of(here))
    assert without_time(rows) == without_time(plainly)
    kept = [here.world.store.get(client) for client in range(6)]
    assert all(same(memory_of(workers[c], c), kept[c]) for c in range(6))
    assert bool(kept[0]) == here.method.as_set.personal
    assert not there.world.store.clients()  # what a client keeps never travels


@pytest.mark.parametrize(
    ("data", "model"),
    [
        (
            Data("mnist12k-8x8", task="reconstruction", normal=("0", "1", "2")),
            Named("autoencoder", {"hidden": [16], "code": 4}),
        ),
        (
            Data("shakespeare", task="next-token", options={"steps": 16}),
            Named("gpt", {"dim": 16, "depth": 1, "heads": 2, "head_dim": 8, "hidden": 16}),
        ),
    ],
    ids=["reconstruction", "next-token"],
)
def test_other_tasks_travel_as_classes_do(data: Data, model: Named, tmp_path: Path) -> None:
    """Devices that have their share of the experiment's rows."""
    asked = six("heterofl", data=data, model=model, rounds=2)
    there, rows, _ = over_the_loop(asked, tmp_path)
    here, plainly = inline(asked)
    assert same(state_of(there), state_of(here)) and without_time(rows) == without_time(plainly)


def test_what_is_lost_is_sent_again_and_counts_once(
    tmp_path: Path, worked: list[tuple[int, int]]
) -> None:
    plan = {
        (100, 1): "lost",
        (101, 1): "unanswered",
        (102, 1): "fails",
        (102, 2): "fails",
        (103, 2): "unanswered",
        (104, 1): 25.0,
    }
    federation, courier, workers = stormy("fedproto", tmp_path, plan)
    rows = list(play(federation))
    assert same(state_of(federation), state_of(plain("fedproto")[0]))
    assert all(
        same(memory_of(workers[c], c), plain("fedproto")[0].world.store.get(c)) for c in range(6)
    )
    assert sorted(worked) == [(c, r) for c in range(6) for r in (1, 2, 3)]  # nobody worked twice
    assert [row["dropped"] for row in rows] == [0, 0, 0] and [row["refused"] for row in rows] == [
        0,
        0,
        0,
    ]
    counts = federation.engine.counts  # type: ignore[attr-defined]
    assert counts["failures"] == 2 and counts["resent"] >= 5
    assert courier.orders[105] == 3  # whose answer came was not asked again


def test_a_client_that_is_gone_costs_its_own_replies_only(tmp_path: Path) -> None:
    plan = {(102, n): "lost" for n in range(2, 99)}
    federation, _, _ = stormy("fedmd", tmp_path, plan)
    rows = list(play(federation))
    assert [row["dropped"] for row in rows] == [0, 1, 1]
    assert same(state_of(federation), state_of(without("fedmd", {(2, 2), (2, 3)})))
    notes = federation.engine.notes
    assert any("round 2: client 2 (device 2) gave no reply in time" in note for note in notes)


def test_a_late_answer_is_recognised_and_refused(tmp_path: Path) -> None:
    federation, _, _ = stormy("shared-average", tmp_path, {(101, 1): 105.0, (102, 2): 30.0})
    told: list[tuple[int, int, str]] = []
    federation.on_refusal = lambda client, round, reason: told.append((client, round, reason))
    # Node 101's first order is answered after the deadline; what it is sent again in the meantime
    # is lost.
    federation.engine.courier.plan |= {(101, n): "lost" for n in range(2, 6)}  # type: ignore[attr-defined]
    rows = list(play(federation))
    assert rows[0]["dropped"] == 1
    late = [reason for client, _, reason in told if client == 1]
    assert late == ["node 101: an answer to round 1 in round 2"]
    assert federation.engine.counts["late"] == 1  # type: ignore[attr-defined]
    missed = {(1, n) for n, row in enumerate(rows, 1) if row["dropped"]}
    assert same(state_of(federation), state_of(without("shared-average", missed)))


def test_too_few_replies_stop_the_run(tmp_path: Path) -> None:
    plan = {(100 + c, n): "lost" for c in range(4) for n in range(1, 99)}
    few = Patience(deadline=20.0, quorum=3, most=60.0, resend=10.0, poll=1.0)
    federation, courier, _ = stormy("shared-average", tmp_path / "a", plan, few)
    with pytest.raises(NoQuorum, match=r"round 1: 2 clients answered .* 3 are needed"):
        list(play(federation))
    assert courier.time.now >= 60
    enough = Patience(deadline=20.0, quorum=2, most=60.0, resend=10.0, poll=1.0)
    federation, courier, _ = stormy("shared-average", tmp_path / "b", plan, enough, rounds=1)
    assert [row["dropped"] for row in play(federation)] == [4] and 20 <= courier.time.now < 25


def test_a_round_that_lacks_replies_at_its_deadline_says_that_it_waits(tmp_path: Path) -> None:
    """Once, and only where it does."""
    plan = {(100 + c, 1): 30.0 for c in range(5)}
    told = {}
    for quorum in (1, 2):
        patience = Patience(deadline=20.0, quorum=quorum, most=60.0, resend=1000.0, poll=1.0)
        home = tmp_path / str(quorum)
        federation, _, _ = stormy("shared-average", home, plan, patience, rounds=1)
        (row,) = list(play(federation))
        waits = [note for note in federation.engine.notes if "at its deadline" in note]
        told[quorum] = row["merged"], waits
    words = "1 of the 2 replies that it needs are there; it waits for them"
    assert told == {1: (1, []), 2: (6, [f"round 1: at its deadline {words}"])}


def test_a_node_that_comes_back_under_another_number_goes_on(
    tmp_path: Path, worked: list[tuple[int, int]]
) -> None:
    federation, courier, workers = stormy("fedproto", tmp_path, {(103, 2): "unanswered"})
    engine, seen = federation.engine, []

    def moved(seconds: float) -> None:
        courier.time.sleep(seconds)
        # it was killed in the middle of round 2, after its work
        if courier.orders[103] == 2 and 103 in courier.workers:
            del courier.workers[103]
            courier.workers[977] = Worker(workers[3].home, workers[3].members).handle
            seen.append(courier.time.now)

    engine.sleep = moved  # type: ignore[attr-defined]
    rows = list(play(federation))
    assert len(seen) == 1 and courier.orders[977] == 2
    assert [row["dropped"] for row in rows] == [0, 0, 0]
    assert same(state_of(federation), state_of(plain("fedproto")[0]))
    assert worked.count((3, 2)) == 1  # its result was on the disk


def test_a_node_that_forgot_the_run_is_welcomed_again(tmp_path: Path) -> None:
    federation, courier, workers = stormy("shared-average", tmp_path, {})
    rounds = play(federation)
    next(rounds)
    run = federation.engine.roster.run  # type: ignore[attr-defined]
    (workers[2].home / "runs" / run / "welcome").unlink()
    courier.workers[102] = Worker(workers[2].home, workers[2].members).handle
    rows = list(rounds)
    assert [row["dropped"] for row in rows] == [0, 0] and same(
        state_of(federation), state_of(plain("shared-average")[0])
    )


def test_a_client_whose_work_fails_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = worker_module.work

    def broken(method: Any, task: Any, site: Any) -> Any:
        if (task.client, task.round) == (4, 2):
            raise MemoryError("no room")
        return real(method, task, site)

    monkeypatch.setattr(worker_module, "work", broken)
    federation, courier, _ = stormy("shared-average", tmp_path, {})
    told: list[tuple[int, int, str]] = []
    federation.on_refusal = lambda client, round, reason: told.append((client, round, reason))
    rows = list(play(federation))
    assert told == [(4, 2, "client 4 failed: MemoryError: no room")]
    assert [(row["dropped"], row["refused"]) for row in rows] == [(0, 0), (0, 1), (0, 0)]
    assert courier.orders[104] == 3  # the same work would fail again
    assert same(state_of(federation), state_of(without("shared-average", {(4, 2)})))


def test_a_device_whose_reply_is_refused_goes_on_from_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = worker_module.work

    def diverged(method: Any, task: Any, site: Any) -> Any:
        outcome = real(method, task, site)
        if (task.client, task.round) != (4, 2):
            return outcome
        spoilt = {
            kind: {n: t * float("nan") for n, t in part.items()}
            for kind, part in outcome.reply.parts.items()
        }
        kept = {n: t * float("nan") for n, t in outcome.memory.items()}
        return replace(outcome, reply=Message(spoilt, outcome.reply.facts), memory=kept)

    monkeypatch.setattr(worker_module, "work", diverged)
    federation, rows, workers = over_the_loop(six("fedmd"), tmp_path)
    expected = without("fedmd", {(4, 2)})
    assert [(row["dropped"], row["refused"]) for row in rows] == [(0, 0), (0, 1), (0, 0)]
    assert same(state_of(federation), state_of(expected))
    assert same(memory_of(workers[4], 4), expected.world.store.get(4))


def test_free_memory_is_what_answers_say(tmp_path: Path) -> None:
    federation, _, _ = stormy("shared-average", tmp_path, {})
    engine = federation.engine
    assert isinstance(engine, FleetEngine)
    task_answer = Answer(engine.roster.run, 0, [], {"device 1": 123, "device 2": 456})
    list(engine.take(101, [1], task_answer.to_bytes()))
    told = {c: engine.roster.entry(c).member.free for c in (1, 2)}  # type: ignore[union-attr]
    assert told == {1: 123, 2: 0}  # a node speaks for its own clients only


@pytest.mark.parametrize("transport", ["fp16", "int8"])
def test_rounded_transport_is_counted_as_sent(transport: str, tmp_path: Path) -> None:
    workers = workers_of(tmp_path)
    courier = LoopCourier({c: w.handle for c, w in workers.items()})
    _, federation = live(six("shared-average"), courier, transport=transport)
    rows = list(play(federation))
    exact = plain("shared-average")[1]
    for ways in ("bytes_up", "bytes_down"):
        ratio = rows[0][ways] / exact[0][ways]
        # vectors take two bytes a number
        assert ratio == 0.5 if transport == "fp16" else 0.25 < ratio < 0.3
    near = state_of(plain("shared-average")[0])
    assert all(float((t - near[n]).abs().max()) < 0.05 for n, t in state_of(federation).items())
    assert not same(state_of(federation), near)


def test_everybody_gone_is_an_empty_round(tmp_path: Path) -> None:
    federation, courier, _ = stormy("shared-average", tmp_path, {})
    before = {n: t.clone() for n, t in state_of(federation).items()}
    courier.workers.clear()
    assert federation.engine.greeter.refresh()  # type: ignore[attr-defined]
    row = next(play(federation))
    assert row["clients"] == [] and row["loss"] is None and same(state_of(federation), before)


def test_inline_is_what_it_is_compared_with() -> None:
    assert not same(
        state_of(inline(six("shared-average", seed=1))[0]), state_of(plain("shared-average")[0])
    )


class Stalling(LoopCourier):
    """Two nodes that have announced an answer and do not send it, one to an order and one to its
    welcome: each look for such an answer takes as long as Flower's grid is waited for."""

    def __init__(self, workers: Mapping[int, Worker], time: Time) -> None:
        super().__init__({**{n: w.handle for n, w in workers.items()}, 200: lambda _: b""})
        self.time, self.stalled = time, set[str]()

    def push(self, letters: Mapping[int, bytes]) -> dict[int, str]:
        tickets = super().push(letters)
        orders = {node for node, letter in letters.items() if kind_of(letter) == "order"}
        for node in letters:
            if node == 200 or (node == 101 and node in orders):
                self.stalled.add(tickets[node])
                self._answers.pop(tickets[node])
        return tickets

    def pull(self, tickets: Collection[str]) -> list[tuple[str, bytes | Failure]]:
        self.time.sleep(STUCK if self.stalled & set(tickets) else 0.0)
        return super().pull(tickets)


@pytest.mark.parametrize("deadline", [20.0, 20.7, 21.4, 22.1, 22.8, 23.5, 24.2, 24.9])
def test_nobody_holds_a_round_beyond_its_deadline_and_five_seconds(
    deadline: float, tmp_path: Path
) -> None:
    """By a clock that counts what is waited for: wherever in its looks the deadline finds the
    server. (Over the real wire: `flower/test_greedy.py`.)"""
    time, ends = Time(), list[float]()
    courier = Stalling({100 + c: w for c, w in workers_of(tmp_path).items()}, time)
    patience = Patience(deadline=deadline, resend=1000.0)
    _, federation = live(
        six(rounds=1), courier, patience, clock=time.clock, sleep=time.sleep, watch=lambda: None
    )
    engine = federation.engine
    assert isinstance(engine, FleetEngine)
    began = time.now
    engine.watch = lambda: ends.append(time.now - began)
    (row,) = list(play(federation))
    assert row["merged"] == 5 and row["missed"] == [1]
    assert deadline <= ends[-1] <= deadline + 5.0

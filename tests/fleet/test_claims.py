"""What a device claims is bounded by what can be: its rows are its weight in the merge, and no
device takes the merge by claiming many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nestling import Named
from nestling.devices import make_fleet
from nestling.errors import InputError
from nestling.fleet.care.audit import check
from nestling.fleet.care.health import run_status
from nestling.fleet.care.metrics import exposition
from nestling.fleet.node import worker as worker_module
from nestling.fleet.node.worker import Worker
from nestling.fleet.protocol.courier import LoopCourier
from nestling.fleet.protocol.wire import Answer, Hello, JobDone, Member, Parcel, kind_of
from nestling.fleet.server.engine import Patience
from nestling.fleet.server.roster import Roster
from nestling.fleet.server.serving import play as serve
from nestling.message import Message
from nestling.methods.labels import PRESENT
from nestling.methods.server import Server
from nestling.runs.admission import TOO_LARGE
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import MOST_DECLARED, Federation
from nestling.runs.loop import play
from nestling.runs.run import Watcher
from nestling.training.client import Outcome
from tests.fleet.loop import inline, live, same, six, state_of, workers_of
from tests.fleet.test_engine import without

LIAR = 4


@dataclass
class Liar:
    """A device that works as it should, and then says something else: of its rows as it joins, and
    in its replies."""

    worker: Worker
    rows: int | None = None
    reply: Callable[[Message], Message] = lambda reply: reply

    def handle(self, letter: bytes) -> bytes:
        answer = self.worker.handle(letter)
        if kind_of(letter) == "welcome":
            hello = Hello.from_bytes(answer)
            rows = self.rows
            members = tuple(m if rows is None else replace(m, rows=rows) for m in hello.members)
            return replace(hello, members=members).to_bytes()
        told = Answer.from_bytes(answer)
        return replace(told, results=[self._lie(done) for done in told.results]).to_bytes()

    def _lie(self, done: Any) -> JobDone:
        assert isinstance(done, JobDone)
        return replace(done, parcel=Parcel.of(self.reply(done.parcel.open())))


def claiming(samples: int) -> Callable[[Message], Message]:
    return lambda reply: Message(reply.parts, {**reply.facts, "samples": samples})


def with_liar(
    home: Path,
    method: str = "shared-average",
    rows: int | None = None,
    reply: Callable[[Message], Message] = lambda reply: reply,
    **more: Any,
) -> tuple[Federation, list[dict[str, Any]], list[str], list[str]]:
    """A run of six clients, one of them a liar: the federation, its rounds, refusals and notes."""
    workers = workers_of(home)
    handles = {100 + c: w.handle for c, w in workers.items()}
    handles[100 + LIAR] = Liar(workers[LIAR], rows, reply).handle
    notes: list[str] = []
    _, federation = live(six(method, **more), LoopCourier(handles), notes=notes.append)
    told: list[str] = []
    federation.on_refusal = lambda client, round, reason: told.append(f"{client}: {reason}")
    return federation, list(play(federation)), told, notes


def test_a_claim_above_what_was_declared_is_refused(tmp_path: Path) -> None:
    federation, rows, told, _ = with_liar(tmp_path, reply=claiming(2**39))
    assert [row["refused"] for row in rows] == [1, 1, 1]
    assert all(f"{LIAR}: " in line and str(2**39) in line and " 40" in line for line in told)
    expected = without("shared-average", {(LIAR, r) for r in (1, 2, 3)})
    assert same(state_of(federation), state_of(expected))


@pytest.mark.parametrize("method", ["shared-average", "fedproto"])
def test_who_declares_many_rows_counts_as_the_cap(method: str, tmp_path: Path) -> None:
    """Everybody has 40 rows and counts as 40; so does who says it has 2**39."""
    server = Server(most_rows=40)

    def lie(reply: Message) -> Message:
        parts = dict(reply.parts)
        if "counts" in parts:
            rows = parts["counts"]["rows"]
            parts["counts"] = {"rows": rows * 2**20}
        return Message(parts, {**reply.facts, "samples": 40 * 2**20})

    federation, rows, told, notes = with_liar(tmp_path, method, 40 * 2**20, lie, server=server)
    assert not told and [row["merged"] for row in rows] == [6, 6, 6]
    assert same(state_of(federation), state_of(inline(six(method, server=server))[0]))
    assert any(f"client {LIAR} " in n and str(40 * 2**20) in n and " 40 " in n for n in notes)


def test_without_a_cap_a_declared_number_is_still_bounded(tmp_path: Path) -> None:
    federation, _, told, notes = with_liar(tmp_path, rows=2**39, reply=claiming(2**39), rounds=1)
    assert not told and federation.most_rows == MOST_DECLARED
    assert any(str(2**39) in note and str(MOST_DECLARED) in note for note in notes)
    assert inline(six(rounds=1))[0].most_rows == 0  # a simulation knows everybody's rows


def test_a_claim_above_the_split_is_refused_in_a_simulation() -> None:
    settled, federation = assemble(six(rounds=1))
    real, told = federation.engine.run, list[str]()

    def lying(errands: Any) -> Any:
        for event in real(errands):
            if isinstance(event, Outcome) and event.client == LIAR:
                event = replace(event, reply=claiming(41)(event.reply))
            yield event

    federation.engine.run = lying  # type: ignore[method-assign]
    federation.on_refusal = lambda client, round, reason: told.append(f"{client}: {reason}")
    federation.engine.open(settled.make_method(), site_of(federation))
    row = next(play(federation))
    assert told == [f"{LIAR}: it claims 41 samples and has 40"] and row["refused"] == 1


def test_under_a_cap_of_one_row_clients_of_any_size_count_alike() -> None:
    split = replace(six().split, size=0, kind="quantity", public=0.0)

    def end(weighting: str, most: int) -> Any:
        method = Named("fedprox", {"weighting": weighting})
        return inline(six(method, rounds=1, split=split, server=Server(most_rows=most)))[0]

    alike, free = end("samples", 1), end("samples", 0)
    assert len({alike.world.split.size(c) for c in range(6)}) > 1
    assert same(state_of(alike), state_of(end("uniform", 0)))
    assert not same(state_of(alike), state_of(free))


def counting(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Message], Message]:
    """Lies about rows by class, or about which classes there are."""

    def lie(reply: Message) -> Message:
        kind = "present" if "present" in reply else "counts"
        told = {kind: {name: change(t) for name, t in reply[kind].items()}}
        return Message({**reply.parts, **told}, reply.facts)

    return lie


LIES: dict[str, tuple[str, Callable[[Message], Message]]] = {
    "negative rows": ("fedproto", counting(lambda rows: -rows)),
    "one negative, the sum right": (
        "fedproto",
        counting(lambda rows: torch.cat([rows[:1] - 1000, rows[1:2] + 1000, rows[2:]])),
    ),
    "too many rows": ("fedproto", counting(lambda rows: rows + 1)),
    "rows beyond all numbers": ("fedproto", counting(lambda rows: rows * 0 + 2**31 - 1)),
    "negative labels": ("fedgen", counting(lambda rows: rows - 1)),
    "too many labels": ("fedgen", counting(lambda rows: rows * 2)),
    "steps": (
        "fednova",
        lambda reply: Message(reply.parts, {**reply.facts, "effective_steps": 2.0**30}),
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_has_a_meaning_is_bounded_by_it(lie: str, tmp_path: Path) -> None:
    method, reply = LIES[lie]
    federation, rows, told, _ = with_liar(tmp_path, method, reply=reply, rounds=1)
    assert rows[0]["merged"] == 5 and rows[0]["refused"] == 1
    assert len(told) == 1 and told[0].startswith(f"{LIAR}: ") and "with 40 rows" in told[0]
    assert same(state_of(federation), state_of(without(method, {(LIAR, 1)}, rounds=1)))


def test_flags_of_more_classes_than_rows_cannot_be() -> None:
    held = Message({"present": {"classes": torch.tensor([True, True, True])}}, {"samples": 2})
    assert PRESENT.can is not None and not PRESENT.can(None, held)
    assert PRESENT.can(None, Message(held.parts, {"samples": 3}))


def test_rows_by_class_that_are_not_the_rows_are_not_let_in() -> None:
    roster = Roster(make_fleet(six().fleet, 0))
    with pytest.raises(InputError, match="7 rows, and 8"):
        roster.admit(1, "1" * 32, Member("odd", rows=7, counts=(4, 4)))
    assert roster.admit(1, "1" * 32, Member("even", rows=8, counts=(4, 4))).client == 0


def filled(value: float) -> Callable[[Message], Message]:
    """A reply all of whose weights are one value."""
    return lambda reply: Message(
        {
            kind: {
                n: torch.full_like(t, value) if t.is_floating_point() else t for n, t in p.items()
            }
            for kind, p in reply.parts.items()
        },
        reply.facts,
    )


@pytest.mark.parametrize("value", [3e38, -3e38, 1e25])
def test_values_that_no_merge_survives_are_refused(value: float, tmp_path: Path) -> None:
    federation, rows, told, _ = with_liar(tmp_path, reply=filled(value), rounds=2)
    assert [row["refused"] for row in rows] == [1, 1] and [row["merged"] for row in rows] == [5, 5]
    assert all(line.startswith(f"{LIAR}: ") and "too large" in line for line in told)
    expected = without("shared-average", {(LIAR, 1), (LIAR, 2)}, rounds=2)
    assert same(state_of(federation), state_of(expected))


FREE = 1e30  # steps of any length


def test_a_number_of_rows_below_the_cap_takes_no_merge_either(tmp_path: Path) -> None:
    """One device of six says that it has 2**20 − 1 rows, and sends weights of 7: of what others
    hold too it has half at most, whatever it says."""
    rows = 2**20 - 1

    def lie(reply: Message) -> Message:
        return claiming(rows)(filled(7.0)(reply))

    def largest(home: str, share: float) -> tuple[float, Any]:
        server = Server(most_share=share, most_step=FREE)
        federation, metrics, told, _ = with_liar(
            tmp_path / home, "fedavg", rows, lie, rounds=1, server=server
        )
        assert not told and metrics[0]["merged"] == 6
        return max(float(t.max()) for t in state_of(federation).values()), metrics[0].get("clipped")

    free, said = largest("free", 1.0)
    assert free > 6.9 and said is None
    bounded, said = largest("bounded", 0.0)  # the fleet's own bound
    assert 3.5 < bounded < 4.5
    assert [one["client"] for one in said] == [LIAR] and str(rows) in said[0]["reason"]


@pytest.mark.parametrize("value", [100.0, -1e6, 1e15])
def test_a_step_that_is_far_too_long_is_clipped_and_told(value: float, tmp_path: Path) -> None:
    workers = workers_of(tmp_path / "devices")
    handles = {100 + c: w.handle for c, w in workers.items()}
    handles[100 + LIAR] = Liar(workers[LIAR], reply=filled(value)).handle
    told: list[tuple[int, int, str]] = []
    home, watcher = tmp_path / "run", Watcher(clipped=lambda *said: told.append(said))
    patience = Patience(poll=0.0, refresh=0.0)
    courier = LoopCourier(handles)
    result = serve(courier, six(rounds=2), home, min_clients=6, patience=patience, watcher=watcher)
    assert [(c, r) for c, r, _ in told] == [(LIAR, 1), (LIAR, 2)]
    assert all("times the median and counts as 10 times" in reason for *_, reason in told)
    assert [row["clipped"][0]["client"] for row in result.metrics] == [LIAR, LIAR]
    lines = [line for line in check(home) if line["event"] == "clipped"]
    assert [(x["round"], x["client"], x["name"]) for x in lines] == [
        (r, LIAR, f"device {LIAR}") for r in (1, 2)
    ]
    assert "nestling_clipped_total 2" in exposition(run_status(home))
    page = (home / "report.html").read_text()
    assert "Replies of 1 client were refused or clipped" in page and "times the median" in page
    plain = inline(six(rounds=2))[0]
    far = [
        float((state_of(result.federation)[name] - tensor).abs().max())
        for name, tensor in state_of(plain).items()
    ]
    assert max(far) < 1.0


YOGI = Server("yogi", most_step=FREE)


def end(federation: Federation) -> dict[str, torch.Tensor]:
    """All that the server has, its optimiser's moments too."""
    return {
        f"{kind}/{name}": t for kind, part in federation.state().items() for name, t in part.items()
    }


def test_a_merge_that_is_too_large_is_undone_without_the_largest_reply(tmp_path: Path) -> None:
    """Each reply can be, but the optimiser's square of one cannot."""
    federation, rows, told, _ = with_liar(tmp_path, reply=filled(1e12), rounds=2, server=YOGI)
    assert [(row["refused"], row["merged"], row["dropped"]) for row in rows] == [(1, 5, 0)] * 2
    assert told == [f"{LIAR}: {TOO_LARGE}"] * 2
    settled, expected = assemble(six(rounds=2, server=YOGI))
    expected.world.fleet.drops = lambda i, _: i == LIAR  # type: ignore[method-assign]
    expected.engine.open(settled.make_method(), site_of(expected))
    list(play(expected))
    assert same(end(federation), end(expected))


def test_devices_do_not_work_twice_where_a_round_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, worked = worker_module.work, list[tuple[int, int]]()

    def counted(method: Any, task: Any, site: Any) -> Any:
        worked.append((task.client, task.round))
        return real(method, task, site)

    monkeypatch.setattr(worker_module, "work", counted)
    with_liar(tmp_path, reply=filled(1e12), rounds=2, server=YOGI)
    assert sorted(worked) == sorted((c, r) for c in range(6) for r in (1, 2))


def test_as_many_replies_as_must_be_are_left_out_in_a_simulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three of six: the largest first, then the two next ones."""
    monkeypatch.setattr(Federation, "doubts", True)
    settled, federation = assemble(six(rounds=2, server=YOGI))
    real, told = federation.engine.run, dict[int, str]()
    large = {1: 1e12, 3: 2e12, 5: 3e12}

    def lying(errands: Any) -> Any:
        for event in real(errands):
            if isinstance(event, Outcome) and event.client in large:
                event = replace(event, reply=filled(large[event.client])(event.reply))
            yield event

    federation.engine.run = lying  # type: ignore[method-assign]
    federation.on_refusal = lambda client, round, reason: told.update({client: reason})
    federation.engine.open(settled.make_method(), site_of(federation))
    rows = list(play(federation))
    assert told == dict.fromkeys(large, TOO_LARGE) and [row["merged"] for row in rows] == [3, 3]
    assert all(torch.isfinite(t).all() for t in end(federation).values())

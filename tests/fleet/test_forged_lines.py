"""What clients say reaches the operator's terminal and log as text: no code of theirs moves the
cursor, no line of theirs stands for one of ours."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from nestling.fleet.care import logs
from nestling.fleet.node.worker import Worker
from nestling.fleet.protocol.courier import LoopCourier
from nestling.fleet.protocol.wire import (
    Answer,
    Failed,
    Hello,
    JobDone,
    Member,
    Order,
    Parcel,
    Welcome,
    kind_of,
)
from nestling.fleet.server.engine import Patience
from nestling.fleet.server.serving import play
from nestling.harmless import harmless
from tests.fleet.loop import six

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\n09:00:00 round 9: all is well\u2028\u202e\ud800"
SHOWN = r"\x1b[2J\x1b]0;owned\x07\x9b31m\r\n09:00:00 round 9: all is well\u2028\u202e\ud800"


class Liar:
    """A node that says what it likes in the place of `answer`."""

    def __init__(self, client: int, answer: Callable[[Order], bytes], **told: str) -> None:
        wanted, device = (None, told["device"]) if "device" in told else (client, "")
        self.member, self.answer = Member(f"liar {client}", wanted, device), answer
        self.token, self.error = f"{client:032x}", told.get("error", "")

    def handle(self, letter: bytes) -> bytes:
        if kind_of(letter) == "welcome":
            run = Welcome.from_bytes(letter).run
            return Hello(run, self.token, (self.member,), self.error).to_bytes()
        return self.answer(Order.from_bytes(letter))


def whole(order: Order) -> bytes:
    return Answer(order.run, order.round, error=EVIL).to_bytes()


def failed(order: Order) -> bytes:
    jobs = [Failed(job.client, job.key, EVIL) for job in order.jobs]
    return Answer(order.run, order.round, list(jobs)).to_bytes()


def named(order: Order) -> bytes:
    """A reply whose tensors have names of the client's own making."""
    (job,) = order.jobs
    parts = [
        [kind, [[f"!{EVIL}", *row[1:]] if k == 0 else row for k, row in enumerate(rows)]]
        for kind, rows in job.parcel.table["parts"]
    ]
    samples = {"samples": 40}
    parcel = Parcel({"facts": samples, "parts": parts}, job.parcel.data)
    done = JobDone(job.client, job.key, parcel, 1.0, 1, 40)
    return Answer(order.run, order.round, [done]).to_bytes()


def broken(order: Order) -> bytes:
    """A letter that the courier reports as failed, in the node's own words."""
    raise ValueError(EVIL)


def test_a_fleets_log_has_only_lines_of_ours(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from nestling.fleet.flower.hosting import _log_to, _watcher

    liars = [
        Liar(1, whole),
        Liar(2, failed),
        Liar(3, named),
        Liar(4, broken),
        Liar(5, whole, device=EVIL),
        Liar(5, whole, error=EVIL),
    ]
    nodes = {100 + k: liar.handle for k, liar in enumerate(liars)}
    honest = Worker(tmp_path / "device", [Member("honest", 0)])
    root, before = logging.getLogger("nestling"), list(logging.getLogger("nestling").handlers)
    _log_to(tmp_path / "run.log")
    try:
        with logs.written_to(tmp_path / "run" / logs.SERVER_LOG, needs=tmp_path / "run"):
            play(
                LoopCourier({1: honest.handle, **nodes}),
                six(rounds=1),
                tmp_path / "run",
                min_clients=5,
                deadline=1.0,
                patience=Patience(poll=0.05, refresh=0.0),
                watcher=_watcher(),
            )
    finally:
        for handler in set(root.handlers) - set(before):
            root.removeHandler(handler)
            handler.close()
    lines = (tmp_path / "run.log").read_bytes().decode()
    assert all(c.isprintable() or c == "\n" for c in lines)
    assert not any(line.startswith("09:00:00") for line in lines.splitlines())
    told = [line for line in lines.splitlines() if SHOWN in line]
    for who in (
        "client 1 is refused: node 100",
        "client 2 is refused: client 2 failed",
        "client 3 is refused",
        "an order to node 103 failed",
        "node 104 is refused",
        "node 105 is refused",
    ):
        assert any(who in line for line in told), (who, lines)
    records = (tmp_path / "run" / logs.SERVER_LOG).read_bytes().decode()
    assert all(c.isprintable() or c == "\n" for c in records)
    assert len([json.loads(line) for line in records.splitlines()]) == len(lines.splitlines())
    status = json.loads((tmp_path / "run" / "fleet.json").read_text())
    assert all(row["reason"].isprintable() for row in status["refusals"])
    assert len(status["refusals"]) >= 5


def test_harmless_text_is_short_and_stays_as_it_is() -> None:
    assert harmless("größer als 3 \\ 日本") == "größer als 3 \\ 日本"
    assert harmless(EVIL) == SHOWN == harmless(SHOWN)
    assert len(harmless("\x1b" * 10**6)) == len(harmless("x" * 10**6)) == 1000
    assert harmless("x" * 10, 10) == "x" * 10 and harmless("x" * 11, 10) == "x" * 9 + "…"

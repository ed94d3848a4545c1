"""The client's side: its data and memory stay with it, the same order gives the same answer, and
being killed costs nothing."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestling import Data, Experiment, Named
from nestling.errors import InputError
from nestling.fleet.node import worker as worker_module
from nestling.fleet.node.own_data import read_rows
from nestling.fleet.node.worker import Worker
from nestling.fleet.protocol.courier import LoopCourier
from nestling.fleet.protocol.local import LocalError, ask, serving
from nestling.fleet.protocol.wire import (
    Answer,
    Failed,
    Hello,
    JobDone,
    Member,
    Order,
    Parcel,
    Welcome,
)
from nestling.fleet.server.engine import FleetEngine
from nestling.fleet.server.serving import welcome_of
from nestling.message import Message
from nestling.runs.assemble import assemble
from nestling.runs.loop import play
from tests.fleet.loop import live, memory_of, plain, same, six, state_of, workers_of

RUN = "ab" * 8


class Killed(BaseException):
    """What a kill -9 is to the code it hits."""


class Tape(LoopCourier):
    """A loop that keeps what it carried."""

    def __init__(self, workers: dict[int, Any]) -> None:
        super().__init__(workers)
        self.orders: list[tuple[int, bytes]] = []

    def push(self, letters: Any) -> dict[int, str]:
        self.orders += list(letters.items())
        return super().push(letters)


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tape, dict[int, Worker]]:
    """A whole run of fedproto, which keeps networks on clients; orders of client 2 are behind node
    2."""
    workers = workers_of(tmp_path_factory.mktemp("tape"))
    courier = Tape({c: w.handle for c, w in workers.items()})
    _, federation = live(six("fedproto"), courier)
    list(play(federation))
    return courier, workers


def letters_to(tape: Tape, client: int) -> tuple[bytes, list[bytes]]:
    """The welcome and the orders of the three rounds."""
    welcome, *orders = [letter for node, letter in tape.orders if node == client]
    return welcome, orders


def results(answer: bytes) -> list[JobDone | Failed]:
    return Answer.from_bytes(answer).results


def same_result(a: bytes, b: bytes) -> bool:
    first, second = results(a)[0], results(b)[0]
    assert isinstance(first, JobDone) and isinstance(second, JobDone)
    return (first.key, first.loss, first.parcel.digest) == (
        second.key,
        second.loss,
        second.parcel.digest,
    )


def test_the_same_order_gives_the_same_answer_without_work(
    tape: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    welcome, orders = letters_to(tape[0], 2)
    worker = Worker(tmp_path, [Member("device 2", 2)])
    worker.handle(welcome)
    first = worker.handle(orders[0])

    def never(*_: Any) -> Any:
        raise AssertionError("it worked twice")

    with monkeypatch.context() as patch:
        patch.setattr(worker_module, "work", never)
        assert worker.handle(orders[0]) == first
        # also after a restart
        assert Worker(tmp_path, [Member("device 2", 2)]).handle(orders[0]) == first
    assert not same_result(first, worker.handle(orders[1]))


def test_a_server_that_goes_back_a_round_finds_the_client_as_it_was(
    tape: Any, tmp_path: Path
) -> None:
    welcome, orders = letters_to(tape[0], 2)
    worker = Worker(tmp_path, [Member("device 2", 2)])
    worker.handle(welcome)
    told = [worker.handle(order) for order in orders]
    kept = memory_of(worker, 2)
    # The order of round 3 again, but with other content: what the client had before round 3 is what
    # it starts from.
    third = Order.from_bytes(orders[2])
    other = Order(third.run, 3, 2, [replace(third.jobs[0], key="f" * 32)])
    assert same_parcels(worker.handle(other.to_bytes()), told[2]) and same(
        memory_of(worker, 2), kept
    )
    assert same_parcels(worker.handle(orders[2]), told[2])
    # An order that was long on its way is out of date.
    refused = results(worker.handle(orders[1]))[0]
    assert (
        isinstance(refused, Failed)
        and "an order of round 2 that came after one of round 3" in refused.error
    )
    # Round 2 was covered by a checkpoint, which the server said: started again, it cannot go back
    # behind it.
    again = replace(Order.from_bytes(orders[1]), start=2)
    refused = results(worker.handle(again.to_bytes()))[0]
    assert isinstance(refused, Failed) and "went back to round 2" in refused.error
    assert same(memory_of(worker, 2), kept)


def same_parcels(a: bytes, b: bytes) -> bool:
    first, second = results(a)[0], results(b)[0]
    assert isinstance(first, JobDone) and isinstance(second, JobDone)
    return first.parcel.digest == second.parcel.digest and first.loss == second.loss


@pytest.mark.parametrize("moment", ["work", "memory", "floor", "result", "sent"])
def test_killed_at_any_moment_it_goes_on_as_if_nothing_had_been(
    moment: str, tape: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    courier, workers = tape
    welcome, orders = letters_to(courier, 2)
    worker = Worker(tmp_path, [Member("device 2", 2)])
    worker.handle(welcome)
    worker.handle(orders[0])
    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        _kill_at(moment, patch)
        worker.handle(orders[1])
        assert moment == "sent"
    worker = Worker(tmp_path, [Member("device 2", 2)])
    for order in orders[1:]:
        worker.handle(order)
    assert same(memory_of(worker, 2), memory_of(workers[2], 2))
    assert not list(tmp_path.rglob(".*"))  # no half-written file is left once it works again


def _kill_at(moment: str, patch: pytest.MonkeyPatch) -> None:
    def die(*_: Any) -> Any:
        raise Killed

    if moment == "work":
        patch.setattr(worker_module, "work", die)
    elif moment == "memory":

        def half(self: Any, client: int, state: Any, round: int) -> Any:
            path = self._path(client, round)
            path.write_bytes(Message({"memory": state}).to_bytes()[:1000])
            raise Killed

        patch.setattr(worker_module.ClientStore, "_write", half)
    elif moment in ("floor", "result"):
        real = worker_module.write_atomic

        def chosen(path: Path, data: Any) -> None:
            if path.name == moment:
                raise Killed
            real(path, data)

        patch.setattr(worker_module, "write_atomic", chosen)


@pytest.mark.parametrize("name", ["welcome", "2/result", "2/floor", "2/memory/2.1.bin"])
def test_a_damaged_file_is_named_and_nothing_is_trained_from_it(
    name: str, tape: Any, tmp_path: Path
) -> None:
    """One byte changed anywhere, or the end missing: the server hears which file it is."""
    welcome, orders = letters_to(tape[0], 2)
    worker, rng = Worker(tmp_path, [Member("device 2", 2)]), random.Random(5)
    worker.handle(welcome)
    worker.handle(orders[0])
    path = next((tmp_path / "runs").iterdir()) / name
    good = path.read_bytes()
    for place in [0, len(good) - 1, *(rng.randrange(len(good)) for _ in range(20))]:
        changed = bytearray(good)
        changed[place] ^= rng.randint(1, 255)
        for data in (bytes(changed), good[:place]):
            path.write_bytes(data)
            told = Answer.from_bytes(Worker(tmp_path, [Member("device 2", 2)]).handle(orders[1]))
            said = told.error or next(r.error for r in told.results if isinstance(r, Failed))
            assert f"{path} is damaged" in said
    path.write_bytes(good)
    again = Worker(tmp_path, [Member("device 2", 2)]).handle(orders[1])
    assert isinstance(results(again)[0], JobDone)


def test_own_data_give_what_the_share_gives(tape: Any, tmp_path: Path) -> None:
    """Clients that bring the rows of their share in a file, without the experiment's data: the same
    run, bit for bit."""
    for method in ("fedproto", "fedmd"):
        _, federation = assemble(six(method))
        data = {}
        for client in range(6):
            rows = federation.world.split.indices(client)
            data[client] = str(tmp_path / f"{client}.npz")
            np.savez(
                data[client], x=federation.bench.x[rows].numpy(), y=federation.bench.y[rows].numpy()
            )
        workers = workers_of(tmp_path / method, data=data)
        _, there = live(six(method), LoopCourier({c: w.handle for c, w in workers.items()}))
        rows_ = list(play(there))
        here = plain(method)[0]
        assert same(state_of(there), state_of(here)) and [
            r["dropped"] + r["refused"] for r in rows_
        ] == [0, 0, 0]
        assert all(same(memory_of(workers[c], c), here.world.store.get(c)) for c in range(6))
        entries = there.engine.roster.entries  # type: ignore[attr-defined]
        assert [e.member.rows for e in entries] == [40] * 6 and all(
            e.member.counts is None for e in entries
        )


def welcome(experiment: Experiment | None = None) -> Welcome:
    settled, federation = assemble(experiment or six())
    return Welcome.from_bytes(welcome_of(RUN, settled, federation))


def test_what_own_data_may_be(tmp_path: Path) -> None:
    told = welcome()
    x, y = (
        np.random.default_rng(0).integers(0, 256, (5, 8, 8), dtype=np.uint8),
        np.array([0, 1, 2, 9, 9]),
    )

    def read(name: str, **arrays: Any) -> Any:
        np.savez(tmp_path / f"{name}.npz", **arrays)
        return read_rows(tmp_path / f"{name}.npz", told)

    pictures = read("bytes", x=x, y=y)
    assert pictures.x.shape == (5, 1, 8, 8) and pictures.y.tolist() == [0, 1, 2, 9, 9]
    # Bytes are prepared as the experiment's own pictures are.
    assert torch.allclose(
        pictures.x[0, 0], (torch.from_numpy(x[0]).float() / 255 - 0.1307) / 0.3081, atol=1e-6
    )
    floats = read("floats", x=pictures.x.numpy(), y=y.astype(str))
    assert torch.equal(floats.x, pictures.x) and torch.equal(floats.y, pictures.y)
    assert torch.equal(read("last", x=x[..., None], y=y).x, pictures.x)  # channels may come last
    folder = read_rows(tmp_path, told)
    assert len(folder.y) == 15
    bad: dict[str, dict[str, Any]] = {
        "samples are": {"x": x[:, :5], "y": y},
        "there is no class '10'": {"x": x, "y": y + 1},
        "one class a sample": {"x": x, "y": y[:3]},
        "int64": {"x": x.astype(np.int64), "y": y},
        "NaN": {"x": np.full((5, 1, 8, 8), np.nan), "y": y},
        "cannot be read": {"x": np.array([{}], dtype=object), "y": y},
        "has no array 'y'": {"x": x},
    }
    for reason, arrays in bad.items():
        np.savez(tmp_path / "bad.npz", **arrays)
        with pytest.raises(InputError, match=reason):
            read_rows(tmp_path / "bad.npz", told)
    with pytest.raises(InputError, match=r"no \.npz file"):
        read_rows(tmp_path / "absent.npz", told)


def test_own_rows_bring_classes_only(tmp_path: Path) -> None:
    """Their classes would be taken for another task's targets."""
    task = Data("mnist12k-8x8", task="reconstruction", normal=("0",))
    np.savez(tmp_path / "own.npz", x=np.zeros((5, 1, 8, 8), np.float32), y=np.zeros(5, int))
    told = welcome(six("fedavg", data=task, model=Named("autoencoder")))
    with pytest.raises(InputError, match="reconstruction is to be learned"):
        read_rows(tmp_path / "own.npz", told)


def test_bad_data_are_said_in_the_hello(tmp_path: Path) -> None:
    worker = Worker(tmp_path / "w", [Member("a")], str(tmp_path / "absent.npz"))
    hello = Hello.from_bytes(worker.handle(welcome().to_bytes()))
    assert hello.members == () and "absent.npz" in hello.error
    answer = Answer.from_bytes(worker.handle(Order(RUN, 1, 0, []).to_bytes()))
    assert answer.unknown  # it has not been welcomed to that run


def test_a_worker_refuses_what_it_cannot_do(tape: Any, tmp_path: Path) -> None:
    letter, orders = letters_to(tape[0], 2)
    worker = Worker(tmp_path, [Member("device 2", 2)])
    worker.handle(letter)
    good = Order.from_bytes(orders[0])
    changes: list[tuple[str, dict[str, Any]]] = [
        ("there is no 'somebody'", {"name": "somebody"}),
        ("no network 'huge'", {"network": "huge"}),
        ("no unit", {"spec": {"index": {}, "dropped": ["nothing"], "private": []}}),
        ("KeyError", {"spec": {}}),
        (
            "is no shape",
            {"parcel": Parcel({"facts": {}, "parts": [["w", [["a", "f32", [-1]]]]]}, b"")},
        ),
    ]
    for reason, change in changes:
        order = Order(good.run, 1, 0, [replace(good.jobs[0], **change)])
        failed = results(worker.handle(order.to_bytes()))[0]
        assert isinstance(failed, Failed) and reason in failed.error, (reason, failed)
    for junk in (b"", b"junk" * 10, orders[0][:-1], Answer(RUN, 1).to_bytes()):
        with pytest.raises(InputError):
            worker.handle(junk)
    assert isinstance(results(worker.handle(orders[0]))[0], JobDone)  # and it still works


def test_a_gateway_speaks_for_many(tmp_path: Path) -> None:
    members = [Member(f"gw/{c}", c) for c in range(6)]
    gateway = Worker(tmp_path, members, free=lambda: 77)
    _, federation = live(six("fedproto"), LoopCourier({1: gateway.handle}))
    rows = list(play(federation))
    assert same(state_of(federation), state_of(plain("fedproto")[0]))
    assert [row["bytes_down"] for row in rows] == [
        row["bytes_down"] for row in plain("fedproto")[1]
    ]
    engine = federation.engine
    assert isinstance(engine, FleetEngine) and engine.counts["sent"] == 3  # one order a round
    assert [e.member.free for e in engine.roster.entries] == [77] * 6


def test_old_runs_are_cleared_away(tmp_path: Path) -> None:
    worker, told = Worker(tmp_path, [Member("a")]), welcome()
    for number in range(8):
        worker.handle(replace_run(told, f"{number:016x}"))
        os.utime(tmp_path / "runs" / f"{number:016x}", (number, number))
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == [
        f"{n:016x}" for n in (4, 5, 6, 7)
    ]
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def replace_run(told: Welcome, run: str) -> bytes:
    return replace(told, run=run).to_bytes()


# -- over a socket ---------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(path: Path, handle: Any) -> Iterator[None]:
    with serving(path, handle) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join(10)


def test_letters_over_a_socket_that_is_ones_own(tmp_path: Path) -> None:
    place = tmp_path / "own" / "socket"

    def handle(letter: bytes) -> bytes:
        if letter == b"bad":
            raise ValueError("not that")
        return letter[::-1]

    with answering(place, handle):
        assert (
            stat.S_IMODE(place.stat().st_mode) == 0o600
            and stat.S_IMODE(place.parent.stat().st_mode) == 0o700
        )
        assert ask(place, b"abc", 10, 120) == b"cba" and ask(place, b"", 10, 120) == b""
        large = os.urandom(3_000_000)
        assert ask(place, large, 10, 120) == large[::-1]
        with pytest.raises(LocalError, match="ValueError: not that"):
            ask(place, b"bad", 10, 120)
        assert ask(place, b"abc", 10, 120) == b"cba"
    with pytest.raises(LocalError, match="no worker"):
        ask(place, b"abc", 0.2, 1)
    with pytest.raises(InputError, match="too long"):
        ask("/" + "x" * 200, b"abc", 0.2, 1)


def test_the_resident_worker_as_a_process(tape: Any, tmp_path: Path) -> None:
    """The real process: it answers, is killed with -9 in the middle of a client's life, comes back,
    and nothing is lost."""
    letter, orders = letters_to(tape[0], 2)
    place = tmp_path / "s" / "socket"
    words = [
        "--socket",
        str(place),
        "--folder",
        str(tmp_path / "home"),
        "--name",
        "device 2",
        "--client",
        "2",
        "--memory",
        "300 MB",
    ]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "nestling.fleet.node.worker", *words], stdout=subprocess.DEVNULL
        )

    process = start()
    try:
        hello = Hello.from_bytes(ask(place, letter, 120, 120))
        assert (
            hello.members[0].free == 300 * 1024**2
            and hello.members[0].macs > 0
            and hello.members[0].client == 2
        )
        first = ask(place, orders[0], 1, 120)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        process = start()
        deadline = time.monotonic() + 120
        while True:  # the dead worker's socket is still there until the new one takes its place
            with contextlib.suppress(LocalError):
                again = ask(place, orders[0], 120, 120)
                break
            assert time.monotonic() < deadline
        assert same_result(first, again)
        for order in orders[1:]:
            ask(place, order, 1, 120)
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait(30)
    fresh = Worker(tmp_path / "home", [Member("device 2", 2)])
    assert same(memory_of(fresh, 2), memory_of(tape[1][2], 2))

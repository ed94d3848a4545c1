"""The journal, and the gateway as a process: boards side by side, asked again, killed, lied to."""

from __future__ import annotations

import json
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestling.errors import InputError
from nestling.tiny.link import bundle
from nestling.tiny.link.gateway import GatewayClient, read_config
from nestling.tiny.link.journal import JournalEntry
from nestling.tiny.link.line import BoardRefused, Lost
from nestling.tiny.link.orders import orders_from, orders_of
from nestling.tiny.link.session import State
from nestling.tiny.runtime import native
from nestling.tiny.runtime.job import Done, Job
from nestling.tiny.runtime.toolchain import missing_tools
from tests.tiny.hostboard import (
    QUICK,
    HostBoard,
    assert_same,
    client_data,
    folder,
    job,
    room,
    wait_for,
)


@pytest.fixture
def home() -> Iterator[Path]:
    with folder() as path:
        yield path


# -- the bundle ------------------------------------------------------------------------------------


def test_a_job_comes_back_from_its_bytes() -> None:
    told = orders_of(job(shifts=True, mask=lambda p, r: r.random(p.trained) < 0.5))
    found = orders_from(bundle.unpack(told.to_bytes())[1])
    assert found.digest == told.digest
    assert found.header == told.header


@pytest.mark.parametrize("name", ["weights", "steps", "mask", "settings"])
def test_another_job_has_another_digest(name: str) -> None:
    told = job(mask=lambda p, r: np.ones(p.trained, bool))
    parts = {
        field: getattr(told, field) for field in ("plan", "weights", "settings", "steps", "mask")
    }
    other = job(
        seed=1,
        mask=lambda p, r: np.arange(p.trained) != 3,
        settings=type(told.settings)(lr=0.04, momentum=0.9),
    )
    assert orders_of(Job(**{**parts, name: getattr(other, name)})).digest != orders_of(told).digest


def test_a_damaged_bundle_is_refused() -> None:
    data = bundle.pack({"a": 1}, {"x": np.arange(6, dtype=np.float32)})
    for place in range(0, len(data), 3):
        with pytest.raises(InputError):
            bundle.unpack(data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :])
        with pytest.raises(InputError):
            bundle.unpack(data[:place])


@pytest.mark.parametrize(
    "head",
    [
        b"[]",
        b'{"facts": {}, "arrays": {"x": ["float32", [-1]]}}',
        b'{"facts": {}, "arrays": {"x": ["float32", [1000000000000]]}}',
        b'{"facts": {}, "arrays": {"x": ["object", [1]]}}',
        b'{"facts": {}, "arrays": {"x": ["float32", [1.5]]}}',
        b'{"facts": {}, "arrays": {"x": ["float32"]}}',
        b'{"facts": 3, "arrays": {}}',
        b"[" * 100000,
        b"\xff\xfe",
    ],
)
def test_a_bundle_that_lies_is_refused(head: bytes) -> None:
    import zlib

    data = struct.pack("<I", len(head)) + head + bytes(4)
    with pytest.raises(InputError):
        bundle.unpack(data + struct.pack("<I", zlib.crc32(data)))


def test_orders_that_lie_are_refused() -> None:
    arrays = orders_of(job()).arrays()
    lies: list[dict[str, Any]] = [
        {"sizes": np.full(12, np.inf)},
        {"sizes": arrays["sizes"] * 2},
        {"sizes": arrays["sizes"] * 0},
        {"weights": arrays["weights"][:-1]},
        {"settings": arrays["settings"][:3]},
        {"descriptor": arrays["descriptor"][:20]},
        {"descriptor": np.zeros(200, np.uint8)},
        {"rows": arrays["rows"].astype(np.float32)},
        {"strange": arrays["rows"]},
    ]
    for lie in lies:
        with pytest.raises(InputError):
            orders_from({**arrays, **lie})
    with pytest.raises(InputError):
        orders_from({"rows": arrays["rows"]})


# -- the journal -----------------------------------------------------------------------------------


def state(step: int, loss: float = 1.5) -> State:
    return State(step, np.arange(4, dtype=np.float32) + step, np.ones(3, np.float32) * step, loss)


def test_a_journal_gives_back_the_last_state_and_the_losses_after_it(home: Path) -> None:
    entry = JournalEntry(home / "notes", "kitchen", "ab" * 32, 7)
    assert (entry.find().done, entry.find().state) == (None, None)
    entry.begin(State(0, np.zeros(4, np.float32), None, 0.0))
    entry.step(1, 0.5)
    entry.checkpoint(state(2))
    for number in (3, 4, 3, 4, 5):  # the board went back in between
        entry.step(number, number / 10)
    found = entry.find().state
    assert found is not None and found.momentum is not None
    assert (found.step, found.loss, found.weights.tolist()) == (2, 1.5, [2, 3, 4, 5])
    assert found.later == tuple(float(np.float32(x)) for x in (0.3, 0.4, 0.5))


def test_a_torn_journal_is_used_as_far_as_it_is_whole(home: Path) -> None:
    entry = JournalEntry(home, "kitchen", "ab" * 32, 7)
    entry.begin(state(0))
    for number in (1, 2, 3):
        entry.step(number, 1.0)
    losses = home / "kitchen.losses"
    losses.write_bytes(losses.read_bytes()[:-5])
    found = entry.find().state
    assert found is not None and found.later == (1.0, 1.0)
    whole = (home / "kitchen.job").read_bytes()
    (home / "kitchen.job").write_bytes(whole[:-1])
    assert entry.find().state is None


def test_notes_on_another_job_or_other_data_are_not_used(home: Path) -> None:
    entry = JournalEntry(home, "kitchen", "ab" * 32, 7)
    entry.begin(state(3))
    assert JournalEntry(home, "kitchen", "ac" * 32, 7).find().state is None
    assert JournalEntry(home, "kitchen", "ab" * 32, 8).find().state is None
    assert JournalEntry(home, "cellar", "ab" * 32, 7).find().state is None
    JournalEntry(home, "kitchen", "ac" * 32, 7).begin(state(0))
    assert entry.find().state is None
    assert sorted(path.name for path in home.iterdir()) == ["kitchen.job", "kitchen.losses"]


def test_a_finished_job_is_answered_from_the_journal(home: Path) -> None:
    entry = JournalEntry(home, "kitchen", "ab" * 32, 7)
    entry.begin(state(3))
    entry.finish(Done(np.arange(3, dtype=np.float32), 2.5, 9, 90))
    found = entry.find().done
    assert found is not None
    assert (found.weights.tolist(), found.loss, found.steps, found.samples) == (
        [0, 1, 2],
        2.5,
        9,
        90,
    )


# -- the gateway -----------------------------------------------------------------------------------


class Process:
    """A gateway for some boards, which may be killed and started again."""

    def __init__(self, home: Path, boards: dict[str, dict[str, Any]]) -> None:
        self.home, self.socket, self.log = home, home / "gateway.sock", home / "gateway.log"
        (home / "boards.json").write_text(
            json.dumps({name: {"timing": asdict(QUICK), **told} for name, told in boards.items()})
        )
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *more: str) -> list[str]:
        paths = [
            "--config",
            str(self.home / "boards.json"),
            "--socket",
            str(self.socket),
            "--journal",
            str(self.home / "journal"),
        ]
        return [sys.executable, "-m", "nestling.tiny.link.gateway", *paths, *more]

    def start(self) -> Process:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command(), stderr=log)
        return self

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def events(self) -> list[dict[str, Any]]:
        return (
            [json.loads(line) for line in self.log.read_text().splitlines()]
            if self.log.exists()
            else []
        )

    def kinds(self) -> list[str]:
        return [event["event"] for event in self.events()]

    def __enter__(self) -> Process:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


def test_boards_work_side_by_side_and_a_job_asked_again_is_not_done_again(home: Path) -> None:
    blobs = [client_data(seed) for seed in range(3)]
    jobs = [job(seed=seed) for seed in range(3)]
    boards = [HostBoard(home, room(jobs[0]), blob, f"b{k}").start() for k, blob in enumerate(blobs)]
    try:
        with Process(
            home, {f"b{k}": {"transport": board.transport} for k, board in enumerate(boards)}
        ) as gateway:
            client = GatewayClient(gateway.socket)
            with ThreadPoolExecutor(3) as pool:
                found = list(pool.map(lambda k: client.ask(f"b{k}", jobs[k]), range(3)))
            for k in range(3):
                assert_same(found[k][0], native.run_job(jobs[k], blobs[k]))
                assert found[k][1]["used"] == room(jobs[k]) and not found[k][1]["from_journal"]
            again, facts = client.ask("b1", jobs[1])
            assert_same(again, found[1][0])
            assert facts["from_journal"] and facts["loads"] == 0
            assert client.hello("b2")["rows"] == 40
            kinds = gateway.kinds()
            assert kinds.count("job") == 3 and kinds.count("done") == 4 and kinds[0] == "listening"
    finally:
        for board in boards:
            board.kill()


def test_board_killed_three_times_and_gateway_once_end_with_the_same_bits(home: Path) -> None:
    told, blob = job(steps=4000, size=2), client_data()
    wanted = native.run_job(told, blob)
    with HostBoard(home, room(told), blob) as board:
        gateway = Process(home, {"b": {"transport": board.transport, "every": 50}}).start()
        try:
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(GatewayClient(gateway.socket).ask, "b", told)
                for kills, victim in enumerate((board, board, gateway, board)):
                    wait_for(lambda kills=kills: steps_noted(home) > 600 * (kills + 1))
                    victim.kill()
                    assert not found.done()  # else nothing was disturbed
                    victim.start()
                    seen = ["lost", "lost", "job", "lost"][: kills + 1]
                    wait_for(
                        lambda seen=seen: (
                            [e for e in gateway.kinds() if e in ("lost", "job")] == ["job", *seen]
                        )
                    )
                assert_same(found.result(120)[0], wanted)
            goes_on = [event["step"] for event in gateway.events() if event["event"] == "job"]
            assert goes_on[0] == 0 and goes_on[1] > 1800
        finally:
            gateway.kill()


def steps_noted(home: Path) -> int:
    """How far the journal of board b is."""
    try:
        facts, _ = bundle.unpack((home / "journal" / "b.job").read_bytes())
    except (OSError, InputError):
        return 0
    return int(facts["step"])


def test_a_gateway_that_comes_back_to_a_living_board_does_no_step_twice(home: Path) -> None:
    told, blob = job(steps=3000, size=2), client_data()
    with HostBoard(home, room(told), blob) as board:
        gateway = Process(home, {"b": {"transport": board.transport, "every": 1000}}).start()
        try:
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(GatewayClient(gateway.socket).ask, "b", told)
                losses = home / "journal" / "b.losses"
                wait_for(lambda: losses.exists() and losses.stat().st_size > 16 * 300)
                gateway.kill()
                assert not found.done()
                gateway.start()
                done, facts = found.result(120)
            assert_same(done, native.run_job(told, blob))
            assert facts["restored"] == 0 and facts["loads"] == 0
            assert [e["step"] for e in gateway.events() if e["event"] == "job"][1] >= 300
        finally:
            gateway.kill()


def test_a_noisy_board_through_the_gateway(home: Path) -> None:
    told, blob = job(steps=20), client_data()
    with HostBoard(home, room(told), blob) as board:
        with Process(
            home, {"b": {"transport": board.transport, "noise": {"rate": 0.2, "seed": 5}}}
        ) as gateway:
            done, facts = GatewayClient(gateway.socket).ask("b", told)
        assert_same(done, native.run_job(told, blob))
        assert facts["resent"] > 5


def test_what_is_wrong_is_said_and_does_not_end_the_gateway(home: Path) -> None:
    told, blob = job(), client_data()
    with HostBoard(home, room(told), blob) as board:
        absent = {"transport": f"unix:{home / 'nobody'}", "timing": {"revival": 0.2}}
        with Process(home, {"b": {"transport": board.transport}, "absent": absent}) as gateway:
            client = GatewayClient(gateway.socket)
            with pytest.raises(InputError, match="unknown board"):
                client.run("c", told)
            with pytest.raises(BoardRefused, match="bytes of RAM"):
                client.run("b", job(width=6))
            with pytest.raises(Lost, match="did not come back"):
                client.run("absent", told)
            for lie in (
                b"",
                b"\0",
                b"\xff" * 8,
                struct.pack("<I", 12) + b"x" * 12,
                struct.pack("<I", 2**31) + b"x",
            ):
                with socket.socket(socket.AF_UNIX) as link:
                    link.connect(str(gateway.socket))
                    link.sendall(lie)
                    link.shutdown(socket.SHUT_WR)
                    link.settimeout(30)
                    with suppress(ConnectionResetError):  # it hung up before it had read all
                        while link.recv(4096):
                            pass
            with pytest.raises(InputError, match="unknown request"):
                client._request({"ask": "dance"}, {})
            assert_same(client.run("b", told), native.run_job(told, blob))


def test_nobody_waits_for_ever_for_a_gateway(home: Path) -> None:
    with pytest.raises(Lost, match="no gateway"):
        GatewayClient(home / "none", patience=0.1).run("b", job())


def test_a_second_gateway_on_the_same_journal_is_refused(home: Path) -> None:
    with Process(home, {"b": {"transport": "unix:none"}}) as gateway:
        wait_for(gateway.socket.exists)
        second = subprocess.run(
            gateway.command(), capture_output=True, text=True, timeout=60, check=False
        )
        assert second.returncode == 2 and "another gateway" in second.stderr


def test_a_gateway_ends_when_it_is_told_to_and_when_its_parent_is_gone(home: Path) -> None:
    with Process(home, {"b": {"transport": "unix:none"}}) as gateway:
        wait_for(gateway.socket.exists)
        wait_for(lambda: any(event["event"] == "listening" for event in gateway.events()))
        assert gateway.process is not None
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(30) == 0
    # A parent that starts a gateway and ends at once.
    script = (
        "import os, subprocess, sys; print(subprocess.Popen([*sys.argv[1:], "
        "str(os.getpid())], stdout=subprocess.DEVNULL).pid)"
    )
    start = [sys.executable, "-c", script, *gateway.command("--parent")]
    done = subprocess.run(
        start, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=60, check=True
    )
    wait_for(lambda: not _alive(int(done.stdout)))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("nonsense", "boards.json"),
        ("{}", "boards.json"),
        ('{"a b": {"transport": "unix:x"}}', "config"),
        ('{"../x": {"transport": "unix:x"}}', "config"),
        ('{"a": {}}', "a"),
        ('{"a": {"transport": "unix:x", "evry": 3}}', "a"),
        ('{"a": {"transport": "unix:x", "noise": {"rat": 3}}}', "a.noise"),
    ],
)
def test_a_wrong_configuration_names_the_place(home: Path, text: str, field: str) -> None:
    path = home / "boards.json"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_config(path)
    assert str(error.value.field).endswith(field)


# -- emulated boards -------------------------------------------------------------------------------


PATIENT = {"answer": 0.5, "longest": 4.0, "sample": 0.1, "patience": 30.0, "revival": 120.0}


def need(board: str) -> None:
    tools = missing_tools()
    for tool in ("ARM compiler", "unicorn" if board.startswith("unicorn") else "qemu-system-arm"):
        if tool in tools:
            pytest.skip(f"{tool} is not installed: {tools[tool]}")


@pytest.mark.parametrize(
    "name",
    [
        "unicorn:ram=20K,flash=64K,cpu=m3",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("stm32vldiscovery", "microbit", "lm3s6965evb")
        ),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("netduinoplus2", "mps2-an386", "mps2-an500")
        ),
    ],
)
def test_an_emulated_board_killed_three_times_and_its_gateway_once_over_a_noisy_line(
    home: Path, name: str
) -> None:
    need(name)
    from nestling.tiny.boards.emulator import emulator

    told, blob = job(steps=24, size=2), client_data()
    wanted = native.run_job(told, blob)
    config = {"every": 2, "noise": {"rate": 0.2, "seed": 2}, "timing": PATIENT}
    with emulator(name, blob, home / "b.sock") as board:
        gateway = Process(home, {"b": {"transport": board.transport, **config}}).start()
        try:
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(GatewayClient(gateway.socket).ask, "b", told)
                for kills, victim in enumerate((board, gateway, board, board)):
                    wait_for(
                        lambda kills=kills: found.done() or steps_noted(home) > 4 * (kills + 1), 200
                    )
                    assert not found.done()
                    victim.kill()
                    victim.start()
                assert_same(found.result(200)[0], wanted)
        finally:
            gateway.kill()

"""A device's own log speaks to its owner: one plain line for what keeps it from working, and for
the end of a run. (That a key is cloned or refused: `flower/test_processes.py`.)"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest

from nestling.fleet.care import certs, logs
from nestling.fleet.care.certs import KeyHolder
from nestling.fleet.node import joining
from nestling.fleet.node.worker import Worker
from nestling.fleet.protocol.courier import LoopCourier
from nestling.fleet.protocol.local import ask
from nestling.fleet.protocol.wire import Answer, Failed, Hello, Member, Order
from nestling.fleet.server.engine import Patience
from nestling.fleet.server.serving import enliven, play, welcome_of
from nestling.runs.assemble import assemble
from tests.fleet.loop import six, workers_of

RUN = "ab" * 8


def damage(file: Path, kind: str) -> None:
    """Makes a file of data what it must not be."""
    if kind == "missing":
        return
    write = np.savez_compressed if kind == "flipped" else np.savez
    names = ("z", "y") if kind == "other arrays" else ("x", "y")
    write(file, **{n: np.zeros((500, 8), np.float32) for n in names})  # type: ignore[operator]
    data = bytearray(file.read_bytes())
    if kind == "cut":
        del data[len(data) // 2 :]
    elif kind == "empty":
        data.clear()
    elif kind == "flipped":
        data[60:80] = bytes(20)
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", "there is no .npz file at"),
        ("empty", "cannot be read"),
        ("cut", "cannot be read"),
        ("flipped", "cannot be read"),
        ("other arrays", "it has no array x"),
    ],
)
def test_data_that_are_missing_or_damaged_end_the_device(
    kind: str, words: str, tmp_path: Path
) -> None:
    pytest.importorskip("flwr", reason="flwr is not installed (nestling[fleet])")
    damage(tmp_path / "rows.npz", kind)
    command = [sys.executable, "-m", "nestling.cli", "join", "127.0.0.1:9", "--device", "phone"]
    command += ["--data", str(tmp_path / "rows.npz"), "--folder", str(tmp_path / "device")]
    command += ["--name", "d0", "--insecure"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr
    *_, last = logs.read(tmp_path / "device/log" / logs.DEVICE_LOG)
    assert last["level"] == "error" and last["text"].startswith("--data: ")
    assert words in last["text"] and "rows.npz" in last["text"]
    assert ended.stderr.count(words) == 1 and "Traceback" not in ended.stderr


def welcome() -> bytes:
    settled, federation = assemble(six())
    return welcome_of(RUN, settled, federation)


def test_data_that_are_gone_later_are_told_the_owner_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "rows.npz"
    worker = Worker(tmp_path / "home", [Member("d0")], str(file))
    for kind, words in (("missing", "there is no .npz file"), ("flipped", "cannot be read")):
        damage(file, kind)
        caplog.clear()
        hello = Hello.from_bytes(worker.handle(welcome()))
        (line,) = caplog.messages
        assert line == f"cannot take part: {hello.error}" and words in line


def test_what_the_server_refuses_a_device_for_is_told_its_owner_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settled, federation = assemble(six())
    courier = LoopCourier({7: Worker(tmp_path, [Member("d0", device="server")]).handle})
    live = enliven(settled, federation, courier, keys={7: KeyHolder("d0", "phone")})
    live.greeter.again = 0.0
    for _ in range(4):
        live.greeter.refresh()
    (line,) = caplog.messages
    assert line.startswith("the server refuses this device: the key of 'd0' is for a 'phone'")


@pytest.mark.parametrize("full", ["before the run", "in a round"])
def test_a_full_disk_is_told_the_owner_and_the_server(full: str, tmp_path: Path) -> None:
    """A real one: a file system of a few pages, which only the worker sees."""
    home, place = tmp_path / "home", tmp_path / "socket"
    home.mkdir()
    size = "4k" if full == "before the run" else "8k"  # its token; and what it is told of the run
    mount = f'mount -t tmpfs -o size={size},mode=700 none {home} && exec "$@"'
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*enter, mount, "sh", "true"]).returncode:
        pytest.skip("no file system can be mounted here")
    words = ["--socket", str(place), "--folder", str(home), "--name", "device 0", "--client", "0"]
    command = [sys.executable, "-m", "nestling.fleet.node.worker", *words]
    said = tmp_path / "worker.log"
    letters = letters_of(tmp_path / "elsewhere")
    with open(said, "wb") as file:
        worker = subprocess.Popen([*enter, mount, "sh", *command], stdout=file, stderr=file)
    try:
        hello = Hello.from_bytes(ask(place, letters[0], 120, 120))
        if full == "in a round":
            assert not hello.error
            (result,) = Answer.from_bytes(ask(place, letters[1], 1, 120)).results
            assert isinstance(result, Failed)
            told, where = result.error, "device 0: round 1: "
        else:
            told, where = hello.error, "cannot take part: "
    finally:
        worker.kill()
        worker.wait(30)
    assert told == "this device's disk is full (No space left on device); make room"
    assert said.read_text().splitlines()[-1] == where + told


def letters_of(home: Path) -> list[bytes]:
    """The welcome and the first order that the first of six clients gets."""
    found: list[bytes] = []
    handles = {100 + c: w.handle for c, w in workers_of(home).items()}
    real = handles[100]
    handles[100] = lambda letter: (found.append(letter), real(letter))[1]
    play(LoopCourier(handles), six(rounds=1), min_clients=6, patience=Patience(poll=0.0))
    return found


def test_the_end_of_a_run_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    handles = {100 + c: w.handle for c, w in workers_of(tmp_path).items()}
    seen: list[Order] = []

    def deaf(letter: bytes) -> bytes:
        if letter[5:6] == b"O" and not Order.from_bytes(letter).jobs:
            seen.append(Order.from_bytes(letter))
            raise RuntimeError("it is switched off")
        return real(letter)

    real, handles[105] = handles[105], deaf
    with caplog.at_level(logging.INFO, "nestling.fleet"):
        result = play(
            LoopCourier(handles),
            six(rounds=2),
            min_clients=6,
            patience=Patience(poll=0.0),
            leave=60.0,
        )
    over = [line for line in caplog.messages if line.startswith("the run is over: round 2 was")]
    assert len(over) == 5 and len(seen) == 1 and result.summary["rounds_done"] == 2


def test_the_end_of_the_authority_is_told_the_owner_once_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a device that was started long before."""
    pytest.importorskip("cryptography", reason="comes with nestling[fleet]")
    keys, now = tmp_path / "keys", [0.0]
    then = datetime.now(timezone.utc) - timedelta(days=certs.AUTHORITY_DAYS)
    monkeypatch.setattr(certs, "_now", lambda: then + timedelta(days=200))
    certs.issue(keys, devices=["d0"])
    files = certs.device_files(keys, "d0")
    fresh = files.ca.read_bytes() if files.ca else b""
    monkeypatch.setattr(certs, "_now", lambda: then + timedelta(days=30))
    certs.issue(tmp_path / "old", devices=["d0"])
    old = certs.device_files(tmp_path / "old", "d0")
    assert files.ca and old.ca
    monkeypatch.setattr(joining.time, "monotonic", lambda: now[0])
    options = joining.JoinOptions("127.0.0.1", 1, "phone", "experiment", "d0", tmp_path, files)
    log = tmp_path / logs.DEVICE_LOG
    with logs.written_to(log):
        ending = joining._Ending(options)
        for hour, ca in ((0, fresh), (10, old.ca.read_bytes()), (25, None), (30, None), (50, None)):
            if ca is not None:
                files.ca.write_bytes(ca)
            now[0] = hour * 3600.0
            ending.tell()
    told = [row for row in logs.read(log) if row["event"] == "expiry"]
    assert len(told) == 2 and all(row["level"] == "warning" for row in told)
    assert "the authority that this device trusts ends in" in told[0]["text"]


def test_a_device_that_begins_tells_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="flwr is not installed (nestling[fleet])")
    then = datetime.now(timezone.utc) - timedelta(days=certs.AUTHORITY_DAYS) + timedelta(days=30)
    monkeypatch.setattr(certs, "_now", lambda: then)
    certs.issue(tmp_path / "keys", devices=["d0"])
    command = [sys.executable, "-m", "nestling.cli", "join", "127.0.0.1:9", "--device", "phone"]
    command += ["--data", str(tmp_path / "missing.npz"), "--folder", str(tmp_path / "device")]
    command += ["--certs", str(tmp_path / "keys" / "devices" / "d0")]
    subprocess.run(command, capture_output=True, timeout=120)
    rows = logs.read(tmp_path / "device/log" / logs.DEVICE_LOG)
    assert any("the authority that this device trusts ends in" in row["text"] for row in rows)

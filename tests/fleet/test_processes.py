"""Keeping processes alive: they come back, later and later; they end with their keeper, however it
ends; their logs stay small."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from nestling.errors import InputError
from nestling.fleet.care import processes
from nestling.fleet.care.processes import Keeper, Program, born
from nestling.fleet.protocol.addresses import is_loopback, join_address, parse_server
from nestling.fleet.server.server import _Follower, end_leftover
from tests.fleet.processes import until


def python(tmp_path: Path, code: str, **settings: object) -> Program:
    return Program("it", [sys.executable, "-u", "-c", code], tmp_path / "it.log", **settings)  # type: ignore[arg-type]


def test_what_ends_is_started_again_later_and_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nestling.fleet")
    code = "print('something odd [code: 7]'); raise SystemExit(3)"
    advice = {"[code: 7]": "the seventh thing"}
    with Keeper() as keeper:
        program = python(
            tmp_path, code, advice=lambda tail: next((advice[s] for s in advice if s in tail), None)
        )
        child = keeper.add(program)
        delays = []
        for _ in range(7):
            until(lambda: not child.running, 60)
            before = time.monotonic()
            keeper.tick()
            assert child.pid is None
            delays.append(child.due - before)
            child.due = 0.0
            keeper.tick()
            assert child.pid is not None
    assert all(later > 1.2 * sooner for sooner, later in pairwise(delays[:5])), delays
    assert max(delays) <= 1.2 * processes.LONGEST_DELAY + 1
    assert "it ended: the seventh thing; again in" in caplog.text
    assert (tmp_path / "it.log").read_text().count("something odd") >= 7


def test_an_end_without_advice_is_told_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "nestling.fleet")
    with Keeper() as keeper:
        child = keeper.add(python(tmp_path, "import time; time.sleep(600)"))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        until(lambda: not child.running, 60)
        keeper.tick()
    assert "it ended: killed by SIGKILL" in caplog.text


def test_what_lived_long_comes_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SETTLED", 0.0)
    with Keeper() as keeper:
        child = keeper.add(python(tmp_path, "pass"))
        until(lambda: not child.running, 60)
        keeper.tick()
        assert child.failures == 0 and child.pid is not None


def test_what_is_of_no_use_any_more_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SICK_SECONDS", 0.5)
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('Traceback'); time.sleep(600)"
    )
    with Keeper() as keeper:
        child = keeper.add(python(tmp_path, code, sick=lambda line: "Traceback" in line))
        first = child.pid

        def ended() -> bool:
            keeper.tick()
            return child.pid != first

        until(ended, 60)


def test_lines_worth_seeing_reach_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nestling.fleet")
    code = r"print('\x1b[92mINFO\x1b[0m: joined'); print('chatter')"
    with Keeper() as keeper:
        child = keeper.add(python(tmp_path, code, show=lambda line: "joined" in line))
        until(lambda: "chatter" in child.tail(), 60)
    assert "it: INFO: joined" in caplog.text and "it: chatter" not in caplog.text


def test_logs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LOG_BYTES", 10_000)
    with Keeper() as keeper:
        child = keeper.add(python(tmp_path, "for i in range(5000): print('line', i, 'x' * 50)"))
        until(lambda: "line 4999" in child.tail(), 60)
    files = sorted(tmp_path.glob("it.log*"))
    assert 1 < len(files) <= processes.LOG_FILES and all(f.stat().st_size <= 10_000 for f in files)


def test_the_deaf_are_killed_with_all_they_started(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "inner = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print('inner', inner.pid); inner.wait()"
    )
    keeper = Keeper()
    child = keeper.add(python(tmp_path, code))
    until(lambda: "inner" in child.tail(), 60)
    outer, inner = child.pid, int(child.tail().split()[-1])
    assert outer and born(outer) and born(inner)
    keeper.stop(grace=0.2)
    until(lambda: not born(outer) and not born(inner), 60)


def test_children_end_with_a_keeper_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from nestling.fleet.care.processes import Keeper, Program
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = Keeper().add(Program("it", sleep, Path({str(tmp_path / "it.log")!r})))
print(child.pid, flush=True)
time.sleep(600)
"""
    keeper = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert keeper.stdout is not None
        child = int(keeper.stdout.readline())
        assert born(child)
    finally:
        keeper.kill()
        keeper.wait(60)
    until(lambda: not born(child), 60)


def test_a_leftover_is_ended_only_if_it_is_the_same_process(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        path = tmp_path / "process.json"
        path.write_text(f'{{"pid": {process.pid}, "born": "1"}}')
        end_leftover(path, 0.2)
        assert process.poll() is None
        path.write_text(f'{{"pid": {process.pid}, "born": "{born(process.pid)}"}}')
        end_leftover(path, 0.2)
        assert process.wait(60) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait(60)


def test_following_a_file_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("old\n")
    follower = _Follower(path)
    with open(path, "a") as file:
        file.write("one\ntw")
    assert follower.new() == ["one"]
    with open(path, "a") as file:
        file.write("o\nthree\n")
    assert follower.new() == ["two", "three"] and follower.new() == []
    path.write_text("new\n")  # rotated
    assert follower.new() == ["new"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("fleet.example", ("fleet.example", 8443)),
        ("fleet.example:9000", ("fleet.example", 9000)),
        ("https://10.0.0.7:443/", ("10.0.0.7", 443)),
        ("[::1]:9000", ("::1", 9000)),
        ("::1", ("::1", 8443)),
        ("[fe80::1]", ("fe80::1", 8443)),
    ],
)
def test_addresses(text: str, found: tuple[str, int]) -> None:
    assert parse_server(text) == found


@pytest.mark.parametrize(
    "text", ["", ":8443", "host:port", "host:0", "host:70000", "host/path", "a b"]
)
def test_bad_addresses(text: str) -> None:
    with pytest.raises(InputError, match="SERVER"):
        parse_server(text)


def test_loopback_is_only_this_machine() -> None:
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]"]))
    assert not any(
        map(
            is_loopback,
            ["0.0.0.0", "::", "10.0.0.1", "localhost.example.com", "", "127.0.0.1.example"],
        )
    )
    assert join_address("::1", 1) == "[::1]:1" and join_address("a", 1) == "a:1"

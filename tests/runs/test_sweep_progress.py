"""What a person sees while a sweep goes on: one display over all of its runs, with the time left;
a plain line for each run where there is no terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from nestling.cli import progress
from nestling.cli.main import main
from nestling.cli.shared import GentleStop
from tests.shell import ROOT
from tests.small import small

ROUNDS = 3
NAMES = [f"{method}-seed{seed}" for method in ("fedavg", "heterofl") for seed in (0, 1)]
SIZE = re.compile(r"\d+(\.\d+)? (µs|ms|s|min|h)( \d+ (s|min))?")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A sweep of two methods and two seeds."""
    sweeping = {"methods": ["fedavg", "heterofl"], "seeds": 2}
    path = tmp_path / "e.toml"
    path.write_text(tomli_w.dumps({**small(rounds=ROUNDS).to_table(), "sweep": sweeping}))
    return path


def swept(file: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    words = ["nestling", "sweep", str(file), "--out", str(file.parent / "s"), "--jobs", "1"]
    monkeypatch.setattr("sys.argv", [*words, *options])
    with pytest.raises(SystemExit, match="0"):
        main()


def told_of_runs(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.partition("  ")[0] in NAMES]


def test_every_run_has_a_line_with_the_time_left(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    swept(file, monkeypatch)
    said = capsys.readouterr().out
    first = said.splitlines()
    assert first[0] == f"sweep folder: {file.parent / 's'}"
    assert first[1] == "4 runs, 0 of them done"
    runs = told_of_runs(said)
    assert [line.partition("  ")[0] for line in runs] == NAMES
    assert all(re.search(r"  global \d+\.\d%", line) for line in runs)
    left = [re.search(r"  about (.+) left$", line) for line in runs]
    assert all(found and SIZE.fullmatch(found[1]) for found in left[:-1])
    assert left[-1] is None  # nothing is left to play
    swept(file, monkeypatch)
    again = capsys.readouterr().out
    assert again.splitlines()[1] == "4 runs, 4 of them done"
    assert "left" not in "".join(told_of_runs(again))


def test_the_time_left_is_that_of_the_rounds_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A clock that is set: 4 of 12 rounds in 60 seconds, then 8 in 240."""
    clock = [100.0]
    monkeypatch.setattr("nestling.report.pace.time.monotonic", lambda: clock[0])
    with progress.sweep_watcher(tmp_path, GentleStop(), quiet=False) as watcher:
        watcher.started({"a": (4, 0), "b": (6, 2), "c": (4, 0), "d": (5, 5)})
        for name, rounds, seconds in (("a", 4, 60), ("b", 4, 180), ("c", 4, 60)):
            for _ in range(rounds):
                watcher.round(name, {"global_score": 0.5})
            clock[0] += seconds
            watcher.ended(name, "")
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [
        "4 runs, 1 of them done",
        "a  global 50.0%  about 2 min left",
        "b  global 50.0%  about 2 min left",
        "c  global 50.0%",
    ]


def test_a_run_that_fails_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("nestling.report.pace.time.monotonic", lambda: clock[0])
    with progress.sweep_watcher(tmp_path, GentleStop(), quiet=False) as watcher:
        watcher.started({"a": (2, 0), "b": (50, 0), "c": (2, 0)})
        watcher.ended("b", "no such file")
        for _ in range(2):
            watcher.round("a", {})
        clock[0] = 10.0
        watcher.ended("a", "")
    said = capsys.readouterr().out
    assert "b failed: no such file" in said and "about 10 s left" in said


def on_a_terminal(words: list[str], folder: Path) -> str:
    """What a command shows on a terminal, which must end well."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "nestling", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "140"},
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # Linux says so when nobody writes any more
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert process.wait(60) == 0, shown.decode()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).replace("\r", "\n")


def test_a_terminal_has_one_bar_with_the_time_left(file: Path) -> None:
    seen = on_a_terminal(["sweep", str(file), "--out", "s", "--jobs", "1"], file.parent)
    assert [line.partition("  ")[0] for line in told_of_runs(seen)] == NAMES
    total = len(NAMES) * ROUNDS
    bars = re.findall(rf"^rounds .* (\d+)/{total} (.*) left (\S+)", seen, re.MULTILINE)
    counts = [int(done) for done, _, _ in bars]
    assert counts == sorted(counts) and counts[-1] == total
    assert re.match(r"heterofl-seed1 global \d+\.\d%", bars[-1][1])
    assert all(re.fullmatch(r"-:--:--|\d+:\d\d:\d\d", left) for _, _, left in bars)
    assert any(re.fullmatch(r"\d+:\d\d:\d\d", left) for _, _, left in bars)


def test_a_quiet_sweep_shows_none(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    swept(file, monkeypatch, "--quiet")
    said = capsys.readouterr().out
    assert told_of_runs(said) == [] and "sweep folder" not in said

"""Nothing is lost on a crash: a run that was killed and resumed equals one that was not, bit for
bit."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import nestling
from nestling import EngineConfig
from nestling.methods import METHODS
from tests.small import small


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "global.safetensors").read_bytes()).hexdigest()


def start(experiment: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "nestling.cli",
        "run",
        str(experiment),
        "--out",
        str(out),
        "--quiet",
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.mark.parametrize("engine", ["inline", "pool"])
def test_kill_at_a_random_moment_then_resume(tmp_path: Path, engine: str) -> None:
    experiment = small("shared-distill", rounds=12, engine=EngineConfig(engine, 2))
    whole = nestling.run(experiment, out=tmp_path / "whole")
    (tmp_path / "e.toml").write_text(experiment.to_toml())
    process = start(tmp_path / "e.toml", tmp_path / "killed")
    metrics = tmp_path / "killed" / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 120
        while (
            time.monotonic() < deadline
            and process.poll() is None
            and not (metrics.exists() and metrics.stat().st_size > 100)
        ):
            time.sleep(0.02)
        time.sleep(random.uniform(0, 1.0))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert metrics.exists(), process.stderr and process.stderr.read()
    resumed = nestling.resume(tmp_path / "killed")
    assert resumed.summary["rounds_done"] == 12
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")
    rows = [[r["global_score"] for r in result.metrics] for result in (whole, resumed)]
    assert rows[0] == rows[1]
    assert [json.loads(line)["round"] for line in metrics.read_text().splitlines()] == list(
        range(1, 13)
    )


@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_on_where_it_stood(tmp_path: Path, method: str) -> None:
    """Stopped after two rounds and gone on to four, against four in one go: same models, same
    totals."""
    nestling.run(small(method, rounds=2), out=tmp_path / "parts")
    parts = nestling.resume(tmp_path / "parts", overrides=("rounds=4",))
    whole = nestling.run(small(method, rounds=4), out=tmp_path / "whole")
    a, b = parts.federation, whole.federation
    assert a.totals == b.totals
    for client in range(4):
        ours, theirs = (f.method.model_for(f.world.device(client)).state for f in (a, b))
        assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert [r["personal_score"] for r in parts.metrics] == [
        r["personal_score"] for r in whole.metrics
    ]


def test_the_same_command_twice_gives_the_same_file(tmp_path: Path) -> None:
    nestling.run(small(), out=tmp_path / "a")
    nestling.run(small(engine=EngineConfig("pool", 2)), out=tmp_path / "b")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    nestling.run(small(seed=1), out=tmp_path / "c")
    assert digest(tmp_path / "a") != digest(tmp_path / "c")


def test_a_run_that_fails_before_its_first_round_leaves_nothing(tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        nestling.run(small(), out=tmp_path / "run", watcher=nestling.Watcher(started=stop))
    assert not (tmp_path / "run").exists()


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    """What a kill at that moment leaves: the folder with its first files and no checkpoint."""
    whole = nestling.run(small(), out=tmp_path / "whole")
    (tmp_path / "killed").mkdir()
    for name in ("experiment.toml", "federation.json"):
        (tmp_path / "killed" / name).write_bytes((tmp_path / "whole" / name).read_bytes())
    assert (
        nestling.resume(tmp_path / "killed").summary["rounds_done"] == whole.summary["rounds_done"]
    )
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    inner: list[str] = []

    def again(*_: object) -> None:
        with pytest.raises(nestling.InputError, match="another process"):
            nestling.resume(tmp_path / "run")
        inner.append("refused")

    nestling.run(small(rounds=1), out=tmp_path / "run", watcher=nestling.Watcher(round=again))
    assert inner == ["refused"]

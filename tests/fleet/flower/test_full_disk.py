"""A server whose disk is full stops politely and goes on once there is room: on a small real file
system."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (nestling[fleet])")

from nestling import Evaluation, FleetConfig, Tier
from nestling.fleet.care import logs
from nestling.fleet.care.processes import free_port
from nestling.fleet.flower import InProcessGrid, client_app
from nestling.fleet.flower.hosting import _played
from nestling.fleet.server import server as serving
from nestling.runs import checkpoint
from tests.fleet.flower.test_fleet import flat
from tests.fleet.flower.wire_device import honest
from tests.fleet.loop import plain, same, six, state_of
from tests.fleet.processes import fleet

TIERS = (Tier(name="board", ratio=0.25, count=1),)
MEGABYTES, STEP = 96, 20_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path, left: int) -> Path:
    """Fills a file system up to so many bytes."""
    ballast = disk / "ballast"
    with open(ballast, "wb") as file:
        while (free := _free(disk) - left) > 0:
            try:
                file.write(b"\0" * min(free, 2**16))
                file.flush()
            except OSError:
                break
    return ballast


def _free(disk: Path) -> int:
    return shutil.disk_usage(disk).free


def rows_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_below_the_floor_no_round_begins_until_there_is_room(disk: Path) -> None:
    experiment = six(fleet=FleetConfig(tiers=TIERS), rounds=4, evaluate=Evaluation(clients=1))
    with fleet(disk) as made:
        made.keys("d0")
        port = free_port()
        words = ("--health", f"127.0.0.1:{port}", "--disk-floor", "20")
        server = made.start_server(experiment, "run", *words)
        server.wait_for("listening on")

        def health() -> dict[str, Any]:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as told:
                    return dict(json.loads(told.read()))
            except urllib.error.HTTPError as error:
                return dict(json.loads(error.read()))

        assert health()["disk"]["free"] > health()["disk"]["floor"] == 20_000_000
        with honest(made, "d0", 0):
            server.wait_for("round 1: ")
            ballast = fill(disk, 8_000_000)
            server.wait_for("disk full: ")
            told = health()
            assert told["state"] == "stalled" and told["reason"].startswith("disk full: ")
            time.sleep(3)  # for the round under way
            stood = len(rows_of(server.out))
            time.sleep(15)  # more than a round takes
            assert len(rows_of(server.out)) == stood < 4
            assert checkpoint.load(server.out) is not None
            ballast.unlink()
            server.wait_done()
        assert [row["round"] for row in rows_of(server.out)] == [1, 2, 3, 4]
        said = [row["text"] for row in logs.read(server.out / logs.SERVER_LOG, last=1000)]
        assert sum(text.startswith("disk full: ") for text in said) == 1
        assert sum("there is room on the disk again" in text for text in said) == 1


def test_whatever_write_does_not_fit_the_run_stands_whole_and_goes_on(
    disk: Path, tmp_path: Path
) -> None:
    experiment = six("shared-average")
    (tmp_path / "experiment.toml").write_text(experiment.to_toml())
    settings = {
        "experiment": str(tmp_path / "experiment.toml"),
        "folder": str(disk / "run"),
        "min_clients": 6,
        "deadline": 60.0,
        "quorum": 0,
        "registered": None,
        "disk_floor": 0,
    }
    grid = InProcessGrid(client_app(folder=tmp_path / "devices"), 6)
    ended, left = [], 0
    while "done" not in ended and left < 50 * STEP:
        ballast = fill(disk, left)
        outcome = _played(grid, settings, tmp_path)
        ballast.unlink()
        ended.append(outcome["state"])
        names = [path.name for path in disk.rglob("*") if path.is_file()]
        assert not [name for name in names if name.startswith(".")], names
        assert all(
            path.read_text().endswith("}\n")
            for path in disk.rglob("metrics.jsonl")
            if path.stat().st_size
        )
        left += STEP
    assert ended.count("disk") == len(ended) - 1 > 2, ended
    saved = checkpoint.load(disk / "run")
    assert saved is not None and saved[1].round == 3
    assert same(flat(saved[0]), state_of(plain("shared-average")[0]))


def test_a_server_does_not_give_up_on_a_full_disk(tmp_path: Path) -> None:
    started: list[Any] = []

    def flwr(calls: Any) -> Iterator[dict[str, Any]]:
        started.append(calls)
        yield {"success": True, "run-id": 1}

    run = serving._Run(tmp_path / "run", tmp_path, flwr)
    for _ in range(2 * serving.GIVE_UP):
        run.due = 0.0
        assert run.tick() is None
        (tmp_path / serving.OUTCOME).write_text(json.dumps({"state": "disk", "text": "disk full"}))
        assert run.tick() is None and run.trouble == "disk full"
    run.due, run.held, begun = 0.0, "disk full", len(started)
    assert run.tick() is None and len(started) == begun == 2 * serving.GIVE_UP
    run.held = ""
    assert run.tick() is None and len(started) == begun + 1

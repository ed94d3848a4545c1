"""Federations whose small clients are emulated boards: they train to the bit what the same C trains
on this machine, whoever dies on the way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nestling
from nestling import (
    EngineConfig,
    Evaluation,
    Experiment,
    FleetConfig,
    Named,
    SplitConfig,
    Tier,
    Train,
)
from nestling.engines import ClientError
from nestling.engines.boards import Boards
from nestling.errors import InputError
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.runs.loop import play
from nestling.tiny import lab
from nestling.tiny.lab import Lab, LabSettings
from nestling.tiny.runtime import toolchain

EXAMPLE = Path(__file__).parents[2] / "examples" / "microcontrollers.toml"


def _lacking(*tools: str) -> str:
    found = [
        f"{tool} is not installed: {how}"
        for tool, how in toolchain.missing_tools().items()
        if tool in tools
    ]
    return "; ".join(found)


needs_qemu = pytest.mark.skipif(
    bool(_lacking("C compiler", "ARM compiler", "qemu-system-arm")),
    reason=_lacking("C compiler", "ARM compiler", "qemu-system-arm") or "-",
)
needs_unicorn = pytest.mark.skipif(
    bool(_lacking("C compiler", "ARM compiler", "unicorn")),
    reason=_lacking("C compiler", "ARM compiler", "unicorn") or "-",
)
SMALL = (
    Tier(board="stm32vldiscovery", count=1),
    Tier(board="microbit", count=1),
    Tier(board="mps2-an386", count=1),
    Tier(name="simulated", ratio=1.0, count=2),
)


def experiment(tiers: tuple[Tier, ...] = SMALL, **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "method": "shared-average",
        "rounds": 2,
        "participants": 0,
        "data": "mnist12k-8x8",
        "model": Named("tinycnn", {"channels": [8, 16], "norm": "none"}),
        "fleet": FleetConfig(tiers=tiers),
        "split": SplitConfig(alpha=5.0, size=60, public=0.0),
        "train": Train(epochs=1, batch=10, lr=0.05, momentum=0.9, augment="shift"),
        "engine": EngineConfig("inline"),
        "evaluate": Evaluation(every=100, clients=2),
    }
    return Experiment(**{**settings, **changes})


def on_host(wanted: Experiment) -> Experiment:
    """The same run in which every board is the host's build of the C runtime."""
    settled = assemble(wanted)[0]
    tiers = tuple(
        replace(tier, board="host") if tier.board else tier for tier in settled.fleet.tiers
    )
    return settled.with_changes(fleet=replace(settled.fleet, tiers=tiers))


def final(federation: Federation) -> dict[str, torch.Tensor]:
    return {
        f"{kind}/{n}": t
        for kind, part in federation.method.state().items()
        for n, t in part.items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and bool(a) and all(torch.equal(a[k], b[k]) for k in a)


@contextmanager
def opened(
    wanted: Experiment, home: Path | None = None, **settings: Any
) -> Iterator[tuple[Federation, Boards, Lab]]:
    """A federation ready to be played, its lab in sight."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    settled, federation = assemble(wanted)
    engine = federation.engine
    assert isinstance(engine, Boards) and engine.lab is not None
    engine.lab.settings, engine.lab.home = LabSettings(**settings), home
    try:
        engine.open(settled.make_method(), site_of(federation))
        yield federation, engine, engine.lab
    finally:
        torch.set_num_threads(before)
        engine.close()


@needs_qemu
def test_boards_of_a_federation_give_the_bits_of_the_host(tmp_path: Path) -> None:
    result = nestling.run(experiment(), out=tmp_path / "run")
    hosted = nestling.run(on_host(experiment()))
    assert same(final(result.federation), final(hosted.federation))
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "boards.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 6 and all(
        row["verified"] and row["ram"] <= row["ram_there"] and row["steps"] == 6 for row in rows
    )
    assert {row["board"] for row in rows} == {"stm32vldiscovery", "microbit", "mps2-an386"}
    assert {row["round"] for row in rows} == {1, 2}
    assert all(
        row["instructions"] > 1000 * row["samples"] and row["estimated_seconds"] > 0 for row in rows
    )
    page = (tmp_path / "run" / "report.html").read_text()
    assert (
        "3 boards ran the firmware and did 6 jobs" in page
        and "6 of the answers were compared" in page
    )
    told = json.loads((tmp_path / "run" / "federation.json").read_text())
    assert {tier["name"]: tier["board"] for tier in told["tiers"]}["microbit"] == "microbit"
    assert not (tmp_path / "run" / "boards" / "pids.json").exists(), (
        "the processes are gone, and so is their list"
    )


@needs_qemu
def test_every_process_ends_with_the_engine() -> None:
    with opened(experiment(rounds=1)) as (federation, _, found):
        list(play(federation))
        pids = [board.pid for board in found.boards.values()]
        assert found.gateway is not None
        pids.append(found.gateway.pid)
        assert len(pids) == 4 and all(_alive(pid) for pid in pids)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@needs_qemu
def test_a_fifth_of_all_frames_spoilt() -> None:
    wanted = experiment(
        (Tier(board="microbit", count=1), Tier(board="mps2-an386", ratio=0.5, count=1)), rounds=1
    )
    with opened(wanted, noise=0.2) as (federation, _, _):
        facts: list[Mapping[str, Any]] = []
        federation.on_board = facts.append
        list(play(federation))
        assert sum(fact["resent"] for fact in facts) > 0
        assert same(final(federation), final(nestling.run(on_host(wanted)).federation))


class Killer:
    """Kills a board or the gateway with SIGKILL in the middle of a client's jobs, so many times in
    all."""

    def __init__(self, found: Lab, client: int, name: str, times: int, after: float) -> None:
        self.done, self._lab, self._client, self._name, self._times, self._after = (
            0,
            found,
            client,
            name,
            times,
            after,
        )
        self._run, self._jobs = found.run, 0
        found.run = self._watched  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._hunt, daemon=True)
        self._thread.start()

    def _watched(self, client: int, *arguments: Any) -> lab.Report:
        self._jobs += client == self._client
        try:
            return self._run(client, *arguments)
        finally:
            self._jobs -= client == self._client

    def _hunt(self) -> None:
        while self.done < self._times:
            time.sleep(self._after)
            pid = self._pid() if self._jobs else None
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                self.done += 1
                while self._lab.deaths.get(self._name, 0) < self.done:
                    time.sleep(0.01)

    def _pid(self) -> int | None:
        if self._name == "gateway":
            return self._lab.gateway.pid if self._lab.gateway is not None else None
        board = self._lab.boards.get(self._client)
        return board.pid if board is not None and board.alive else None


LONG = {"split": SplitConfig(alpha=5.0, size=200, public=0.0), "rounds": 2}


@needs_qemu
def test_boards_and_gateway_killed_on_the_way(tmp_path: Path) -> None:
    wanted = experiment((Tier(board="microbit", count=2),), **LONG)
    with opened(wanted, tmp_path / "home", every=4) as (federation, _, found):
        client = next(iter(found.names))
        boards = Killer(found, client, str(client), times=3, after=0.4)
        gateway = Killer(found, client, "gateway", times=1, after=0.7)
        list(play(federation))
        assert boards.done == 3 and gateway.done == 1
        assert sum(found.deaths.values()) == 4 and found.deaths["gateway"] == 1
        assert same(final(federation), final(nestling.run(on_host(wanted)).federation))


@needs_unicorn
def test_boards_that_exist_nowhere() -> None:
    """Any map of memory, in Unicorn; installed by pip alone."""
    wanted = experiment(
        (Tier(name="odd", board="unicorn:ram=12K,flash=96K,cpu=m4", ratio=0.5, count=1),), rounds=1
    )
    with opened(wanted) as (federation, _, _):
        facts: list[Mapping[str, Any]] = []
        federation.on_board = facts.append
        list(play(federation))
        assert [fact["ram_there"] for fact in facts] == [12 * 1024]
        assert same(final(federation), final(nestling.run(on_host(wanted)).federation))


@needs_qemu
def test_a_part_that_is_too_large_for_the_board_is_refused() -> None:
    with pytest.raises(InputError) as error:
        nestling.run(experiment((Tier(board="stm32vldiscovery", ratio=1.0, count=1),), rounds=1))
    assert error.value.field == "fleet.tiers[0].board"
    assert re.search(
        r"client 0 on stm32vldiscovery: the plan needs \d+ of 8192 bytes", error.value.message
    )


@needs_qemu
def test_an_answer_that_differs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    right = lab.native.run_job

    def wrong(job: Any, blob: bytes) -> Any:
        done = right(job, blob)
        done.weights[0] += 1e-3
        return done

    monkeypatch.setattr(lab.native, "run_job", wrong)
    with pytest.raises(
        ClientError, match=r"client 0 failed in round 1: Mismatch: 1 of \d+ weights differ"
    ):
        nestling.run(experiment((Tier(board="microbit", count=1),), rounds=1))
    quiet = EngineConfig("inline", verify_boards=False)
    assert (
        nestling.run(
            experiment((Tier(board="microbit", count=1),), rounds=1, engine=quiet)
        ).summary["rounds_done"]
        == 1
    )


@needs_qemu
@pytest.mark.slow
def test_a_killed_run_is_resumed(tmp_path: Path) -> None:
    wanted = experiment(
        (Tier(board="microbit", count=2), Tier(name="simulated", ratio=1.0, count=1)),
        **{**LONG, "rounds": 4},
    )
    (tmp_path / "run.toml").write_text(wanted.to_toml())
    command = [
        sys.executable,
        "-m",
        "nestling.cli",
        "run",
        str(tmp_path / "run.toml"),
        "--out",
        str(tmp_path / "run"),
        "--quiet",
    ]
    process = subprocess.Popen(command, cwd=tmp_path)
    try:
        _wait_for(lambda: len(_lines(tmp_path / "run" / "metrics.jsonl")) >= 2, process)
        pids = json.loads((tmp_path / "run" / "boards" / "pids.json").read_text())
    finally:
        process.kill()
        process.wait()
    assert len(pids) == 3
    until = time.monotonic() + 20
    while any(_alive(pid) for pid in pids.values()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in pids.values()), "a board outlived its run"
    resumed = nestling.resume(tmp_path / "run")
    assert resumed.summary["rounds_done"] == 4
    assert same(final(resumed.federation), final(nestling.run(on_host(wanted)).federation))
    rounds = [row["round"] for row in resumed_rows(tmp_path / "run")]
    assert sorted(rounds) == [1, 1, 2, 2, 3, 3, 4, 4]


def resumed_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _lines(folder / "boards.jsonl")]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _wait_for(happened: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 300
    while not happened():
        assert process.poll() is None, "the run ended"
        assert time.monotonic() < until
        time.sleep(0.05)


@needs_qemu
@pytest.mark.minutes
def test_the_example(tmp_path: Path) -> None:
    """Seven boards of six kinds beside simulated devices: as good as the simulation, and bit for
    bit the host's build."""
    wanted = Experiment.read(EXAMPLE)
    boards = [tier for tier in wanted.fleet.tiers if tier.board]
    assert (
        sum(tier.count for tier in boards) >= 6
        and len({tier.board for tier in boards}) >= 5
        and wanted.rounds >= 5
    )
    result = nestling.run(wanted, out=tmp_path / "run")
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "boards.jsonl").read_text().splitlines()
    ]
    assert len(rows) == wanted.rounds * sum(tier.count for tier in boards) and all(
        row["verified"] for row in rows
    )
    assert {row["ram_there"] for row in rows} == {k * 1024 for k in (8, 16, 64, 128, 256, 512)}
    hosted = nestling.run(on_host(wanted))
    assert same(final(result.federation), final(hosted.federation))
    settled = assemble(wanted)[0]
    tiers = tuple(replace(tier, board="") for tier in settled.fleet.tiers)
    simulated = nestling.run(settled.with_changes(fleet=replace(settled.fleet, tiers=tiers)))
    accuracies = [m["global_score"] for m in result.metrics]
    assert accuracies[-1] > accuracies[0] + 0.1
    assert accuracies[-1] == pytest.approx(simulated.summary["global_score"]["last"], abs=0.01)

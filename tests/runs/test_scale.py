"""State costs what is used: a large fleet costs what its sampled clients cost."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from benchmarks.million_devices import experiment
from nestling.runs.assemble import assemble, site_of
from nestling.runs.loop import play

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "million_devices.py"
SMALL, LARGE = 10_000, 1_000_000


def peak(run: str, size: int) -> float:
    """Peak memory of a run in a process of its own, in MB."""
    command = [
        sys.executable,
        str(SCRIPT),
        "--one",
        run,
        "--large",
        str(size),
        "--rounds",
        "3",
        "--participants",
        "200",
    ]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(found.stdout.splitlines()[-1])["megabytes"])


@pytest.mark.parametrize("run", ["heterofl", "local, run folder"])
def test_a_million_devices_cost_no_more_memory_than_ten_thousand(run: str) -> None:
    small, large = (peak(run, size) for size in (SMALL, LARGE))
    assert large < 1.2 * small


def second_round(method: str, size: int) -> tuple[Counter[str], int]:
    """What the second round of a fleet calls, and the most bytes that Python and NumPy take up in
    it."""
    settled, federation = assemble(experiment(method, size, rounds=3, participants=50))
    federation.engine.open(settled.make_method(), site_of(federation))
    rounds = play(federation)
    next(rounds)  # first uses aside
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1
        elif event == "c_call":
            calls[argument.__qualname__] += 1

    tracemalloc.start()
    sys.setprofile(count)
    try:
        next(rounds)
    finally:
        sys.setprofile(None)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        federation.engine.close()
    return calls, most


@pytest.mark.parametrize("method", ["heterofl", "local"])
def test_the_work_of_a_round_does_not_grow_with_the_fleet(method: str) -> None:
    (small, small_bytes), (large, large_bytes) = (
        second_round(method, size) for size in (SMALL, LARGE)
    )
    assert small.total() > 50 * 20, "the count means something"
    assert large.total() < 1.05 * small.total()
    grown = {
        name: (small[name], calls) for name, calls in large.items() if calls > 2 * small[name] + 50
    }
    assert not grown
    assert large_bytes < small_bytes + 100_000

"""A server and its nodes that die together at any step, and start again, end as if nothing had
been. (`test_faults` has them die one at a time, and letters that get lost.)"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.fleet.loop import bits, state_of
from tests.fleet.storm import CLIENTS, ROUNDS, Storm, memory_at, reference, served
from tests.runs.crash_points import EVERY, Steps, in_child

METHODS = ("fedproto", "shared-average", "fedmd")
SLICE = 101
"""Of the points of a method, every so-manieth is tried in `make test`."""


def played(method: str, home: Path) -> dict[str, Any]:
    """The run in this process, begun or gone on with, and how it ended."""
    result, _ = served(Storm(home, {}), method, home / "run", most=1)
    rows = [(row["round"], row["loss"], row["missed"]) for row in result.metrics]
    kept = [memory_at(home / f"device-{client}", client, ROUNDS) for client in range(CLIENTS)]
    return ended(state_of(result.federation), kept, rows)


def ended(state: dict[str, Tensor], kept: list[Any], rows: list[Any]) -> dict[str, Any]:
    """The end of a run in a form that a file takes."""
    return json.loads(json.dumps([digest(state), [digest(one) for one in kept], rows]))


def digest(table: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(table):
        found.update(f"{name} {table[name].dtype} {tuple(table[name].shape)}".encode())
        found.update(bits(table[name]).tobytes())
    return found.hexdigest()


def undisturbed(method: str, home: Path) -> tuple[Any, int]:
    """How the run in one process ends, and how many steps a server and its nodes take for it."""
    there = reference(method)
    rows = [(row["round"], row["loss"], []) for row in there.rows]
    wanted = ended(there.state, there.kept, rows)
    (home / "whole").mkdir()

    def count() -> None:
        steps = Steps(home / "whole")
        steps.watch()
        found = played(method, home / "whole")
        (home / "end").write_text(json.dumps([found, len(steps.names)]))

    assert in_child(count)
    found, steps = json.loads((home / "end").read_text())
    assert found == wanted
    return wanted, steps


def tried(method: str, home: Path, wanted: Any, point: int) -> None:
    """Everything killed at a point, and started again."""
    place = home / str(point)
    place.mkdir()

    def killed() -> None:
        Steps(place, point).watch()
        played(method, place)

    def again() -> None:
        (home / "end").write_text(json.dumps(played(method, place)))

    assert not in_child(killed), "it was not killed"
    assert in_child(again)
    assert json.loads((home / "end").read_text()) == wanted, point


@pytest.mark.parametrize("method", METHODS)
def test_a_fleet_killed_at_some_of_its_steps_goes_on(method: str, tmp_path: Path) -> None:
    wanted, steps = undisturbed(method, tmp_path)
    for point in range(5 + METHODS.index(method), steps + 1, SLICE):
        tried(method, tmp_path, wanted, point)


@pytest.mark.minutes
@pytest.mark.parametrize("method", METHODS)
def test_a_fleet_killed_all_along_goes_on(method: str, tmp_path: Path) -> None:
    wanted, steps = undisturbed(method, tmp_path)
    for point in range(1, steps + 1, EVERY):
        tried(method, tmp_path, wanted, point)
    print(f"{method}: {steps} points")


def test_clocks_that_jump_by_a_day_do_a_fleet_no_harm(tmp_path: Path) -> None:
    """The server's and the nodes' alike, forwards and backwards, from one look to the next."""
    wanted, _ = undisturbed("fedproto", tmp_path)

    def jumping() -> None:
        true, jumps = time.time, itertools.cycle((0, 86400, -86400))
        time.time = lambda: true() + next(jumps)
        (tmp_path / "end").write_text(json.dumps(played("fedproto", tmp_path / "jumping")))

    (tmp_path / "jumping").mkdir()
    assert in_child(jumping)
    assert json.loads((tmp_path / "end").read_text()) == wanted

"""A thousand crash points: a run killed at a step, gone on with, and compared bit for bit.

    python benchmarks/crash_points.py --points 1000 [--first 0] [--only server]

The points are those of the tests (`tests/runs`, `tests/fleet`), in five groups that get equal
shares, or all they have, each spread evenly: a gateway, killed at a step of an order; a node alone,
at a step of its work for a letter; the server alone, cut off at a letter or a file; the simulator,
killed at every write, flush, rename and part of a round; a server and its nodes, killed together.
What is compared is all that a run leaves: models, metrics, what clients keep; of a gateway its
answers and what its clients keep.

"Killed" is SIGKILL of a process of its own, in whose middle of a write it may come. A node alone
and a server alone end by an exception instead, raised at a letter, at a file that is put in its
place (`os.replace`) or at a flush of what clients keep: there `finally` blocks still run, as they
do not in a process that is killed. What such blocks do is tried by the groups that kill both.

`--first` moves every point on by so many, so that another run
tries others. Prints a line a kind of run; the last line says how many points were played and how
many did not end the same. Exit code 1 where any did not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fleet import test_crash_points as together
from tests.fleet import test_faults as faults
from tests.fleet import test_gateway_crash_points as behind
from tests.fleet.storm import CLIENTS, Fate, Storm
from tests.runs import test_crash_points as alone


@dataclass(frozen=True)
class Kind:
    """A kind of run that is killed: how many points it has, and how one is played, which says
    whether anything was killed there. `ready` may be slow."""

    name: str
    ready: Callable[[Path], tuple[int, Callable[[int], bool]]]


def simulator(name: str) -> Kind:
    def ready(home: Path) -> tuple[int, Callable[[int], bool]]:
        case = alone.CASES[name]
        wanted, steps = alone.undisturbed(case, home)

        def played(point: int) -> bool:
            alone.tried(case, home, wanted, point)
            return True

        return len(steps), played

    return Kind(f"simulator, {name}", ready)


def server_and_nodes(method: str) -> Kind:
    def ready(home: Path) -> tuple[int, Callable[[int], bool]]:
        wanted, steps = together.undisturbed(method, home)

        def played(point: int) -> bool:
            together.tried(method, home, wanted, point)
            return True

        return steps, played

    return Kind(f"server and nodes, {method}", ready)


def gateway(method: str) -> Kind:
    def ready(home: Path) -> tuple[int, Callable[[int], bool]]:
        case, wanted, steps = behind.undisturbed(method, home)

        def played(point: int) -> bool:
            behind.tried(case, home, wanted, point)
            return True

        return steps, played

    return Kind(f"gateway, {method}", ready)


def server(method: str) -> Kind:
    def ready(home: Path) -> tuple[int, Callable[[int], bool]]:
        _, calm = faults.stormy(method, {})

        def played(point: int) -> bool:
            missed, storm = faults.stormy(method, {}, [point])
            assert not missed, missed
            return storm.restarts == 1

        return calm.steps, played

    return Kind(f"server, {method}", ready)


def node(method: str) -> Kind:
    """Points of all letters of all clients, one after another; a letter has as many as its work has
    steps."""

    def ready(home: Path) -> tuple[int, Callable[[int], bool]]:
        places = [
            (client, letter, step)
            for (client, letter), count in sorted(_steps(method).items())
            for step in range(count)
        ]

        def played(point: int) -> bool:
            client, letter, step = places[point - 1]
            with _births() as born:
                faults.stormy(method, {(client, letter): Fate("killed", step)})
            return len(born) > CLIENTS  # somebody was started again

        return len(places), played

    return Kind(f"node, {method}", ready)


def _steps(method: str) -> Counter[tuple[int, int]]:
    """How many steps workers take, by client and the number of its letter."""
    found: Counter[tuple[int, int]] = Counter()
    counted = Storm.step

    def step(storm: Storm) -> None:
        if storm._inside is None:
            counted(storm)
        else:
            found[storm._inside, storm.count[storm._inside]] += 1

    Storm.step = step  # type: ignore[method-assign]
    try:
        faults.stormy(method, {})
    finally:
        Storm.step = counted  # type: ignore[method-assign]
    return found


@contextmanager
def _births() -> Iterator[list[int]]:
    """The clients whose workers were started."""
    born: list[int] = []
    started = Storm._started

    def noted(storm: Storm, client: int) -> Any:
        born.append(client)
        return started(storm, client)

    Storm._started = noted  # type: ignore[method-assign]
    try:
        yield born
    finally:
        Storm._started = started  # type: ignore[method-assign]


GROUPS: dict[str, list[Kind]] = {
    "gateway": [gateway(method) for method in behind.METHODS],
    "node": [node(method) for method in faults.METHODS],
    "server": [server(method) for method in faults.METHODS],
    "simulator": [simulator(name) for name in alone.CASES],
    "both": [server_and_nodes(method) for method in together.METHODS],
}
"""Those with the fewest points first: what they lack the others play."""


def spread(count: int, wanted: int, first: int) -> list[int]:
    """`wanted` of the points 1 … count, evenly; all of them where there are no more."""
    if wanted >= count:
        return list(range(1, count + 1))
    return sorted({1 + (first + k * count // wanted) % count for k in range(wanted)})


def play(kind: Kind, wanted: int, first: int) -> tuple[int, int]:
    """Plays points of a kind of run; how many were played, and how many did not end the same."""
    played = bad = 0
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        count, one = kind.ready(Path(folder))
        for point in spread(count, wanted, first):
            try:
                played += one(point)
            except Exception:  # whatever it is, it is the finding
                played, bad = played + 1, bad + 1
                print(f"{kind.name}: point {point} did not end the same", flush=True)
                traceback.print_exc()
    seconds = time.monotonic() - begun
    print(
        f"{kind.name}: {played} of {count} points, {bad} not the same, {seconds:.0f} s", flush=True
    )
    return played, bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--points", type=int, default=1000, help="how many in all")
    parser.add_argument("--first", type=int, default=0, help="move every point on by so many")
    parser.add_argument("--only", choices=tuple(GROUPS), help="one group of them")
    told = parser.parse_args()
    torch.set_num_threads(1)  # a sum split over threads is rounded differently
    groups = {told.only: GROUPS[told.only]} if told.only else GROUPS
    total = bad = 0
    kinds = [(kind, len(groups) * len(own)) for own in groups.values() for kind in own]
    for number, (kind, parts) in enumerate(kinds):
        share = -(-told.points // parts)
        left = len(kinds) - number
        # What a kind has too few of, those after it play more of.
        share = max(share, -(-(told.points - total) // left) if total < told.points else 0)
        played, wrong = play(kind, share, told.first)
        total, bad = total + played, bad + wrong
    print(f"{total} crash points, {bad} of them did not end the same")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

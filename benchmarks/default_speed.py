"""How long the default experiment takes here and in another checkout: `nestling run` without
arguments.

    python benchmarks/default_speed.py OTHER_CHECKOUT [--rounds 30] [--turns 2]

The two take turns, each run in a process of its own that imports its own checkout and writes a run
folder. Prints a Markdown table with the seconds of each run from start to end (imports, worker
processes and report included), the share of them that are its rounds, and the accuracies it ended
with; last how many times as fast this checkout is, by the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Run:
    """One run: seconds in all and in rounds, the global and the personal accuracy at its end."""

    seconds: float
    in_rounds: float
    accuracy: float
    personal: float


def run(checkout: Path, rounds: int) -> Run:
    """The default experiment of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "nestling.cli",
            "run",
            "--json",
            "--out",
            str(out),
            "--set",
            f"rounds={rounds}",
        ]
        began = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        seconds = time.perf_counter() - began
    *played, summary = [json.loads(line) for line in done.stdout.splitlines()]
    last = {key: summary[key]["last"] for key in ("global_score", "personal_score")}
    return Run(
        seconds,
        sum(row["seconds"] for row in played),
        last["global_score"],
        last["personal_score"],
    )


def row(turn: int, name: str, found: Run) -> str:
    accuracies = f"{100 * found.accuracy:.2f} % | {100 * found.personal:.2f} %"
    return f"| {turn} | {name} | {found.seconds:.1f} | {found.in_rounds:.1f} | {accuracies} |"


def main(other: Path, rounds: int, turns: int) -> None:
    checkouts = {"other": other.resolve(), "this": HERE}
    print(
        f"{rounds} rounds; other: {checkouts['other']}, this: {HERE}; load "
        f"{os.getloadavg()[0]:.1f}\n"
    )
    print(
        "| turn | checkout | seconds | in rounds | accuracy | personal |\n|---|---|---|---|---|---|"
    )
    found: dict[str, list[Run]] = {name: [] for name in checkouts}
    for turn in range(1, turns + 1):
        for name, checkout in checkouts.items():
            found[name].append(run(checkout, rounds))
            print(row(turn, name, found[name][-1]), flush=True)
    other_s, this_s = (statistics.median(r.seconds for r in found[name]) for name in checkouts)
    print(
        f"\nmedian seconds: other {other_s:.1f}, this {this_s:.1f}; this checkout is "
        f"{other_s / this_s:.2f} times as fast"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--turns", type=int, default=2)
    given = parser.parse_args()
    main(given.other, given.rounds, given.turns)

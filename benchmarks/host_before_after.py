"""Whether a change makes the host slower around clients' training: processor time of two trees.

    python benchmarks/host_before_after.py BEFORE [--after TREE] [--lines a,b] [--rounds 60]
        [--turns 3] [--out FILE]

BEFORE is the folder of another checkout. What a round takes outside the engine (choosing, sending,
admitting, merging, accounting) is the same code on every device, and where GPUs train it is what
is left of the host's work. Each tree plays every method of `gpu_table.py` in a process of its own,
in turn, on a CPU, with one batch per epoch. The processor time of its thread outside the engine is
measured, which is not that of other programs: of a run the lower decile over rounds, of the turns
the least. Ends with 1 if a method takes more than 1.03 times as long as before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from two_trees import environment_of, experiments_of, parser_of

SLOWER = 1.03
WARM = 5


class Enough(Exception):
    """What is left of a run is not measured."""


def main() -> int:
    options = _options()
    if options.child:
        _measure(options)
        return 0
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    found: dict[str, dict[str, list[float]]] = {}
    for turn in range(options.turns):
        for which, tree in sorted(trees.items(), reverse=turn % 2 == 0):
            for name, spent in _played(tree, options):
                found.setdefault(name, {"before": [], "after": []})[which].append(spent)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))
    ratios = {name: min(own["after"]) / min(own["before"]) for name, own in found.items()}
    for name, own in found.items():
        before, after = min(own["before"]), min(own["after"])
        print(f"{name}: {before:.3f} ms before, {after:.3f} after, {ratios[name]:.3f}")
    slower = [name for name, ratio in ratios.items() if ratio > SLOWER]
    middle = statistics.median(ratios.values())
    print(f"{len(ratios)} methods, median {middle:.3f}, most {max(ratios.values()):.3f}", end="; ")
    print(f"above {SLOWER}: {', '.join(slower) or 'none'}")
    return 1 if slower else 0


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="of a run")
    parser.add_argument("--turns", type=int, default=3, help="how often each tree plays")
    return parser.parse_args()


def _played(tree: Path, options: argparse.Namespace) -> Iterator[tuple[str, float]]:
    command = [sys.executable, __file__, "--child", str(tree), "--lines", options.lines]
    command += ["--rounds", str(options.rounds)]
    env = environment_of(tree, PYTHONHASHSEED="0", CUDA_VISIBLE_DEVICES="")
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            name, spent = json.loads(line)
            yield name, spent
    assert child.returncode == 0, f"{tree} ended early"


# -- in a tree's process ---------------------------------------------------------------------------


def _measure(options: argparse.Namespace) -> None:
    for setting, name, experiment, _ in experiments_of(options.child, options.lines):
        import torch

        import nestling
        from nestling import EngineConfig, Evaluation

        torch.set_num_threads(1)
        rounds = 10 * options.rounds  # what a run does half-way and at its end is no part of it
        asked = experiment.with_changes(
            rounds=rounds,
            engine=EngineConfig("cohort", device="cpu"),
            evaluate=Evaluation(every=rounds, clients=2),
            train=replace(experiment.train, epochs=1, batch=1000),
        )
        spent: list[float] = []
        with contextlib.suppress(Enough), _engine_timed() as inside:
            nestling.run(asked, watcher=nestling.Watcher(round=_timer(spent, inside, options)))
        decile = sorted(spent[WARM:])[len(spent[WARM:]) // 10]
        print(json.dumps([f"{setting} {name}", 1e3 * decile]), flush=True)


@contextlib.contextmanager
def _engine_timed() -> Iterator[list[float]]:
    """Seconds that this thread has spent in the engine, as the only entry of a list."""
    from nestling.engines.cohort import Cohort

    plain, inside = Cohort.run, [0.0]

    def run(self: Any, errands: Any) -> Iterator[Any]:
        events = iter(plain(self, errands))
        while True:
            began = time.thread_time()
            event = next(events, None)
            inside[0] += time.thread_time() - began
            if event is None:
                return
            yield event

    Cohort.run = run  # type: ignore[assignment, method-assign]
    try:
        yield inside
    finally:
        Cohort.run = plain  # type: ignore[method-assign]


def _timer(spent: list[float], inside: list[float], options: argparse.Namespace) -> Any:
    last = [time.thread_time(), inside[0]]

    def after_round(_: Any) -> None:
        now = time.thread_time()
        spent.append((now - last[0]) - (inside[0] - last[1]))
        if len(spent) == options.rounds:
            raise Enough
        last[:] = time.thread_time(), inside[0]

    return after_round


if __name__ == "__main__":
    sys.exit(main())

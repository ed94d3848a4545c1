"""Whether a change made a method slower on a GPU: two source trees play the same rounds in turn, on the same cores, in one run.

    python benchmarks/gpu_before_after.py BEFORE [--after TREE] [--lines a,b] [--blocks 6] [--minutes 9] [--device cuda] [--out FILE]

BEFORE is the folder of another checkout (`git worktree add`). Milliseconds of one process move by a third with the cores it
got and with what else the host does, so that two tables made one after the other say nothing of a few percent. Here each
tree has one process, both stand at the same round of the same method, and play a few rounds in turn, pinned to the same
cores, while the other waits. A method's ratio is the median over such pairs; beside it stands the ratio of the fastest.
Settings and networks are those of `gpu_table.py` on the embedded digits, the cohort engine alone. Ends with 1 if a method
has both ratios above 1.03. Give a tree as its own BEFORE to see how far two processes of the same code are apart: less than
that is no difference.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from two_trees import environment_of, experiments_of, parser_of

SLOWER = 1.03
WARM = {"parts": 10, "exchange": 4}
BLOCK = {"parts": 4, "exchange": 2}
"""Rounds before the first block, and of one."""
CORES = 4


class Enough(Exception):
    """What is left of a run is not measured."""


class Tree:
    """A process that plays rounds of one source tree when it is told to."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--child", str(folder), "--blocks", str(options.blocks), "--device", options.device]
        self.process = subprocess.Popen(
            [*command, "--lines", options.lines],
            env=environment_of(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def said(self) -> str:
        """Its next line: the name of a method that is warm, the milliseconds of a block, or "end"."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip() or "end"

    def block(self) -> float:
        """Milliseconds of the next block."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return float(self.said())


def main() -> int:
    options = _options()
    if options.child:
        _play(options)
        return 0
    began, found = time.monotonic(), dict[str, dict[str, list[float]]]()
    trees = {"before": Tree(options.before.resolve(), options), "after": Tree(options.after.resolve(), options)}
    try:
        while time.monotonic() - began < 60 * options.minutes:
            names = {which: tree.said() for which, tree in trees.items()}
            assert len({*names.values()}) == 1, f"the trees play different methods: {names}"
            if (name := names["before"]) == "end":
                break
            found[name] = {"before": [], "after": []}
            for number in range(options.blocks):
                for which in ("before", "after") if number % 2 == 0 else ("after", "before"):
                    found[name][which].append(trees[which].block())
            print(_line(name, found[name]), flush=True)
            if options.out:
                options.out.write_text(json.dumps(found, indent=1))
    finally:
        for tree in trees.values():
            tree.process.kill()
    return _verdict(found)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--blocks", type=int, default=6, help="how often each tree plays a few rounds of a method")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after so many")
    parser.add_argument("--device", default="cuda", help="where it is played")
    return parser.parse_args()


def _ratios(own: dict[str, list[float]]) -> tuple[float, float]:
    """After over before: the median of the pairs, and of the fastest blocks."""
    pairs = [after / before for before, after in zip(own["before"], own["after"], strict=True)]
    return statistics.median(pairs), min(own["after"]) / min(own["before"])


def _line(name: str, own: dict[str, list[float]]) -> str:
    rounds = BLOCK[name.split()[0]]
    before, after = (min(own[which]) / rounds for which in ("before", "after"))
    median, fastest = _ratios(own)
    return f"{name}: {before:.1f} ms a round before, {after:.1f} after; pairs {median:.3f}, fastest {fastest:.3f}"


def _verdict(found: dict[str, dict[str, list[float]]]) -> int:
    ratios = {name: _ratios(own) for name, own in found.items()}
    slower = [name for name, both in ratios.items() if min(both) > SLOWER]
    middle = statistics.median(median for median, _ in ratios.values()) if ratios else 0.0
    print(f"\n{len(ratios)} methods, the median of all pairs' ratios {middle:.3f}; slower by both: {', '.join(slower) or 'none'}")
    return 1 if slower or not ratios else 0


# -- in a tree's process -----------------------------------------------------------------------------------------------------------


def _play(options: argparse.Namespace) -> None:
    for setting, name, experiment, steady in experiments_of(options.child, options.lines):
        import nestling
        from nestling import EngineConfig, Evaluation

        warm = max(WARM[setting], steady)
        rounds = warm + options.blocks * BLOCK[setting] + 1
        tested = Evaluation(every=rounds, clients=2)
        asked = experiment.with_changes(rounds=rounds, engine=EngineConfig("cohort", device=options.device), evaluate=tested)
        stopper = _stopper(f"{setting} {name}", warm, BLOCK[setting], options.blocks)
        with contextlib.suppress(Enough):
            nestling.run(asked, watcher=nestling.Watcher(round=stopper))
    print("end", flush=True)


def _stopper(name: str, warm: int, block: int, blocks: int) -> Any:
    """What is called after every round: it waits where a block begins, and tells the milliseconds where one ends."""
    everywhere = os.sched_getaffinity(0)
    state = {"round": 0, "began": 0.0}

    def after_round(_: Any) -> None:
        done = state["round"] = state["round"] + 1
        if done < warm or (done - warm) % block:
            return
        if done == warm:
            _pin(set(sorted(everywhere)[:CORES]))
            print(name, flush=True)
        else:
            print(1e3 * (time.perf_counter() - state["began"]), flush=True)
        if done == warm + blocks * block:
            _pin(everywhere)
            raise Enough
        sys.stdin.readline()
        state["began"] = time.perf_counter()

    return after_round


def _pin(cores: set[int]) -> None:
    """All threads of this process, whoever began them."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread.name), cores)


if __name__ == "__main__":
    sys.exit(main())

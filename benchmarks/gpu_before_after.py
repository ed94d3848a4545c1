"""Whether a change made a method slower on a GPU: rounds of two source trees, in turn, in one run.

    python benchmarks/gpu_before_after.py BEFORE [--after TREE] [--lines a,b] [--turns 2] [--chunk 8] [--minutes 9] [--out FILE]

BEFORE is the folder of another checkout (`git worktree add`). Milliseconds of one pass move by a third with what else the host does,
so that two tables that were made one after the other say nothing of a few percent: here some methods at a time are played by the one
tree and the other, before-after-after-before, in processes of their own. What counts is the fastest round of each, and their
ratio. Settings and networks are those of `gpu_table.py` on the embedded digits, the cohort engine alone. Ends with 1 if a
method's ratio is above 1.03.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
SLOWER = 1.03
ROUNDS = {"parts": 22, "exchange": 16}
LAST = 12
"""Of so many last rounds the fastest is taken; the last two test."""


def main() -> int:
    options = _options()
    if options.child:
        _play(options.child, options.lines.split(","))
        return 0
    began, found = time.monotonic(), defaultdict[str, dict[str, list[float]]](dict)
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    names = options.lines.split(",") if options.lines else _names()
    for chunk in [names[k : k + options.chunk] for k in range(0, len(names), options.chunk)]:
        for which in ["before", "after", "after", "before"] * (options.turns // 2):
            if time.monotonic() - began > 60 * options.minutes:
                break
            for line, rounds in _asked(trees[which], chunk).items():
                found[line].setdefault(which, []).extend(rounds)
        for line in list(found):
            print(_line(line, found[line]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))
    ratios = {line: _ratio(own) for line, own in found.items() if len(own) == 2}
    slower = {line: ratio for line, ratio in ratios.items() if ratio > SLOWER}
    print(
        f"\n{len(ratios)} lines, the slowest {max(ratios.values(), default=0):.3f} of before; above {SLOWER}: {slower or 'none'}"
    )
    return 1 if slower else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", default=HERE, help="the folder of the source as it was")
    parser.add_argument("--after", type=Path, default=HERE, help="the folder of the source as it is (default: this one)")
    parser.add_argument("--lines", default="", help="names of methods, separated by commas (default: all)")
    parser.add_argument("--turns", type=int, default=2, help="how often each tree plays a method")
    parser.add_argument("--chunk", type=int, default=8, help="methods a turn: fewer are fairer, and start more processes")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after so many")
    parser.add_argument("--out", type=Path, help="a JSON file of all rounds")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _names() -> list[str]:
    sys.path[:0] = [str(HERE), str(HERE / "benchmarks")]
    from nestling.methods import METHODS

    return list(METHODS)


def _asked(tree: Path, names: Sequence[str]) -> dict[str, list[float]]:
    """The milliseconds of rounds of some methods, played by a tree in a process of its own."""
    rest = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path).resolve() != HERE]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "benchmarks"), *rest])}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(tree), "--lines", ",".join(names)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    told: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return told


def _play(tree: Path, names: Sequence[str]) -> None:
    sys.path[:] = [str(tree), str(tree / "benchmarks"), *[p for p in sys.path if p != str(HERE / "benchmarks")]]
    sys.argv = [sys.argv[0], "--data", "embedded", "--lines", ",".join(names)]
    import gpu_table

    import nestling

    assert Path(nestling.__file__).is_relative_to(tree), f"{nestling.__file__} is not of {tree}"
    told = {}
    for setting, name, experiment in gpu_table._experiments(gpu_table._options()):
        ends: list[float] = []
        watcher = nestling.Watcher(round=lambda _, ends=ends: ends.append(time.perf_counter()))
        rounds = max(ROUNDS[setting], gpu_table.LONG.get(name, 0))
        nestling.run(gpu_table._on_the_gpu(experiment, "cohort", rounds), watcher=watcher)
        steps = [1e3 * (after - before) for before, after in pairwise(ends)]
        told[f"{setting} {name}"] = steps[-LAST:-2]
    print(json.dumps(told))


def _ratio(own: dict[str, list[float]]) -> float:
    return min(own["after"]) / min(own["before"])


def _line(line: str, own: dict[str, list[float]]) -> str:
    if len(own) < 2:
        return f"{line}: only {', '.join(own)}"
    return f"{line}: {min(own['before']):.1f} ms before, {min(own['after']):.1f} after, {_ratio(own):.3f}"


if __name__ == "__main__":
    sys.exit(main())

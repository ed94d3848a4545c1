"""Whether a change made a method slower on a GPU: two source trees play the same rounds in turn, in
one process.

    python benchmarks/gpu_before_after.py BEFORE [--after TREE] [--lines a,b] [--skip N]
        [--blocks 14] [--minutes 9] [--device cuda] [--again] [--out FILE]

BEFORE is the folder of another checkout (`git worktree add`). Milliseconds of one process move by a
third with the cores it got, where its memory lies and what else the host does, so that two
processes, even in turn on the same cores, say nothing of a few percent. Here both trees are
imported into this process, and the same method of each stands at the same round: they play a few
rounds in turn, from two threads of which one always waits. What the process or the host brings
along, both have. Settings and networks are those of `gpu_table.py` on the embedded digits, the
cohort engine alone.

A method's ratio is the median over pairs of blocks, with an interval that holds it with 95 % or
more (of the order of pairs alone, no distribution assumed). Two instances of one tree may still
differ by what they were allotted: `--again` plays every method that seems slower with new
instances, in the other order, and with a second instance of the tree itself as a control. Ends with
1 if a method's interval lies above 1.03 in all that was played of it, or if nothing was measured.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from two_trees import parser_of

SLOWER = 1.03
WARM = {"parts": 10, "exchange": 4}
BLOCK = {"parts": 3, "exchange": 2}
"""Rounds before the first block, and of one."""
ENDLESS = 10_000
OURS = ("nestling", "gpu_table", "fashion_table", "exchange_table", "tables")


class Enough(Exception):
    """What is left of a run is not measured."""


class Tree:
    """The package and the table's script of one source folder, imported beside those of others."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.modules = folder.resolve(), dict[str, ModuleType]()
        with self.imported():
            self.table, self.package = (
                importlib.import_module("gpu_table"),
                importlib.import_module("nestling"),
            )
        assert Path(self.package.__file__ or "").is_relative_to(self.folder), (
            f"{self.package.__file__} is not of {folder}"
        )

    @contextmanager
    def imported(self) -> Iterator[None]:
        """While it lasts, `import nestling` means this tree's."""
        paths = list(sys.path)
        others = _taken_out()
        sys.path[:0] = [str(self.folder), str(self.folder / "benchmarks")]
        sys.modules.update(self.modules)
        try:
            yield
        finally:
            self.modules = _taken_out()
            sys.modules.update(others)
            sys.path[:] = paths

    def experiments(self, lines: str) -> dict[str, Any]:
        """The experiments of the table, by setting and method."""
        with self.imported():
            sys.argv = ["gpu_table", "--data", "embedded", *(["--lines", lines] if lines else [])]
            asked = self.table._options()
            return {
                f"{setting} {name}": experiment
                for setting, name, experiment in self.table._experiments(asked)
            }


def _taken_out() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in OURS}


class Player(threading.Thread):
    """One method of one tree: plays so many rounds when it is told to, and waits otherwise."""

    def __init__(self, tree: Tree, experiment: Any, warm: int, block: int, device: str) -> None:
        super().__init__(daemon=True)
        self.tree, self.warm, self.block, self.device = tree, warm, block, device
        # So long that its end and what is done half-way never come: neither is a round like others.
        with tree.imported():
            engine = tree.package.EngineConfig("cohort", device=device)
            tested = tree.package.Evaluation(every=ENDLESS, clients=2)
            self.asked = experiment.with_changes(rounds=ENDLESS, engine=engine, evaluate=tested)
        self.mine, self.others = threading.Semaphore(0), threading.Semaphore(0)
        self.left, self.over, self.error = warm, False, ""
        self.start()

    def play(self, rounds: int) -> float:
        """Milliseconds of the next rounds."""
        self.left = rounds
        with self.tree.imported():
            _wait_for(self.device)
            began = time.perf_counter()
            self.mine.release()
            self.others.acquire()
            _wait_for(self.device)
            took = time.perf_counter() - began
        if self.error:
            raise SystemExit(f"{self.tree.folder}: {self.error}")
        return 1e3 * took

    def end(self) -> None:
        self.over = True
        with self.tree.imported():
            self.mine.release()
            self.join()

    def run(self) -> None:
        self.mine.acquire()
        try:
            self.tree.package.run(
                self.asked, watcher=self.tree.package.Watcher(round=self._after_round)
            )
        except Enough:
            pass
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"
        self.others.release()

    def _after_round(self, _: Any) -> None:
        self.left -= 1
        if self.left <= 0:
            self.others.release()
            self.mine.acquire()
            if self.over:
                raise Enough


def _wait_for(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


def main() -> int:
    options = _options()
    before, after = Tree(options.before), Tree(options.after)
    began, found = time.monotonic(), dict[str, list[dict[str, Any]]]()
    theirs, ours = before.experiments(options.lines), after.experiments(options.lines)
    assert theirs.keys() == ours.keys(), "the trees play different methods"
    for name in list(ours)[options.skip :]:
        if time.monotonic() - began > 60 * options.minutes:
            print(f"stopped before {name}: out of time")
            break
        pair = [(before, theirs[name]), (after, ours[name])]
        found[name] = [_measured(name, pair, ("before", "after"), options)]
        if options.again and found[name][0]["ratio"] > 1 + (SLOWER - 1) / 2:
            found[name].append(_measured(name, pair[::-1], ("after", "before"), options))
            found[name].append(_measured(name, [pair[1], pair[1]], ("control", "after"), options))
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))
    return _verdict(found)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--skip", type=int, default=0, help="so many methods")
    parser.add_argument(
        "--blocks", type=int, default=14, help="how often each tree plays a few rounds of a method"
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="no method is begun after so many"
    )
    parser.add_argument("--device", default="cuda", help="where it is played")
    parser.add_argument(
        "--again", action="store_true", help="play what seems slower again, with a control"
    )
    return parser.parse_args()


def _measured(
    name: str, pair: list[tuple[Tree, Any]], called: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Milliseconds of the blocks of two instances, and the ratio of the new tree's to the
    other's."""
    setting, _, method = name.partition(" ")
    warm, block = max(WARM[setting], pair[1][0].table.LONG.get(method, 0)), BLOCK[setting]
    players = [Player(tree, experiment, warm, block, options.device) for tree, experiment in pair]
    for player in players:
        player.play(warm)
    blocks: dict[str, list[float]] = {which: [] for which in called}
    gc.collect()
    gc.disable()  # a collection falls into one block or another, and costs what both have made
    for number in range(options.blocks):
        turn = list(zip(called, players, strict=True))
        for which, player in turn if number % 2 == 0 else turn[::-1]:
            blocks[which].append(player.play(block))
        gc.collect(0)
    gc.enable()
    for player in players:
        player.end()
    first = next(which for which in called if which != "after")
    pairs = sorted(new / old for old, new in zip(blocks[first], blocks["after"], strict=True))
    low, high = _interval(pairs)
    row = {
        "over": first,
        "ratio": statistics.median(pairs),
        "low": low,
        "high": high,
        "blocks": blocks,
    }
    old, new = (min(blocks[which]) / block for which in (first, "after"))
    print(
        f"{name}: {old:.2f} ms a round {first}, {new:.2f} after; {row['ratio']:.3f} [{low:.3f}, "
        f"{high:.3f}]",
        flush=True,
    )
    return row


def _interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Between which of the ordered ratios their median lies with 95 % or more: ranks of the
    binomial distribution."""
    count, cut, chance = len(ordered), 0, 0.5 ** len(ordered)
    while cut + 1 < count / 2 and chance <= 0.025:
        cut += 1
        chance += math.comb(count, cut) * 0.5**count
    cut = max(cut - 1, 0)
    return ordered[cut], ordered[-1 - cut]


def _verdict(found: dict[str, list[dict[str, Any]]]) -> int:
    if not found:
        return 1
    judged = {
        name: [row for row in rows if row["over"] == "before"] for name, rows in found.items()
    }
    middle = statistics.median(rows[0]["ratio"] for rows in judged.values())
    slower = [name for name, rows in judged.items() if all(row["low"] > SLOWER for row in rows)]
    above = [name for name, rows in judged.items() if all(row["ratio"] > SLOWER for row in rows)]
    controls = [row["ratio"] for rows in found.values() for row in rows if row["over"] == "control"]
    apart = f", controls {min(controls):.3f} to {max(controls):.3f}" if controls else ""
    print(f"\n{len(found)} methods, the median of their ratios {middle:.3f}{apart}")
    print(
        f"above {SLOWER} in the median: {', '.join(above) or 'none'}; with certainty: "
        f"{', '.join(slower) or 'none'}"
    )
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())

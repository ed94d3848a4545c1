"""Every method on a GPU: the cohort engine against the in-process engine on the same device, steady
rounds.

    python benchmarks/gpu_table.py [--setting parts|exchange|both]
        [--data auto|embedded|fashion-mnist] [--lines a,b] [--rounds 16]
        [--all-rounds 10] [--plain-rounds 2] [--out FILE] [--write]

The settings are those of `fashion_table.py` (100 clients of five sizes, ten a round,
Dirichlet(0.5)) and `exchange_table.py` (twelve clients of three families), on Fashion-MNIST where
NESTLING_DATA has it and else on the embedded digits, there with one epoch for the twelve. A round's
milliseconds are the median over five rounds of the cohort, whose last two, which test, do not
count; in-process, where nothing changes from the second round on, it is that one (the median of all
but the first with more of --plain-rounds). Says loudly what could not be recorded. Ends with 1 if
anything failed. `--write` puts the table into docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import exchange_table
import fashion_table
import torch
from tables import write

import nestling
from nestling import Data, EngineConfig, Evaluation, Experiment, Named

MEASURED, LAST, TESTED = 5, 2, 5
HALVES = [[0.75] * 3, [0.5] * 3, [0.25] * 3, [0.0] * 3]
QUICK: dict[str, dict[str, Any]] = {
    "distreal": {"pareto": HALVES},
    "flexfl": {"pretrain": 2},
    "prunefl": {"stage_one": 10, "every": 15},
}
"""What is done once, before the first round, made short: it is not what is measured. PruneFL
adjusts its mask as often as in a run of 300 rounds."""
LONG = {"hermes": 50}
"""Rounds until clients have pruned themselves: before, there are new sizes to record in nearly
every round."""


@dataclass
class Row:
    """A method: milliseconds a round on both engines, seconds of the first two rounds, what was
    recorded, megabytes on the device."""

    setting: str
    method: str
    cohort: float = 0.0
    inline: float = 0.0
    start: float = 0.0
    start_inline: float = 0.0
    kinds: str = ""
    graphs: int = 0
    megabytes: float = 0.0
    failed: str = ""

    @property
    def ratio(self) -> float:
        return self.inline / self.cohort if self.cohort else 0.0


def main() -> int:
    options = _options()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here")
    if options.data == "auto":
        there = (
            Path(os.environ.get("NESTLING_DATA", "")) / "FashionMNIST"
        ).is_dir() and "NESTLING_DATA" in os.environ
        options.data = "fashion-mnist" if there else "embedded"
    rows = []
    for setting, name, experiment in _experiments(options):
        rows.append(_measured(setting, name, experiment, options))
        print(_line(rows[-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    text = table(rows, options.data)
    print(f"\n{text}")
    if options.write:
        write("gpu table", text, page="performance.md")
    good = [row for row in rows if not row.failed]
    least = min(good, key=lambda row: row.ratio)
    print(
        f"\n{len(good)} of {len(rows)} ran; at least {least.ratio:.1f} times as fast as "
        f"in-process ({least.method})"
    )
    return 0 if len(good) == len(rows) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setting", default="both", choices=("parts", "exchange", "both"))
    parser.add_argument("--data", default="auto", choices=("auto", "embedded", "fashion-mnist"))
    parser.add_argument(
        "--lines", default="", help="names of methods, separated by commas (default: all)"
    )
    parser.add_argument(
        "--rounds", type=int, default=16, help="of the cohort, where ten of 100 clients take part"
    )
    parser.add_argument(
        "--all-rounds",
        type=int,
        default=10,
        help="of the cohort, where all take part: its work is known sooner",
    )
    parser.add_argument(
        "--plain-rounds", type=int, default=2, help="rounds of the in-process engine"
    )
    parser.add_argument("--out", type=Path, help="a JSON file for the rows, written after each")
    parser.add_argument("--write", action="store_true")
    return parser.parse_args()


def _experiments(options: argparse.Namespace) -> Iterator[tuple[str, str, Experiment]]:
    wanted = options.lines.split(",") if options.lines else []
    data = Data("mnist12k" if options.data == "embedded" else options.data)
    if options.setting != "exchange":
        seen: set[str] = set()
        for group, name in fashion_table.lines_of(""):
            if name not in seen and (not wanted or name in wanted):
                seen.add(name)
                yield (
                    "parts",
                    name,
                    _quick(name, fashion_table.experiment(group, name, 0)).with_changes(data=data),
                )
    if options.setting != "parts":
        for name in exchange_table.lines_of(""):
            if not wanted or name in wanted:
                found = exchange_table.experiment(name, 0).with_changes(data=data)
                yield "exchange", name, found if options.data != "embedded" else _short(found)


def _quick(name: str, experiment: Experiment) -> Experiment:
    options = {**experiment.method.options, **QUICK.get(name, {})}
    return experiment.with_changes(method=Named(name, options))


def _short(experiment: Experiment) -> Experiment:
    """With one local epoch instead of two: the proof that every method is fast has to end in
    minutes."""
    return experiment.with_changes(train=replace(experiment.train, epochs=1))


def _measured(setting: str, name: str, experiment: Experiment, options: argparse.Namespace) -> Row:
    row = Row(setting, name)
    try:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        rounds = max(
            options.rounds if setting == "parts" else options.all_rounds, LONG.get(name, 0)
        )
        row.cohort, row.start, summary = _played(experiment, rounds)
        engine = summary["engine"]
        row.kinds = (
            f"{engine['kinds_recorded']} of "
            f"{engine['kinds_recorded'] + engine['kinds_not_recorded']}"
        )
        row.graphs, row.megabytes = engine["graphs"], torch.cuda.max_memory_allocated() / 2**20
        row.inline, row.start_inline = _begun(experiment, options.plain_rounds)
    except Exception as error:
        row.failed = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return row


class _Enough(Exception):
    """What is left of a run is not measured."""


def _begun(experiment: Experiment, rounds: int) -> tuple[float, float]:
    """Milliseconds of a round and seconds to the end of the second, in-process; what comes after so
    many rounds is not played."""
    ends: list[float] = []
    began = time.perf_counter()

    def after_round(_: Any) -> None:
        ends.append(time.perf_counter())
        if len(ends) == rounds:
            raise _Enough

    with contextlib.suppress(_Enough):
        nestling.run(
            _on_the_gpu(experiment, "inline", rounds + 1),
            watcher=nestling.Watcher(round=after_round),
        )
    return _median(ends), ends[1] - began


def _played(experiment: Experiment, rounds: int) -> tuple[float, float, dict[str, Any]]:
    """The same of the cohort, once its rounds are steady, and the summary."""
    ends: list[float] = []
    began = time.perf_counter()
    watcher = nestling.Watcher(round=lambda _: ends.append(time.perf_counter()))
    result = nestling.run(_on_the_gpu(experiment, "cohort", rounds), watcher=watcher)
    for note in result.federation.engine.notes:
        if "NOT RECORDED" in note:
            print(f"  {note}")
    return (
        _median(ends[max(rounds - MEASURED - LAST - 1, 0) : -LAST]),
        ends[1] - began,
        result.summary,
    )


def _on_the_gpu(experiment: Experiment, engine: str, rounds: int) -> Experiment:
    tested = Evaluation(every=rounds, clients=TESTED)
    return experiment.with_changes(
        rounds=rounds, engine=EngineConfig(engine, device="cuda"), evaluate=tested
    )


def _median(ends: list[float]) -> float:
    return 1e3 * statistics.median(after - before for before, after in pairwise(ends))


def _line(row: Row) -> str:
    if row.failed:
        return f"{row.setting} {row.method}: FAILED, {row.failed}"
    speed = f"{row.cohort:.1f} ms against {row.inline:.1f} ms, {row.ratio:.1f} times as fast"
    start = f"first two rounds {row.start:.1f} s against {row.start_inline:.1f} s"
    return (
        f"{row.setting} {row.method}: {speed}; {start}; {row.kinds} kinds in {row.graphs} "
        f"graphs; {row.megabytes:.0f} MB"
    )


def table(rows: list[Row], data: str) -> str:
    """Both settings, one line a method."""
    head = (
        "setting | method | cohort, ms a round | in-process | ratio | first two rounds | "
        "in-process | recorded | device memory"
    )
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float32, {data}, commit "
        f"{_commit()}.",
        "",
        f"| {head} |",
    ]
    lines.append("|" + "---|" * (1 + head.count("|")))
    for r in rows:
        cells = [
            f"{r.cohort:.1f}",
            f"{r.inline:.0f}",
            f"**{r.ratio:.1f}×**",
            f"{r.start:.1f} s",
            f"{r.start_inline:.1f} s",
            f"{r.kinds} kinds",
            f"{r.megabytes:.0f} MB",
        ]
        lines.append(f"| {r.setting} | {r.method} | {r.failed or ' | '.join(cells)} |")
    return "\n".join(lines)


def _commit() -> str:
    """The commit of this checkout, and whether the files are others than its."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty=, with changes"], capture_output=True, text=True
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())

"""Nestling's simulator against the bare PyTorch loop, pfl-research and Flower on one fixed task.

    python benchmarks/simulators/compare.py TASK [--against bare,pfl,flower] [--engine cohort|pool|inline] [--workers N]
        [--device cpu|cuda] [--precision float32|tf32|bf16] [--compile] [--rounds R] [--warmup W] [--repeat N]
        [--python-pfl PYTHON] [--python-flower PYTHON]

Every contestant trains the same clients on the same rows from the same start weights, in a process of its own that may use the first
N cores, with one torch thread a process (on a GPU: any core). `inline`, `pool` and `cohort` also stand for engines of Nestling as
opponents. Prints a table, and last how many times Nestling's time and memory the others take. Ends with 1 if accuracies differ by
more than half a point.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contest import BEGAN
from memory import Peak
from plan import write
from tasks import TASKS, Task

HERE = Path(__file__).resolve().parent
ENGINES = ("inline", "pool", "cohort")
NEEDS = {"bare": "torch", "pfl": "pfl", "flower": "flwr, ray"}
TOLERANCE = 0.005
WARMUP = 3
LAST = 2
"""The last rounds are not measured: Nestling tests its model in the last, and may begin that before the one before has ended."""


@dataclass(frozen=True)
class Contestant:
    """Who runs: a script with an interpreter, and for Nestling an engine."""

    name: str
    python: str
    script: str
    engine: str = ""

    @property
    def weights(self) -> str:
        """The file its final weights are in."""
        return f"nestling-{self.engine}.pt" if self.engine else f"{self.name}.pt"


@dataclass(frozen=True)
class Score:
    """What a contestant did: seconds a round over the steady rounds; seconds since its birth to the end of the first round and to the
    test of the final weights; peak megabytes; accuracy; how far its weights are from Nestling's (None: not compared)."""

    name: str
    median: float
    mean: float
    start_up: float
    whole: float
    peak: Peak
    gpu: float
    accuracy: float
    distance: float | None


def main() -> int:
    options = _options()
    task = TASKS[options.task](*([options.rounds] if options.rounds else []))
    if task.rounds <= options.warmup + LAST:
        raise SystemExit(f"{options.warmup} rounds to warm up and the last {LAST} leave none of {task.rounds} to measure")
    with tempfile.TemporaryDirectory(prefix="nestling-benchmark-") as name:
        folder = Path(name)
        write(task, folder)
        first, *others = [c for c in _contestants(options) if _can_run(c, task, options.device)]
        # Turn by turn, so that what else the machine does meets everybody alike.
        turns = [[_run(contestant, first, folder, options) for contestant in (first, *others)] for _ in range(options.repeat)]
        scores = [min(own, key=lambda score: score.median) for own in zip(*turns, strict=True)]
    _print_table(task, scores, options)
    return _verdict(scores)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--against", default="bare,pfl,flower", help="who runs beside Nestling, separated by commas")
    parser.add_argument("--engine", default="cohort", choices=(*ENGINES, "auto"))
    parser.add_argument("--workers", type=int, default=1, help="cores on a CPU: Nestling's workers, Flower's actors")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--precision", default="float32", choices=("float32", "tf32", "bf16"), help="on a GPU; bf16: others take tf32"
    )
    parser.add_argument("--compile", action="store_true", help="let Nestling's engine compile its step, on a GPU")
    parser.add_argument("--rounds", type=int, default=0, help="0: the task's own number")
    parser.add_argument("--warmup", type=int, default=WARMUP, help="first rounds that are not measured")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each, in turns; the one with the fastest rounds counts")
    parser.add_argument("--python-pfl", default=sys.executable)
    parser.add_argument("--python-flower", default=sys.executable)
    options = parser.parse_args()
    for name in options.against.split(","):
        if name and name not in (*NEEDS, *ENGINES):
            parser.error(f"unknown opponent {name!r}: use {', '.join((*NEEDS, *ENGINES))}")
    return options


def _contestants(options: argparse.Namespace) -> list[Contestant]:
    """Nestling first."""
    found = [Contestant(f"nestling ({options.engine})", sys.executable, "nestling_loop.py", options.engine)]
    python = {"pfl": options.python_pfl, "flower": options.python_flower}
    for name in filter(None, options.against.split(",")):
        if name in ENGINES:
            found.append(Contestant(f"nestling ({name})", sys.executable, "nestling_loop.py", name))
        else:
            found.append(Contestant(name, python.get(name, sys.executable), f"{name}_loop.py"))
    return found


def _can_run(contestant: Contestant, task: Task, device: str) -> bool:
    """Whether a contestant can take part; says why not."""
    if contestant.engine:
        return True
    if task.network is None:
        reason = f"only Nestling plays {task.name}"
    elif contestant.name == "flower" and device != "cpu":
        reason = "compared on the CPU only"
    elif subprocess.run([contestant.python, "-c", f"import {NEEDS[contestant.name]}"], capture_output=True).returncode:
        reason = f"{contestant.python} cannot import {NEEDS[contestant.name]}"
    else:
        return True
    print(f"{contestant.name}: skipped, {reason}", flush=True)
    return False


def _run(contestant: Contestant, first: Contestant, folder: Path, options: argparse.Namespace) -> Score:
    result, peak = _measured(contestant, folder, options)
    steady = result["seconds"][options.warmup : -LAST]
    score = Score(
        name=contestant.name,
        median=statistics.median(steady),
        mean=statistics.mean(steady),
        start_up=result["start_up"],
        whole=result["whole"],
        peak=peak,
        gpu=result.get("gpu_megabytes", 0.0),
        accuracy=result["accuracy"],
        distance=None if contestant is first else _distance(folder / first.weights, folder / contestant.weights),
    )
    print(f"{score.name}: {score.median:.4f} s a round, accuracy {100 * score.accuracy:.2f} %", flush=True)
    return score


def _measured(contestant: Contestant, folder: Path, options: argparse.Namespace) -> tuple[dict[str, Any], Peak]:
    """Runs a contestant to its end, watching its memory."""
    command = [contestant.python, str(HERE / contestant.script), str(folder)]
    command += ["--device", options.device, "--workers", str(options.workers), "--precision", options.precision]
    if contestant.engine:
        command += ["--engine", contestant.engine, *(["--compile"] if options.compile else [])]
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = {**os.environ, **one_thread, BEGAN: str(time.time())}
    peak, log = Peak(), folder / "log"
    with log.open("w") as out, (folder / "errors").open("w") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, env=environment, preexec_fn=_pinned(options))
        peak.watch(process)
    if process.returncode:
        raise SystemExit(f"{contestant.name} failed:\n{(folder / 'errors').read_text()[-4000:]}")
    *notes, last = log.read_text().splitlines()
    if contestant.engine:
        print(*notes, sep="\n", flush=True)
    return json.loads(last), peak


def _pinned(options: argparse.Namespace) -> Callable[[], None] | None:
    """What a contestant does before it begins: it takes the first cores, as many as there are workers."""
    cores = sorted(os.sched_getaffinity(0))[: options.workers]
    return (lambda: os.sched_setaffinity(0, cores)) if options.device == "cpu" else None


def _distance(one: Path, other: Path) -> float:
    first, second = (torch.load(path, weights_only=True) for path in (one, other))
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def _print_table(task: Task, scores: list[Score], options: argparse.Namespace) -> None:
    where = f"a GPU in {options.precision}" if options.device == "cuda" else f"{options.workers} core(s)"
    measured = f"{task.rounds} rounds ({task.rounds - options.warmup - LAST} measured), best of {options.repeat} run(s)"
    print(f"\n{task.name} on {where}, {measured}, data {task.experiment.data.name}, torch {torch.__version__}\n")
    print(
        "| | s a round, median | mean | start-up s | whole run s | peak RSS MB | peak PSS MB | GPU MB | accuracy | weights differ |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for s in scores:
        cells = [
            s.name,
            f"{s.median:.4f}",
            f"{s.mean:.4f}",
            f"{s.start_up:.1f}",
            f"{s.whole:.1f}",
            f"{s.peak.rss:.0f}",
            f"{s.peak.pss:.0f}" if s.peak.pss else "",
            f"{s.gpu:.0f}" if s.gpu else "",
            f"{100 * s.accuracy:.2f} %",
            "" if s.distance is None else f"{s.distance:.1e}",
        ]
        print(f"| {' | '.join(cells)} |")


def _verdict(scores: list[Score]) -> int:
    """Prints the ratios; 1 where somebody did not do the same work."""
    first, *others = scores
    spread = max(s.accuracy for s in scores) - min(s.accuracy for s in scores)
    agree = spread <= TOLERANCE
    print(f"\naccuracies {'agree' if agree else 'DO NOT agree'}: they differ by {100 * spread:.2f} points")
    for s in others:
        memory = f", {s.peak.rss / first.peak.rss:.2f} times the memory"
        print(f"{s.name} takes {s.median / first.median:.2f} times the seconds of {first.name} a round{memory}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())

"""Nestling's simulator against the bare PyTorch loop, pfl-research, Flower and BlazeFL on one fixed
task.

    python benchmarks/simulators/compare.py TASK [--against bare,pfl,flower,blazefl]
        [--engine cohort|pool|inline]
        [--workers N] [--device cpu|cuda] [--precision float32|tf32|bf16] [--compile] [--rounds R]
        [--warmup W] [--repeat N]
        [--python-pfl PYTHON] [--python-flower PYTHON] [--blazefl FOLDER] [--python-blazefl PYTHON]

Every contestant trains the same clients on the same rows from the same start weights, in a process
of its own that may use the first N cores, with one torch thread a process (on a GPU: any core).
`inline`, `pool` and `cohort` also stand for engines of Nestling as opponents, and `bf16` for its
own engine in that precision. Prints every turn, a table of the turns in the middle, and last how
many times Nestling's time and memory the others take. Ends with 1 if accuracies differ by more than
half a point.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contest import BEGAN
from memory import Peak
from plan import write
from scores import Score, middle, print_table, verdict
from tasks import TASKS, Task

HERE = Path(__file__).resolve().parent
ENGINES = ("inline", "pool", "cohort")
NEEDS = {"bare": "torch", "pfl": "pfl", "flower": "flwr, ray", "blazefl": "blazefl_loop"}
"""What an opponent's interpreter must be able to import. For BlazeFL its loop, which stands in for
what BlazeFL lacks."""
WARMUP = 3
LAST = 2
"""The last rounds are not measured: Nestling tests its model in the last, and may begin that before
the one before has ended."""


@dataclass(frozen=True)
class Contestant:
    """Who runs: a script with an interpreter, for Nestling an engine, and the folder of a package
    that is not installed."""

    name: str
    python: str
    script: str
    engine: str = ""
    code: Path | None = None
    precision: str = ""

    @property
    def weights(self) -> str:
        """The file its final weights are in."""
        return f"nestling-{self.engine}-{self.precision}.pt" if self.engine else f"{self.name}.pt"

    @property
    def environment(self) -> dict[str, str]:
        """The variables its process is to have."""
        if self.code is None:
            return dict(os.environ)
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(self.code), os.environ.get("PYTHONPATH")))
            ),
        }


def main() -> int:
    options = _options()
    task = TASKS[options.task](*([options.rounds] if options.rounds else []))
    if task.rounds <= options.warmup + LAST:
        raise SystemExit(
            f"{options.warmup} rounds to warm up and the last {LAST} leave none of {task.rounds} "
            "to measure"
        )
    with tempfile.TemporaryDirectory(prefix="nestling-benchmark-") as name:
        folder = Path(name)
        write(task, folder)
        first, *others = [c for c in _contestants(options) if _can_run(c, task, options.device)]
        # Turn by turn, so that what else the machine does meets everybody alike.
        turns = [
            _turn(number, (first, *others), folder, options)
            for number in range(1, options.repeat + 1)
        ]
    _print_title(task, options)
    print_table([middle(own) for own in zip(*turns, strict=True)])
    return verdict(turns)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument(
        "--against", default="bare,pfl,flower", help="who runs beside Nestling, separated by commas"
    )
    parser.add_argument("--engine", default="cohort", choices=(*ENGINES, "auto"))
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="cores on a CPU: Nestling's workers, Flower's actors, BlazeFL's threads",
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--precision",
        default="float32",
        choices=("float32", "tf32", "bf16"),
        help="on a GPU; bf16: others take tf32",
    )
    parser.add_argument(
        "--compile", action="store_true", help="let Nestling's engine compile its step, on a GPU"
    )
    parser.add_argument("--rounds", type=int, default=0, help="0: the task's own number")
    parser.add_argument(
        "--warmup", type=int, default=WARMUP, help="first rounds that are not measured"
    )
    parser.add_argument(
        "--repeat", type=int, default=1, help="runs of each, in turns; the one in the middle counts"
    )
    parser.add_argument("--python-pfl", default=sys.executable)
    parser.add_argument("--python-flower", default=sys.executable)
    parser.add_argument(
        "--python-blazefl",
        default=sys.executable,
        help="threads run side by side in a free-threaded one only",
    )
    parser.add_argument(
        "--blazefl", type=Path, help="a checkout of BlazeFL, or the folder that its package lies in"
    )
    options = parser.parse_args()
    for name in options.against.split(","):
        if name and name not in (*NEEDS, *ENGINES, "bf16"):
            parser.error(f"unknown opponent {name!r}: use {', '.join((*NEEDS, *ENGINES, 'bf16'))}")
    return options


def _contestants(options: argparse.Namespace) -> list[Contestant]:
    """Nestling first."""
    found = [_nestling(options.engine, options.precision)]
    python = {
        "pfl": options.python_pfl,
        "flower": options.python_flower,
        "blazefl": options.python_blazefl,
    }
    code = {"blazefl": _package_folder(options.blazefl, "blazefl")}
    for name in filter(None, options.against.split(",")):
        if name == "bf16":
            found.append(_nestling(options.engine, "bf16"))
        elif name in ENGINES:
            found.append(_nestling(name, options.precision))
        else:
            found.append(
                Contestant(
                    name, python.get(name, sys.executable), f"{name}_loop.py", code=code.get(name)
                )
            )
    return found


def _nestling(engine: str, precision: str) -> Contestant:
    title = f"nestling ({engine}{', bf16' if precision == 'bf16' else ''})"
    return Contestant(title, sys.executable, "nestling_loop.py", engine, precision=precision)


def _package_folder(given: Path | None, package: str) -> Path | None:
    """Where the package lies: in the folder itself, or in `src` of a checkout."""
    if given is None:
        return None
    sources = given.absolute() / "src"
    return sources if (sources / package).is_dir() else given.absolute()


def _can_run(contestant: Contestant, task: Task, device: str) -> bool:
    """Whether a contestant can take part; says why not."""
    if contestant.engine:
        return True
    if task.network is None:
        reason = f"only Nestling plays {task.name}"
    elif contestant.name == "flower" and device != "cpu":
        reason = "compared on the CPU only"
    else:
        reason = _missing(contestant)
    if not reason:
        return True
    print(f"{contestant.name}: skipped, {reason}", flush=True)
    return False


def _missing(contestant: Contestant) -> str:
    """Why its interpreter cannot import what it needs; empty if it can."""
    needs = NEEDS[contestant.name]
    try_it = f"import sys; sys.path.insert(0, {str(HERE)!r}); import {needs}"
    try:
        tried = subprocess.run(
            [contestant.python, "-c", try_it],
            capture_output=True,
            text=True,
            env=contestant.environment,
        )
    except OSError as error:
        return f"{contestant.python} cannot be started: {error.strerror}"
    if not tried.returncode:
        return ""
    last = (tried.stderr.strip().splitlines() or ["it says nothing"])[-1]
    return f"{contestant.python} cannot import {needs}: {last}"


def _turn(
    number: int, contestants: Sequence[Contestant], folder: Path, options: argparse.Namespace
) -> list[Score]:
    """Everybody once."""
    scores = []
    for contestant in contestants:
        scores.append(_run(contestant, contestants[0], folder, options))
        print(f"turn {number}, {scores[-1]}", flush=True)
    return scores


def _run(
    contestant: Contestant, first: Contestant, folder: Path, options: argparse.Namespace
) -> Score:
    result, peak = _measured(contestant, folder, options)
    steady = result["seconds"][options.warmup : -LAST]
    return Score(
        name=contestant.name,
        python=result["python"],
        median=statistics.median(steady),
        mean=statistics.mean(steady),
        start_up=result["start_up"],
        three=result["start_up"] + sum(result["seconds"][1:3]),
        whole=result["whole"],
        peak=peak,
        gpu=result.get("gpu_megabytes", 0.0),
        accuracy=result["accuracy"],
        distance=None
        if contestant is first
        else _distance(folder / first.weights, folder / contestant.weights),
    )


def _measured(
    contestant: Contestant, folder: Path, options: argparse.Namespace
) -> tuple[dict[str, Any], Peak]:
    """Runs a contestant to its end, watching its memory."""
    command = [contestant.python, str(HERE / contestant.script), str(folder)]
    command += ["--device", options.device, "--workers", str(options.workers)]
    command += ["--precision", contestant.precision or options.precision]
    if contestant.engine:
        command += ["--engine", contestant.engine, *(["--compile"] if options.compile else [])]
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    environment = {**contestant.environment, **one_thread, BEGAN: str(time.time())}
    peak, log = Peak(), folder / "log"
    with log.open("w") as out, (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            command, stdout=out, stderr=errors, env=environment, preexec_fn=_pinned(options)
        )
        peak.watch(process)
    if process.returncode:
        raise SystemExit(f"{contestant.name} failed:\n{(folder / 'errors').read_text()[-4000:]}")
    *notes, last = log.read_text().splitlines()
    if contestant.engine:
        print(*notes, sep="\n", flush=True)
    return json.loads(last), peak


def _pinned(options: argparse.Namespace) -> Callable[[], None] | None:
    """What a contestant does before it begins: it takes the first cores, as many as there are
    workers."""
    cores = sorted(os.sched_getaffinity(0))[: options.workers]
    return (lambda: os.sched_setaffinity(0, cores)) if options.device == "cpu" else None


def _distance(one: Path, other: Path) -> float:
    first, second = (torch.load(path, weights_only=True) for path in (one, other))
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def _print_title(task: Task, options: argparse.Namespace) -> None:
    where = (
        f"a GPU in {options.precision}"
        if options.device == "cuda"
        else f"{options.workers} core(s)"
    )
    measured = (
        f"{task.rounds} rounds ({task.rounds - options.warmup - LAST} measured), median "
        f"of {options.repeat} turn(s)"
    )
    print(
        f"\n{task.name} on {where}, {measured}, data {task.experiment.data.name}, torch "
        f"{torch.__version__}\n"
    )


if __name__ == "__main__":
    sys.exit(main())

"""Whether a change makes more work of a round: what the host and the device do, of two source
trees, counted, method by method.

    python benchmarks/work_before_after.py BEFORE [--after TREE] [--lines a,b] [--device cpu|cuda]
        [--share K/N] [--out FILE]

BEFORE is the folder of another checkout. Milliseconds on a GPU move by tens of percent, even
between two instances of one tree that play in turn in one process (`gpu_before_after.py`); what is
done hardly moves. Both trees play the same rounds of the settings of `gpu_table.py` with the cohort
engine, and what the last rounds do is counted. On the host: calls of functions, Python's and C's,
and those of torch among them. With `--device cuda`, as torch's profiler tells: calls of the CUDA
runtime, those that wait for the device, and on the device kernels and copies, graphs' own included.
On a CPU (stacks, one batch per epoch) instead of these the calls of torch that on a GPU might wait;
they are shown and not judged, since tensors of the host are among them. `--share 0/2` plays every
second method, so that two processes can share the work. Ends with 1 if a method does more than 1.03
times as much of anything that is judged as before, and more than a handful; for these methods it
names the functions that are called more often.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from two_trees import environment_of, experiments_of, parser_of

MORE = 1.03
WARM, COUNTED = {"cpu": 3, "cuda": 12}, 2
WAITING = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "to",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "equal",
    "isfinite",
)
JUDGED = ("calls", "torch", "runtime", "syncs", "kernels", "copies")
KINDS = (*JUDGED, "waits")
HANDFUL = 3
"""So many more, in all rounds that are counted, are no matter."""

Counts = dict[str, dict[str, int]]


class Enough(Exception):
    """What is left of a run is not counted."""


def main() -> int:
    options = _options()
    if options.child:
        _count(options)
        return 0
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    children = {which: _child(tree, options) for which, tree in trees.items()}
    found: dict[str, Counts] = {}
    while lines := {
        which: child.stdout.readline() for which, child in children.items() if child.stdout
    }:
        if not all(lines.values()):
            break
        both = {which: json.loads(line) for which, line in lines.items()}
        name, functions = (
            both["before"].pop("name"),
            {which: own.pop("functions") for which, own in both.items()},
        )
        assert both["after"].pop("name") == name, "the trees play different methods"
        found[name] = both
        told = [
            f"{kind} {_told(both, kind)}"
            for kind in KINDS
            if both["before"][kind] or both["after"][kind]
        ]
        print(f"{name}: " + "; ".join(told), flush=True)
        if _more(both):
            print(f"  {_oftener(functions)}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))
    assert all(child.wait() == 0 for child in children.values()), "a tree ended early"
    return _verdict(found)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cpu", choices=tuple(WARM), help="where it is played")
    parser.add_argument("--share", default="0/1", help="K/N: every Nth method, from the Kth on")
    return parser.parse_args()


def _child(tree: Path, options: argparse.Namespace) -> subprocess.Popen[str]:
    env = environment_of(
        tree,
        PYTHONHASHSEED="0",
        **({"CUDA_VISIBLE_DEVICES": ""} if options.device == "cpu" else {}),
    )
    command = [sys.executable, __file__, "--child", str(tree), "--lines", options.lines]
    command += ["--device", options.device, "--share", options.share]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def _ratio(both: Counts, kind: str) -> float:
    return both["after"][kind] / max(both["before"][kind], 1)


def _told(both: Counts, kind: str) -> str:
    return f"{both['before'][kind]} -> {both['after'][kind]} ({_ratio(both, kind):.3f})"


def _more(both: Counts) -> list[str]:
    """Of what there is too much more."""
    return [
        kind
        for kind in JUDGED
        if _ratio(both, kind) > MORE and both["after"][kind] - both["before"][kind] > HANDFUL
    ]


def _oftener(functions: Counts, shown: int = 25) -> str:
    """The functions that are called more often than before, and those less often, by how much."""
    names = {*functions["before"], *functions["after"]}
    gained = {
        name: functions["after"].get(name, 0) - functions["before"].get(name, 0) for name in names
    }
    return ", ".join(
        f"{by:+} {name}"
        for name, by in sorted(gained.items(), key=lambda item: -abs(item[1]))[:shown]
        if by
    )


def _verdict(found: dict[str, Counts]) -> int:
    for kind in KINDS:
        if ratios := {
            name: _ratio(both, kind) for name, both in found.items() if both["before"][kind]
        }:
            most = max(ratios, key=lambda name: ratios[name])
            span = f"{min(ratios.values()):.3f} to {ratios[most]:.3f} ({most})"
            print(f"{kind}: {span} of before, median {statistics.median(ratios.values()):.3f}")
    more = [
        f"{name} ({kind} {_told(both, kind)})"
        for name, both in found.items()
        for kind in _more(both)
    ]
    print(f"{len(found)} methods; more than {MORE} times as much: {', '.join(more) or 'none'}")
    return 1 if more or not found else 0


# -- in a tree's process ---------------------------------------------------------------------------


def _count(options: argparse.Namespace) -> None:
    first, every = (int(number) for number in options.share.split("/"))
    for setting, name, experiment, steady in islice(
        experiments_of(options.child, options.lines), first, None, every
    ):
        import torch

        import nestling
        from nestling import EngineConfig, Evaluation

        torch.set_num_threads(1)
        warm = max(WARM[options.device], steady if options.device != "cpu" else 0)
        # what a run does half-way and at its end is no part of a round
        rounds = 10 * (warm + COUNTED)
        asked = experiment.with_changes(
            rounds=rounds,
            engine=EngineConfig("cohort", device=options.device),
            evaluate=Evaluation(every=rounds, clients=2),
        )
        if options.device == "cpu":
            asked = asked.with_changes(train=replace(experiment.train, epochs=1, batch=1000))
        counts, functions = Counter[str](), Counter[str]()
        with contextlib.suppress(Enough):
            nestling.run(
                asked,
                watcher=nestling.Watcher(round=_counter(counts, functions, warm, options.device)),
            )
        told = {kind: counts[kind] for kind in KINDS}
        print(json.dumps({"name": f"{setting} {name}", **told, "functions": functions}), flush=True)


def _counter(counts: Counter[str], functions: Counter[str], warm: int, device: str) -> Any:
    """What is called after every round: it begins to count after the warm ones, and ends the run
    after those that count."""
    done, profiler = Counter[str](), _profiler(device)

    def seen(frame: Any, event: str, what: Any) -> None:
        if event == "call":
            counts["calls"] += 1
            functions[frame.f_code.co_name] += 1
        elif event == "c_call":
            counts["calls"] += 1
            name = getattr(what, "__qualname__", "")
            functions[f"{name} in {frame.f_code.co_name}"] += 1
            if name.startswith(("Tensor", "TensorBase", "_VariableFunctions")):
                counts["torch"] += 1
                counts["waits"] += name.rpartition(".")[2] in WAITING

    def after_round(_: Any) -> None:
        done["rounds"] += 1
        if done["rounds"] == warm:
            if profiler:
                profiler.start()
            sys.setprofile(seen)
        elif done["rounds"] == warm + COUNTED:
            sys.setprofile(None)
            if profiler:
                profiler.stop()
                counts.update(_kind_of(event) for event in profiler.events())
            raise Enough

    return after_round


def _profiler(device: str) -> Any:
    if device == "cpu":
        return None
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)


def _kind_of(event: Any) -> str:
    """What the profiler saw: work on the device, a call of the runtime, or what is counted
    elsewhere."""
    if event.device_type.name == "CUDA":
        return "copies" if event.name.startswith(("Memcpy", "Memset")) else "kernels"
    if event.name.startswith("cu"):
        return "syncs" if "Synchronize" in event.name else "runtime"
    return "others"


if __name__ == "__main__":
    sys.exit(main())

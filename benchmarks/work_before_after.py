"""Whether a change gives the host more to do in a round: calls of two source trees, counted, method by method.

    python benchmarks/work_before_after.py BEFORE [--after TREE] [--lines a,b] [--out FILE]

BEFORE is the folder of another checkout. Milliseconds on a GPU move from process to process (`gpu_before_after.py`); calls
hardly do. Here both trees play the same rounds of the settings of `gpu_table.py`, in stacks, with one batch per epoch, and
every call of the last two rounds is counted: Python functions, functions in C, among them torch's, and those that on a GPU
may wait for it or copy to it (shown, not judged: tensors of the host are among them). Needs no GPU, and says nothing of time
on one. Ends with 1 if a method makes more than 1.03 times as many calls as before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from two_trees import environment_of, experiments_of, parser_of

MORE = 1.03
WARM, COUNTED = 3, 2
WAITING = ("item", "tolist", "cpu", "numpy", "to", "nonzero", "__bool__", "__int__", "__float__", "equal", "isfinite")
KINDS = ("calls", "torch", "waits")


class Enough(Exception):
    """What is left of a run is not counted."""


def main() -> int:
    options = parser_of(__doc__).parse_args()
    if options.child:
        _count(options)
        return 0
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    children = {which: _child(tree, options.lines) for which, tree in trees.items()}
    found: dict[str, dict[str, dict[str, int]]] = {}
    while lines := {which: child.stdout.readline() for which, child in children.items() if child.stdout}:
        if not all(lines.values()):
            break
        both = {which: json.loads(line) for which, line in lines.items()}
        name = both["before"].pop("name")
        assert both["after"].pop("name") == name, "the trees play different methods"
        found[name] = both
        print(f"{name}: " + "; ".join(f"{kind} {_told(both, kind)}" for kind in KINDS), flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))
    assert all(child.wait() == 0 for child in children.values()), "a tree ended early"
    return _verdict(found)


def _child(tree: Path, lines: str) -> subprocess.Popen[str]:
    env = environment_of(tree, PYTHONHASHSEED="0", CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, __file__, "--child", str(tree), "--lines", lines]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def _ratio(both: dict[str, dict[str, int]], kind: str) -> float:
    return both["after"][kind] / max(both["before"][kind], 1)


def _told(both: dict[str, dict[str, int]], kind: str) -> str:
    return f"{both['before'][kind]} -> {both['after'][kind]} ({_ratio(both, kind):.3f})"


def _verdict(found: dict[str, dict[str, dict[str, int]]]) -> int:
    worst = {kind: max(((_ratio(both, kind), name) for name, both in found.items()), default=(0.0, "-")) for kind in KINDS}
    print(
        f"\n{len(found)} methods; the most of before: "
        + ", ".join(f"{kind} {r:.3f} ({name})" for kind, (r, name) in worst.items())
    )
    return 1 if not found or worst["calls"][0] > MORE else 0


# -- in a tree's process -----------------------------------------------------------------------------------------------------------


def _count(options: argparse.Namespace) -> None:
    rounds = WARM + COUNTED + 1
    for setting, name, experiment, _ in experiments_of(options.child, options.lines):
        import torch

        import nestling
        from nestling import EngineConfig, Evaluation

        torch.set_num_threads(1)
        asked = experiment.with_changes(
            rounds=rounds,
            engine=EngineConfig("cohort", device="cpu"),
            evaluate=Evaluation(every=rounds, clients=2),
            train=replace(experiment.train, epochs=1, batch=1000),
        )
        counts = Counter[str]()
        with contextlib.suppress(Enough):
            nestling.run(asked, watcher=nestling.Watcher(round=_counter(counts)))
        sys.setprofile(None)
        print(json.dumps({"name": f"{setting} {name}", **{kind: counts[kind] for kind in KINDS}}), flush=True)


def _counter(counts: Counter[str]) -> Any:
    """What is called after every round: it begins to count after the warm ones, and ends the run after those that count."""
    done = Counter[str]()

    def seen(_frame: Any, event: str, what: Any) -> None:
        if event == "call":
            counts["calls"] += 1
        elif event == "c_call":
            counts["calls"] += 1
            name = getattr(what, "__qualname__", "")
            if name.startswith(("Tensor", "TensorBase", "_VariableFunctions")):
                counts["torch"] += 1
                counts["waits"] += name.rpartition(".")[2] in WAITING

    def after_round(_: Any) -> None:
        done["rounds"] += 1
        if done["rounds"] == WARM:
            sys.setprofile(seen)
        elif done["rounds"] == WARM + COUNTED:
            sys.setprofile(None)
            raise Enough

    return after_round


if __name__ == "__main__":
    sys.exit(main())

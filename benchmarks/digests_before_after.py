"""Whether a change moves a bit of any result: digests of what every method ends with, of two source
trees.

    python benchmarks/digests_before_after.py BEFORE [--after TREE] [--lines a,b] [--share K/N]
        [--out FILE]

BEFORE is the folder of another checkout. Both trees play three rounds of every row of
`gpu_table.py` on a CPU: in this process with one batch per epoch, the same stopped after two rounds
and resumed, by two worker processes, and by the cohort engine in batches so small that equal
clients are one stack. What is
compared is the server's state, tensor by tensor and whatever the tensors are called, the loss and
the bytes of every round. `--share 0/2` plays every second method, so that two processes can share
the work. Ends with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from two_trees import environment_of, experiments_of, parser_of

ROUNDS, STOPPED, STACKED = 3, 2, 4


def main() -> int:
    options = _options()
    if options.child:
        _play(options)
        return 0
    children = [_child(tree.resolve(), options) for tree in (options.before, options.after)]
    found: dict[str, list[str]] = {}
    while all(lines := [child.stdout.readline() for child in children if child.stdout]):
        (name, one), (other_name, other) = (json.loads(line) for line in lines)
        assert name == other_name, "the trees play different methods"
        found[name] = [one, other]
        print(f"{name}: {'the same' if one == other else 'DIFFERENT'} {one[:12]}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(found, indent=1))
    assert all(child.wait() == 0 for child in children), "a tree ended early"
    different = [name for name, (one, other) in found.items() if one != other]
    print(f"{len(found) - len(different)} of {len(found)} the same")
    return 1 if different or not found else 0


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--share", default="0/1", help="K/N: every Nth method, from the Kth on")
    return parser.parse_args()


def _child(tree: Path, options: argparse.Namespace) -> subprocess.Popen[str]:
    env = environment_of(tree, CUDA_VISIBLE_DEVICES="")
    command = [sys.executable, __file__, "--child", str(tree), "--lines", options.lines]
    command += ["--share", options.share]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


# -- in a tree's process ---------------------------------------------------------------------------


def _play(options: argparse.Namespace) -> None:
    first, every = (int(number) for number in options.share.split("/"))
    rows = experiments_of(options.child, options.lines)
    for setting, name, experiment, _ in islice(rows, first, None, every):
        from nestling import Evaluation

        asked = experiment.with_changes(
            rounds=ROUNDS,
            train=replace(experiment.train, epochs=1, batch=1000),
            evaluate=Evaluation(every=ROUNDS, clients=2),
        )
        for form, play in FORMS.items():
            print(json.dumps([f"{setting} {name}, {form}", _digest(play(asked))]), flush=True)


def _inline(asked: Any) -> Any:
    import nestling

    return nestling.run(asked.with_changes(engine=nestling.EngineConfig("inline")))


def _pool(asked: Any) -> Any:
    import nestling

    return nestling.run(asked.with_changes(engine=nestling.EngineConfig("pool", workers=2)))


def _cohort(asked: Any) -> Any:
    """In batches so small that equal clients are one stack."""
    import nestling

    engine = nestling.EngineConfig("cohort", device="cpu")
    small = replace(asked.train, batch=STACKED)
    return nestling.run(asked.with_changes(engine=engine, train=small))


def _resumed(asked: Any) -> Any:
    """Stopped between two rounds, and gone on with: what a run does by its length stays."""
    import nestling

    class Stopped(Exception):
        pass

    def after_round(metrics: Any) -> None:
        if metrics["round"] == STOPPED:
            raise Stopped

    with tempfile.TemporaryDirectory() as home:
        with contextlib.suppress(Stopped):
            nestling.run(
                asked.with_changes(engine=nestling.EngineConfig("inline")),
                out=f"{home}/run",
                watcher=nestling.Watcher(round=after_round),
            )
        return nestling.resume(f"{home}/run")


FORMS: dict[str, Callable[[Any], Any]] = {
    "in-process": _inline,
    "pool": _pool,
    "cohort": _cohort,
    "resumed": _resumed,
}


def _digest(result: Any) -> str:
    """Of the server's tensors in the order of their own digests, and of every round's figures."""
    tensors = sorted(
        hashlib.sha256(_content(t)).digest()
        for part in result.federation.state().values()
        for t in part.values()
    )
    figures = [
        [row["round"], row["loss"], row["bytes_up"], row["bytes_down"]] for row in result.metrics
    ]
    told = json.dumps(figures).encode()
    return hashlib.sha256(b"".join(tensors) + told).hexdigest()


def _content(tensor: Any) -> bytes:
    """Of a single number its value, whatever type a tree keeps its counters in."""
    if tensor.dim() == 0:
        return str(float(tensor)).encode()
    return f"{tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.cpu().numpy().tobytes()


if __name__ == "__main__":
    sys.exit(main())

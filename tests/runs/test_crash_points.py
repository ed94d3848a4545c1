"""A run that is killed at any step whatever, and gone on with, is the run that was never killed,
bit for bit: its models, its metrics, what its clients keep."""

from __future__ import annotations

import atexit
import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nestling
from nestling import Data, EngineConfig, Evaluation, Experiment, Named, Server, SplitConfig
from nestling.runs import checkpoint, loop, run
from nestling.runs.folder import RunFolder
from nestling.store import ClientStore
from tests.runs.crash_points import EVERY, Steps, in_child
from tests.small import small

ROUNDS = 3
PLACES = [
    *((loop, name) for name in ("send", "train", "admit", "keep", "merge_round", "evaluate")),
    *((ClientStore, name) for name in ("put", "sync", "covered")),
    (checkpoint, "save"),
    (RunFolder, "log"),
    *((run, name) for name in ("summarise", "write_report")),
]
"""The steps of a round and of a run, beside those that leave a trace on the disk."""


@dataclass(frozen=True)
class Case:
    """A kind of run. `every`: seconds between checkpoints; rarely means after the first round and
    after the last, so that clients have kept more than the checkpoint knows."""

    method: str
    engine: str = "inline"
    every: float = 0.0
    changes: Mapping[str, Any] = field(default_factory=dict)

    def experiment(self) -> Experiment:
        """A run of a moment."""
        given = {
            "rounds": ROUNDS,
            "data": Data("npz", str(few_rows())),
            "model": Named("tinycnn", {"channels": [4, 4]}),
            "engine": EngineConfig(self.engine, 1),
            "split": SplitConfig(kind="dirichlet", alpha=1.0, size=20, public=0.1),
            "evaluate": Evaluation(every=2, clients=1),
        }
        return small(self.method, **{**given, **self.changes})


@cache
def few_rows() -> Path:
    """A data set that is read and tested in no time."""
    draw = np.random.default_rng(0)
    path = Path(tempfile.mkdtemp()) / "rows.npz"
    atexit.register(shutil.rmtree, path.parent)
    x = draw.integers(0, 256, (200, 8, 8), dtype=np.uint8)
    np.savez(path, x=x, y=np.arange(200) % 4)
    return path


RARELY = 1e9
CASES = {
    "weights": Case("heterofl"),
    "a server's optimiser and mean": Case(
        "shared-average", changes={"server": Server("adam", average=2)}
    ),
    "memory": Case("fedproto"),
    "memory, rare checkpoints": Case("fedproto", every=RARELY),
    "records and memory": Case("fedmd", every=RARELY),
    "stacks": Case("heterofl", "cohort"),
    "stacks with memory": Case("fedproto", "cohort", RARELY),
}
SLICE = 29
"""Of the points of a case, every so-manieth is tried in `make test`."""


def started(case: Case, out: Path, last: int = 0) -> Steps:
    """Runs the experiment in this process, and kills it at a step."""
    steps = Steps(out.parent, last)
    steps.watch(PLACES)
    _checkpoints(case.every)
    nestling.run(case.experiment(), out=out)
    return steps


def _checkpoints(every: float) -> None:
    """In this process a checkpoint comes so many seconds after the last one."""
    inner = run._Saver.__init__

    def outer(saver: Any, home: Any, federation: Any, _: float) -> None:
        inner(saver, home, federation, every)

    run._Saver.__init__ = outer  # type: ignore[method-assign]


def gone_on(case: Case, out: Path) -> None:
    """What whoever finds a dead run does: goes on with its folder, or starts it again where there
    is none."""
    _checkpoints(case.every)
    nestling.resume(out) if out.exists() else nestling.run(case.experiment(), out=out)


def traces(out: Path) -> dict[str, Any]:
    """All that a run leaves behind, but how long it took."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    state, totals = checkpoint.load(out) or ({}, None)
    store = ClientStore(out / "clients")
    store.resume(ROUNDS)
    kept = {client: digest({"kept": dict(store.get(client))}) for client in sorted(store._versions)}
    weights = out / "global.safetensors"
    return {
        "rows": [{k: v for k, v in row.items() if k != "seconds"} for row in rows],
        "summary": {k: v for k, v in summary.items() if k not in ("seconds",)},
        "state": digest(state),
        "totals": totals,
        "kept": kept,
        "weights": hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else "",
        "experiment": (out / "experiment.toml").read_text(),
        "report": (out / "report.html").exists(),
    }


def digest(parts: Mapping[str, Any]) -> str:
    """Equal for the same tensors in the same order."""
    found = hashlib.sha256()
    for kind, part in parts.items():
        for name, tensor in part.items():
            found.update(f"{kind}/{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def undisturbed(case: Case, home: Path) -> tuple[dict[str, Any], list[str]]:
    """What a run leaves that nobody kills, and the names of its steps."""
    nestling.run(case.experiment())  # what is imported and worked out once is there in every fork
    whole = home / "whole" / "run"
    whole.parent.mkdir()
    listed = home / "steps.json"

    def count() -> None:
        listed.write_text(json.dumps(started(case, whole).names))

    assert in_child(count)
    return traces(whole), json.loads(listed.read_text())


def tried(case: Case, home: Path, wanted: dict[str, Any], point: int) -> None:
    """A run killed at a point, and gone on with."""
    out = home / str(point) / "run"
    out.parent.mkdir()
    assert not in_child(lambda: started(case, out, point)), "it was not killed"
    assert in_child(lambda: gone_on(case, out))
    found = traces(out)
    assert found == wanted, {
        key: (found[key], wanted[key]) for key in wanted if found[key] != wanted[key]
    }


@pytest.mark.parametrize("name", CASES)
def test_a_run_killed_at_some_of_its_steps_goes_on(name: str, tmp_path: Path) -> None:
    wanted, names = undisturbed(CASES[name], tmp_path)
    first = 1 + 4 * list(CASES).index(name)  # other steps in every case
    for point in range(first, len(names) + 1, SLICE):
        tried(CASES[name], tmp_path, wanted, point)


@pytest.mark.minutes
@pytest.mark.parametrize("name", CASES)
def test_a_run_killed_all_along_goes_on(name: str, tmp_path: Path) -> None:
    wanted, names = undisturbed(CASES[name], tmp_path)
    for point in range(1, len(names) + 1, EVERY):
        tried(CASES[name], tmp_path, wanted, point)
    print(f"{name}: {len(names)} points")

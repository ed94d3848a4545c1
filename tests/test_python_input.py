"""What is given from Python and is of another kind than wanted: refused before anything is done, in
words that name the field and say what is wanted; or taken, where it can mean one thing only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import nestling
from nestling import Data, EngineConfig, Evaluation, Experiment, FleetConfig, InputError, Named
from nestling import SplitConfig as Split
from nestling.methods.submodel.heterofl import HeteroFL
from nestling.schema import one_or_more
from tests.small import small

ANY: Any = nestling
"""For calls that mypy would refuse, which is what is tested."""

CASES: list[tuple[Callable[[], object], str, str]] = [
    (lambda: ANY.Experiment(rounds="3"), "rounds", "expected a whole number, got '3'"),
    (lambda: ANY.Experiment(rounds=2.5), "rounds", "expected a whole number, got 2.5"),
    (lambda: ANY.Experiment(rounds=True), "rounds", "expected a whole number, got True"),
    (lambda: ANY.Experiment(seed=None), "seed", "expected a whole number, got None"),
    (lambda: ANY.Experiment(method=7), "method", "a Method object, got 7 (`nestling methods`"),
    (lambda: ANY.Experiment(method=HeteroFL), "method", "make an object of it: HeteroFL("),
    (lambda: ANY.Experiment(method=Named(ANY)), "method.name", "expected a text"),
    (lambda: ANY.Experiment(method=HeteroFL(scaler="no")), "method.scaler", "true or false"),
    (lambda: ANY.Experiment(model=3), "model", "an nn.Module, got 3 (`nestling models`"),
    (lambda: ANY.Experiment(model=nn.Linear), "model", "make an object of it: Linear("),
    (lambda: ANY.Experiment(split="iid"), "split", "write split=nestling.SplitConfig(kind='iid')"),
    (lambda: ANY.Experiment(engine="pool"), "engine", "nestling.EngineConfig(name='pool')"),
    (lambda: ANY.Experiment(train="adam"), "train", "expected a Train, got 'adam'"),
    (lambda: ANY.Experiment(train={"lr": "fast"}), "train.lr", "expected a number, got 'fast'"),
    (lambda: ANY.Experiment(train={"rate": 1}), "train.rate", "unknown field 'rate'"),
    (lambda: ANY.Experiment(fleet=5), "fleet", "a FleetConfig or a list of Tiers, got 5"),
    (lambda: ANY.Experiment(fleet=[5]), "fleet.tiers[0]", "got 5"),
    (lambda: Experiment(fleet=FleetConfig(size=ANY)), "fleet.size", "a whole number"),
    (lambda: ANY.Experiment(data=[1, 2]), "data", "got [1, 2] (write data=nestling.Data.of(x, y))"),
    (lambda: ANY.Experiment(data=np.zeros((99, 9))), "data", "Data.of(x, y), got array("),
    (lambda: Experiment(data=Data(features=ANY)), "data.features", "expected a list"),
    (lambda: ANY.SplitConfig(alpha="x"), "split.alpha", "expected a number, got 'x'"),
    (lambda: Experiment(split=Split(alpha=-1)), "split.alpha", "must be above 0"),
    (lambda: Experiment(engine=EngineConfig(workers=ANY)), "engine.workers", "a whole number"),
    (lambda: ANY.Evaluation(metrics=print), "evaluate.metrics", "expected a list of functions"),
    (lambda: ANY.Evaluation(metrics="a:b"), "evaluate.metrics", "expected a list of functions"),
    (lambda: ANY.run("heterofl"), "experiment", "nestling.Experiment(method='heterofl')"),
    (lambda: ANY.run("a/b.toml"), "experiment", "nestling.Experiment.read('a/b.toml')"),
    (lambda: ANY.run(Path("b.toml")), "experiment", "nestling.Experiment.read('b.toml')"),
    (lambda: ANY.run(3), "experiment", "expected a nestling.Experiment, got 3"),
    (lambda: ANY.run(watcher=print), "watcher", "write watcher=nestling.Watcher(round=print)"),
    (lambda: ANY.run(out=3), "out", "expected the path of a folder, got 3"),
    (lambda: ANY.compare(3), "folders", "expected the path of a run folder, got 3"),
    (lambda: ANY.compare(["a", "b"]), "folders", "the path of a run folder, got ['a', 'b']"),
    (lambda: ANY.compare("a", target="0.9"), "--target", "no score"),
    (lambda: ANY.compare("a", by=3), "by", "expected a list, got 3"),
    (lambda: ANY.load(3), "path", "expected the path of a folder, got 3"),
    (lambda: ANY.resume(None), "path", "expected the path of a folder, got None"),
    (lambda: ANY.resume("a", overrides=3), "overrides", "expected a list, got 3"),
    (lambda: ANY.sweep("fedavg", out="s"), "experiment", "Experiment(method='fedavg')"),
    (lambda: ANY.sweep(out=3), "out", "expected the path of a folder, got 3"),
    (lambda: ANY.sweep(out="s", methods=3), "methods", "expected a list, got 3"),
    (lambda: ANY.sweep(out="s", methods=[3]), "sweep.methods", "3 is no method"),
    (lambda: ANY.sweep(out="s", methods="fedagv"), "method.name", "did you mean 'fedavg'"),
    (lambda: ANY.sweep(out="s", seeds="3"), "sweep.seeds", "'3' are no seeds"),
    (lambda: ANY.sweep(out="s", seeds=2.5), "sweep.seeds", "2.5 are no seeds"),
    (lambda: ANY.sweep(out="s", vary=3), "vary", "expected a table, got 3"),
    (lambda: ANY.sweep(out="s", vary={"split.alpha": 1}), "sweep.vary.split.alpha", "a list"),
    (lambda: ANY.sweep(out="s", target=90), "sweep.target", "a score"),
    (lambda: ANY.sweep(out="s", jobs="2"), "jobs", "expected a whole number, got '2'"),
    (lambda: ANY.sweep(out="s", log=3), "log", "expected a list, got 3"),
    (lambda: ANY.sweep(out="s", watcher=print), "watcher", "SweepWatcher(round=print)"),
    (lambda: ANY.sweep(out="s", watcher=ANY.Watcher()), "watcher", "nestling.SweepWatcher, got"),
]


@pytest.mark.parametrize(("call", "field", "said"), CASES)
def test_what_is_of_another_kind_is_refused_by_its_field(
    call: Callable[[], object],
    field: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        call()
    assert error.value.field == field and said in str(error.value)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_what_can_mean_one_thing_only_is_taken(tmp_path: Path) -> None:
    numbers = ANY.Experiment(rounds=np.int64(3), time_budget=np.float32(0.5), seed=np.uint8(1))
    assert numbers == Experiment(rounds=3, time_budget=0.5, seed=1)
    dicts = ANY.Experiment(
        method={"name": "hetero-fl", "scaler": False},
        train={"lr": 1, "milestones": [4]},
        split={"kind": "iid"},
        fleet=[{"ratio": 1.0}],
        data={"path": tmp_path, "features": ["a"]},
    )
    written = tmp_path / "e.toml"
    for experiment in (numbers, dicts):
        written.write_text(experiment.to_toml())
        assert Experiment.read(written) == experiment
    assert dicts.method == Named("heterofl", {"scaler": False})
    assert dicts.train.lr == 1.0 and dicts.fleet.tiers[0].ratio == 1.0
    assert Evaluation(metrics=[max]).metrics == ("builtins:max",)


def test_one_thing_stands_for_a_list_of_it(tmp_path: Path) -> None:
    assert one_or_more("a", "field") == ("a",) and one_or_more(["a", "b"], "field") == ("a", "b")
    alone = HeteroFL(scaler=False)
    for name, method in (("name", "fedavg"), ("object", alone)):
        out = tmp_path / name
        found = nestling.sweep(small(rounds=1), out=out, methods=method, seeds=[np.int64(4)])  # type: ignore[list-item]
        assert [row.seeds for row in found.rows] == [[4]]
    folder = next((tmp_path / "name" / "runs").glob("fedavg-seed4"))
    gone_on = nestling.resume(folder, overrides="rounds=2")  # type: ignore[arg-type]
    assert gone_on.summary["rounds_done"] == 2
    compared = nestling.compare(folder, by="method", columns="global_last")
    assert [column.key for column in compared.columns] == ["global_last"]

"""Published tables: what comes with the package can be played, and a table is played in pieces,
each run once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nestling import Experiment, InputError
from nestling.cli import app
from nestling.data import DATASETS
from nestling.devices import Budget, make_fleet
from nestling.methods.submodel.flexfl import FlexFL
from nestling.models import build
from nestling.runs import reproduction as reproducing
from nestling.runs.assemble import assemble, reference_network
from nestling.runs.reproduction import joined, names, outcome_of, read, reproduce, save
from nestling.runs.run import Watcher
from nestling.world import plan_tiers
from tests.small import small

PAPER = """
title = "A table"
measure = "average"
targets = [0.0, 1.0]
seeds = 2
[choices]
rows = "sixty a client"
[experiment]
rounds = 4
seed = 3
participants = 2
data = { name = "mnist12k" }
model = { name = "tinycnn", channels = [4, 8, 8] }
split = { size = 40 }
train = { epochs = 1 }
engine = { name = "inline", device = "cpu" }
evaluate = { clients = 2 }
[experiment.fleet]
size = 4
tiers = [
  { name = "half", ratio = 0.5, share = 0.5 },
  { name = "whole", ratio = 1.0, share = 0.5 },
]
[lines.HeteroFL]
published = [1, 0]
experiment = { method = { name = "heterofl", scaler = false } }
[lines."All, large"]
published_accuracy = 0.5
experiment = { method = "all-large" }
"""


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    (tmp_path / "table.toml").write_text(PAPER)
    return tmp_path / "table.toml"


@pytest.mark.parametrize("name", names())
def test_every_paper_makes_experiments(name: str) -> None:
    found = read(name)
    assert found.title and found.paper and found.choices
    for line in found.lines:
        made = [found.of(line, seed) for seed in range(2)]
        assert made[1].seed == made[0].seed + 1 and made[0].make_method().info.title


@pytest.mark.parametrize("name", names())
def test_every_line_of_a_paper_suits_its_data(name: str) -> None:
    """As far as it can be told without the rows: the split, the fleet, and every network on inputs
    of the data's shape."""
    found, seen = read(name), set()
    for line in found.lines:
        experiment = found.of(line, 0)
        shape, classes = (
            DATASETS[experiment.data.name].shape,
            DATASETS[experiment.data.name].classes,
        )
        assert shape is not None and classes is not None
        experiment.split.check(classes)
        fleet = make_fleet(experiment.fleet, experiment.seed)
        assert len(fleet) >= experiment.participants and min(fleet.counts) > 0
        for network, options in _networks(experiment):
            if (key := (network, repr(options))) not in seen:
                seen.add(key)
                with torch.device("meta"):
                    assert build(network, shape=shape, classes=classes, **options)(
                        torch.empty(2, *shape)
                    ).shape == (2, classes)


def _networks(experiment: Experiment) -> list[tuple[str, dict[str, object]]]:
    own = [(tier.model, tier.model_options) for tier in experiment.fleet.tiers if tier.model]
    return (
        [*own, (experiment.model.name, experiment.model.options)] if experiment.model.name else own
    )


@pytest.mark.parametrize(
    ("name", "line", "blocks"),
    [("fedin-table-1", "FedIN", [4, 6, 8, 10, 12]), ("depthfl-table-2", "DepthFL", [2, 4, 6, 8])],
)
def test_tiers_of_unequal_depth_hold_the_published_networks(
    name: str, line: str, blocks: list[int]
) -> None:
    experiment = read(name).of(line, 0)
    shape = DATASETS[experiment.data.name].shape
    assert shape is not None
    main = reference_network(experiment.model.name, experiment.model.options, shape, 10, 0, "main")
    plans = plan_tiers(make_fleet(experiment.fleet, 0), {"main": main}, main, Budget(1, 1, 1))
    held = [
        {key.rsplit(".conv1.")[0] for key in plan.piece.view.names if ".conv1." in key}
        for plan in plans.values()
    ]
    assert [len(found) for found in held] == blocks


@pytest.mark.parametrize("name", ["flexfl-table-x", "flexfl-table-ii"])
def test_flexfl_s_tiers_hold_the_published_shares_of_the_model(name: str) -> None:
    """A quarter, a half and the whole of its parameters, not of its width."""
    fleet = read(name).of("FlexFL", 0).fleet
    pool = assemble(
        small(FlexFL(levels=(0.25, 0.5, 1.0), ratios="uniform"), fleet=fleet, participants=10)
    )[1].method.pool
    assert [pool.rungs[pool.most(tier.name)].size for tier in fleet.tiers] == [0.25, 0.5, 1.0]


def test_a_line_changes_what_it_names_and_nothing_else(paper: Path) -> None:
    found = read(str(paper))
    assert (
        found.of("HeteroFL", 1).method.options == {"scaler": False}
        and found.of("HeteroFL", 1).seed == 4
    )
    assert found.of("All, large", 0, ("rounds=2",)).rounds == 2
    assert joined({"a": {"name": "x", "b": 1}}, {"a": {"name": "y"}}) == {"a": {"name": "y"}}
    assert joined({"a": {"name": "x", "b": 1}}, {"a": {"c": 2}}) == {
        "a": {"name": "x", "b": 1, "c": 2}
    }


def test_a_table_is_played_in_pieces(paper: Path, tmp_path: Path) -> None:
    """Time that is up after every round plays them one by one; the result is that of a table played
    at once."""
    found, rounds, pieces = read(str(paper)), [], 0
    standing = once = reproduce(found, tmp_path / "once", seeds=1)
    while pieces < 20 and (pieces == 0 or any(outcome.done < 4 for outcome in standing)):
        standing = reproduce(
            found, tmp_path / "pieces", seeds=1, minutes=1e-9, watcher=Watcher(round=rounds.append)
        )
        pieces += 1
        assert (
            (standing[0].device, standing[0].commit) == (once[0].device, once[0].commit) != ("", "")
        )
    assert 6 <= pieces < 20 and len(rounds) >= 8
    for one, other in zip(once, standing, strict=True):
        assert (one.line, one.seed, one.done, one.last, one.best) == (
            other.line,
            other.seed,
            other.done,
            other.last,
            other.best,
        )
        assert one.reached == {"0": 1, "1": None} == other.reached


def test_the_command_writes_ours_beside_the_published(
    paper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results" / "table.json"
    arguments = [
        "reproduce",
        str(paper),
        "--lines",
        "HeteroFL",
        "--runs",
        str(tmp_path / "runs"),
        "--out",
        str(out),
    ]
    app(arguments, standalone_mode=False)
    text = capsys.readouterr().out
    assert "1 (1)" in text and "– (never)" in text and "rows: sixty a client" in text
    written = json.loads(out.read_text())
    assert written["published"]["All, large"]["accuracy"] == 0.5 and [
        run["seed"] for run in written["ours"]
    ] == [3, 4]
    before = outcome_of(read(str(paper)), "HeteroFL", 0, tmp_path / "runs" / "table" / "heterofl-0")
    app(arguments, standalone_mode=False)  # nothing is left to play
    assert before == outcome_of(
        read(str(paper)), "HeteroFL", 0, tmp_path / "runs" / "table" / "heterofl-0"
    )


def test_lines_that_are_played_one_by_one_stand_in_one_file(paper: Path, tmp_path: Path) -> None:
    found, out = read(str(paper)), tmp_path / "table.json"
    for line in ("HeteroFL", "All, large"):
        save(
            found,
            reproduce(found, tmp_path / "runs", lines=[line], seeds=1, overrides=("rounds=1",)),
            out,
        )
    (longer,) = reproduce(
        found, tmp_path / "runs", lines=["HeteroFL"], seeds=1, overrides=("rounds=2",)
    )
    save(found, [longer], out)
    assert {run["line"]: run["done"] for run in json.loads(out.read_text())["ours"]} == {
        "HeteroFL": 2,
        "All, large": 1,
    }
    out.write_text("{}")
    with pytest.raises(InputError, match=r"no file of results.*name another file"):
        save(found, [longer], out)


def test_what_was_played_otherwise_is_said_and_stands_beside_it(
    paper: Path, tmp_path: Path
) -> None:
    found, out = read(str(paper)), tmp_path / "results.json"
    line = next(iter(found.lines))
    for number, changes in enumerate([(), ("train.lr=0.01",)]):
        played = reproduce(
            found,
            tmp_path / f"runs{number}",
            lines=[line],
            seeds=1,
            overrides=("rounds=1", *changes),
        )
        save(found, played, out)
    ours = json.loads(out.read_text())["ours"]
    assert [(run["line"], run["set"]) for run in ours] == [(line, []), (line, ["train.lr=0.01"])]
    assert ours[0]["last"] != ours[1]["last"]


def test_runs_of_another_experiment_are_not_gone_on_with(paper: Path, tmp_path: Path) -> None:
    found = read(str(paper))
    reproduce(found, tmp_path / "runs", lines=["HeteroFL"], seeds=1, overrides=("rounds=1",))
    (longer,) = reproduce(
        found, tmp_path / "runs", lines=["HeteroFL"], seeds=1, overrides=("rounds=2",)
    )
    assert longer.done == longer.rounds == 2
    with pytest.raises(InputError, match=r"another experiment.*--runs"):
        reproduce(
            found, tmp_path / "runs", lines=["HeteroFL"], seeds=1, overrides=("train.lr=0.5",)
        )


def test_what_is_not_there_is_named(paper: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="flexfl-table-x"):
        read("flexfl-table-y")
    with pytest.raises(InputError, match="HeteroFL"):
        reproduce(read(str(paper)), tmp_path, lines=["FedAvg"])
    (tmp_path / "bad.toml").write_text(PAPER.replace("published = [1, 0]", "published = [1]"))
    with pytest.raises(InputError, match="1 rounds for 2 targets"):
        read(str(tmp_path / "bad.toml"))


def test_papers_come_with_the_package() -> None:
    assert reproducing.HOME.is_dir() and {
        "heterofl-mnist",
        "fedin-table-1",
        "depthfl-table-2",
    } <= set(names())

"""A run folder is data: whatever its experiment names, opening it runs no code that the user did
not name."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import nestling
from nestling import Evaluation, FleetConfig, InputError, Named, Tier
from nestling.cli.main import main
from nestling.files import read_sealed, read_toml, sealed
from nestling.fleet.node.exporting import export_device
from nestling.fleet.protocol.courier import LoopCourier
from nestling.fleet.protocol.wire import Welcome
from nestling.fleet.server.engine import Patience
from nestling.fleet.server.serving import play
from nestling.runs import reproduction
from nestling.runs.analysis import analyse
from nestling.runs.export import export
from nestling.runs.run import opened
from nestling.runs.sweep import Sweep
from tests.fleet.loop import six, workers_of
from tests.small import small

MODULE = "made_by_a_stranger"
NETWORK, METHOD = f"{MODULE}:network", f"{MODULE}:Average"
CODE = """
from pathlib import Path
from nestling.methods.baselines.fedavg import FedAvg as Average
from nestling.models import build
Path(__file__).with_suffix(".ran").touch()
def network(*, shape, classes):
    return build("tinycnn", shape=shape, classes=classes, channels=[8, 16, 16])
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that is written when the stranger's module, which lies on the path, is imported."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / f"{MODULE}.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    yield tmp_path / "path" / f"{MODULE}.ran"
    sys.modules.pop(MODULE, None)


def in_the_method(table: dict[str, Any]) -> None:
    table["method"] = {"name": METHOD}


def in_the_model(table: dict[str, Any]) -> None:
    table["model"] = {"name": NETWORK}


def in_a_tier(table: dict[str, Any]) -> None:
    table["fleet"]["tiers"][0] |= {"model": NETWORK, "ratio": 0.0}


def in_the_list(table: dict[str, Any]) -> None:
    table["fleet"]["networks"] = [{"name": NETWORK}]
    table["fleet"]["tiers"][0] |= {"device": "raspberry-pi-4", "ratio": 0.0}


def in_a_fleet_file(table: dict[str, Any]) -> None:
    in_a_tier(table)
    table["fleet"]["path"] = "fleet.toml"


def in_the_data(table: dict[str, Any]) -> None:
    table["data"] = {"name": f"{MODULE}:rows"}


PLACES = [in_the_method, in_the_model, in_a_tier, in_the_list, in_a_fleet_file, in_the_data]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as it should be."""
    folder = tmp_path_factory.mktemp("honest") / "run"
    nestling.run(small("fedmd", evaluate=Evaluation(every=1, clients=2)), out=folder)
    return folder


def hostile(honest: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a run folder whose experiment names the stranger's code."""
    shutil.copytree(honest, folder)
    table = read_toml(folder / "experiment.toml")
    change(table)
    if table["fleet"].get("path"):
        tiers = table["fleet"].pop("tiers")
        (folder / "fleet.toml").write_text(tomli_w.dumps({"tiers": tiers}))
    (folder / "experiment.toml").write_text(tomli_w.dumps(table))
    return folder


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["nestling", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


@pytest.mark.parametrize("change", PLACES)
def test_no_command_imports_what_a_folder_names(
    change: Callable[[dict[str, Any]], None],
    honest: Path,
    ran: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = str(hostile(honest, tmp_path / "run", change))
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ("run", "--resume", folder),
        ("run", "--resume", folder, "--set", "rounds=3"),
        ("run", "--resume", folder, "--trust", f"{MODULE}:other"),
        ("analyse", folder, "--clients", "2", "--rows", "20"),
        ("export", folder, "--device", "large"),
    ):
        assert call(monkeypatch, *arguments) == 2, arguments
        said = capsys.readouterr().err
        assert f"{MODULE}:" in said and "--trust" in said and len(said.splitlines()) == 1, said
    for arguments in (
        ("report", folder),
        ("compare", folder, str(honest)),
        ("watch", folder, "--once"),
    ):
        assert call(monkeypatch, *arguments) == 0, arguments  # these need no network
    assert not ran.exists() and MODULE not in sys.modules


@pytest.mark.parametrize("change", PLACES)
def test_no_function_imports_what_a_folder_names(
    change: Callable[[dict[str, Any]], None], honest: Path, ran: Path, tmp_path: Path
) -> None:
    folder = hostile(honest, tmp_path / "run", change)
    for function in (
        lambda: nestling.resume(folder),
        lambda: opened(folder).__enter__(),
        lambda: nestling.load(folder).model,
        lambda: export(folder, device="large"),
        lambda: analyse(folder),
        # a server goes on with a folder: its user named another experiment, or none
        lambda: play(LoopCourier({}), None, folder),
        lambda: play(LoopCourier({}), small("fedmd"), folder),
    ):
        with pytest.raises(InputError, match=f"{MODULE}:"):
            function()
    assert not ran.exists() and MODULE not in sys.modules


def test_a_metric_of_a_folder_is_not_imported(
    honest: Path,
    ran: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Who goes on with the run is refused; what only looks at its models needs no metric."""
    score = f"{MODULE}:score"

    def measured(table: dict[str, Any]) -> None:
        table["evaluate"]["metrics"] = [score]

    path = hostile(honest, tmp_path / "run", measured)
    folder = str(path)
    monkeypatch.chdir(tmp_path)
    for more in ((), ("--set", "rounds=3"), ("--trust", f"{MODULE}:other")):
        assert call(monkeypatch, "run", "--resume", folder, *more) == 2
        said = capsys.readouterr().err
        assert score in said and "--trust" in said and len(said.splitlines()) == 1, said
    for function in (
        lambda: nestling.resume(path),
        lambda: play(LoopCourier({}), None, path),
        lambda: play(LoopCourier({}), small("fedmd"), path),
    ):
        with pytest.raises(InputError, match=score):
            function()
    for words in (
        ("analyse", folder, "--clients", "2", "--rows", "20"),
        ("export", folder, "--device", "large", "--format", "c"),
        ("report", folder),
        ("compare", folder, str(honest)),
        ("watch", folder, "--once"),
    ):
        assert call(monkeypatch, *words) == 0, (words, capsys.readouterr().err)
    assert not ran.exists() and MODULE not in sys.modules


@pytest.mark.parametrize("change", PLACES)
@pytest.mark.parametrize("asked", ["honest", "hostile", "none"])
def test_a_sweep_imports_nothing_that_its_folder_names(
    change: Callable[[dict[str, Any]], None],
    asked: str,
    honest: Path,
    ran: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither the runs in it nor the files beside them, which say what was asked for."""
    mine = small("fedmd", evaluate=Evaluation(every=1, clients=2), rounds=3)
    (tmp_path / "mine.toml").write_text(mine.to_toml())
    (cell,) = Sweep(mine, seeds=(0,)).cells()
    runs = tmp_path / "hostile" / "runs"
    folder = hostile(honest, runs / cell.name, change)
    if asked != "none":
        text = mine.to_toml() if asked == "honest" else (folder / "experiment.toml").read_text()
        (runs / f"{cell.name}.toml").write_text(text)
    head = {"studied": [NETWORK], "cells": [cell.name, METHOD], "target": METHOD}
    (tmp_path / "hostile" / "sweep.json").write_text(json.dumps(head))
    monkeypatch.chdir(tmp_path)
    arguments = ("sweep", "mine.toml", "--seeds", "0,", "--jobs", "1", "--out", "hostile")
    assert call(monkeypatch, *arguments) in (1, 2)
    told = capsys.readouterr()
    said = told.out + told.err
    assert "names code to import" in said or "of another experiment" in said, said
    assert not ran.exists() and MODULE not in sys.modules


@pytest.mark.parametrize("change", [in_the_method, in_a_tier])
def test_what_the_user_names_is_imported(
    change: Callable[[dict[str, Any]], None],
    honest: Path,
    ran: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = read_toml(honest / "experiment.toml")
    change(table)
    mine, run = tmp_path / "mine.toml", str(tmp_path / "run")
    mine.write_text(tomli_w.dumps(table | {"rounds": 1}))
    assert call(monkeypatch, "run", str(mine), "--out", run, "--quiet") == 0 and ran.exists()
    name = METHOD if change is in_the_method else NETWORK
    go_on = ("run", "--resume", run, "--quiet", "--set", "rounds=2")
    assert call(monkeypatch, *go_on) == 2
    assert call(monkeypatch, *go_on, "--trust", name) == 0
    assert call(monkeypatch, "analyse", run, "--rows", "20", "--trust", name) == 0
    assert nestling.resume(run, overrides=("rounds=3",), trust=[name]).metrics[-1]["round"] == 3


def test_a_devices_folder_is_data_too(
    ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the server's experiment names is imported for an export where the user names it too."""
    workers = workers_of(tmp_path / "devices", 1)
    courier = LoopCourier({0: workers[0].handle})
    tiers = (Tier(name="one", ratio=1.0, count=1),)
    experiment = six("local", rounds=1, fleet=FleetConfig(tiers=tiers))
    experiment = experiment.with_changes(model=Named("tinycnn", {"channels": [8, 16, 16]}))
    play(courier, experiment, tmp_path / "server", patience=Patience(poll=0.0))
    device = tmp_path / "devices" / "0"
    (path,) = (device / "runs").glob("*/welcome")
    told = Welcome.from_bytes(read_sealed(path))
    for change in PLACES:
        table = experiment.to_table()
        change(table)
        if table["fleet"].get("path"):
            (tmp_path / "fleet.toml").write_text(tomli_w.dumps({"tiers": table["fleet"]["tiers"]}))
            table["fleet"] = {"path": str(tmp_path / "fleet.toml")}
        welcome = replace(told, experiment=tomli_w.dumps(table))
        path.write_bytes(sealed(welcome.to_bytes()))
        words = ("export", str(device), "--data", "experiment")
        for more in ((), ("--trust", f"{MODULE}:other")):
            assert call(monkeypatch, *words, *more) == 2, change
            said = capsys.readouterr().err
            assert f"{MODULE}:" in said and "--trust" in said and len(said.splitlines()) == 1, said
    assert not ran.exists() and MODULE not in sys.modules
    table = experiment.to_table()
    in_the_model(table)
    path.write_bytes(sealed(replace(told, experiment=tomli_w.dumps(table)).to_bytes()))
    export_device(device, data="experiment", formats=("c",), trust=[NETWORK])
    assert ran.exists() and (device / "export-one" / "model.c").exists()


def test_the_block_ends_and_the_users_own_names_work_again(
    honest: Path, ran: Path, tmp_path: Path
) -> None:
    """While a folder is open, and after one was refused, the user's experiments are as before."""
    with pytest.raises(InputError):
        nestling.resume(hostile(honest, tmp_path / "run", in_the_model))
    with opened(honest):
        assert not ran.exists()
        nestling.run(small(METHOD, rounds=1))
    assert ran.exists()


def test_a_table_of_the_users_own_goes_on(ran: Path, tmp_path: Path) -> None:
    """`reproduce` opens folders of its own making: what the table names is the user's word, and
    what the folder or the note beside it names is not."""
    table = small(METHOD, rounds=2).to_table()
    paper = reproduction.Paper(
        experiment=table, lines={"one": reproduction.TableLine()}, targets=(), title="t"
    )
    reproduction.reproduce(paper, tmp_path / "runs", overrides=("rounds=1",))
    (found,) = reproduction.reproduce(paper, tmp_path / "runs", overrides=("rounds=2",))
    assert found.done == 2 and ran.exists()
    other = reproduction.Paper(
        experiment=small("fedavg").to_table(), lines={"one": reproduction.TableLine()}, title="t"
    )
    with pytest.raises(InputError, match=METHOD):
        reproduction.reproduce(other, tmp_path / "runs")


def test_methods_of_ours_given_as_objects_need_no_trust(tmp_path: Path) -> None:
    from nestling.methods.baselines.fedavg import FedAvg

    nestling.run(small(FedAvg(), rounds=1), out=tmp_path / "run")
    assert nestling.resume(tmp_path / "run", overrides=("rounds=2",)).metrics[-1]["round"] == 2


def test_trust_is_for_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(monkeypatch, "run", "--trust", NETWORK) == 2


def test_a_network_that_would_be_fetched_from_elsewhere_is_refused(
    honest: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`torch.hub:load` is code of torch that runs code of anybody's."""
    called: list[object] = []
    monkeypatch.setattr("torch.hub.load", lambda *words, **_: called.append(words))
    model = {"name": "torch.hub:load", "options": {"repo_or_dir": "mallory/net", "model": "net"}}
    folder = str(hostile(honest, tmp_path / "run", lambda table: table.update(model=model)))
    for words in (
        ("run", "--resume", folder),
        ("analyse", folder),
        ("export", folder, "--device", "large"),
    ):
        assert call(monkeypatch, *words) == 2
        assert "torch.hub:load" in capsys.readouterr().err
    assert not called

"""Methods × seeds × settings: what is killed goes on at its cell, and the table is that of an
undisturbed sweep."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

import nestling
from nestling import Data, Experiment, InputError, Named
from nestling.cli.main import main
from nestling.files import read_toml
from nestling.methods.submodel.heterofl import HeteroFL
from nestling.runs.cell import rounds_done
from nestling.runs.sweep import Sweep, SweepWatcher, play_sweep, read_sweep, room, seeds_of, sweep
from nestling.schema import to_table
from tests.runs.test_fingerprint import arrays, heads, on_arrays
from tests.shell import ROOT
from tests.small import TIERS, small

FILES = ("table.md", "table.tex", "table.csv")


def tables(folder: Path) -> list[str]:
    return [(folder / name).read_text() for name in FILES]


def written(path: Path, **sweeping: Any) -> Path:
    path.write_text(tomli_w.dumps({**small(rounds=4).to_table(), "sweep": sweeping}))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that nobody disturbed."""
    out = tmp_path_factory.mktemp("sweep") / "whole"
    sweep(small(rounds=4), out=out, methods=["fedavg", "heterofl"], seeds=2, jobs=1)
    return out


def test_a_sweep_is_a_folder_that_compare_reads(whole: Path) -> None:
    found = nestling.compare(whole)
    assert [(row.label, row.seeds) for row in found.rows] == [
        ("FedAvg", [0, 1]),
        ("HeteroFL", [0, 1]),
    ]
    assert found.cautions == [] and len(found.gaps) == 1
    assert {path.name for path in whole.iterdir()} == {
        "sweep.json",
        "runs",
        *(f"table.{suffix}" for suffix in ("md", "tex", "csv", "json", "html")),
    }
    alone = nestling.run(small("heterofl", rounds=4, seed=1)).summary["global_score"]["last"]
    assert found.rows[1].values["global_last"][1] == alone


def test_several_at_once_give_the_same_table(whole: Path, tmp_path: Path) -> None:
    rounds: list[str] = []
    watcher = SweepWatcher(round=lambda name, _: rounds.append(name))
    sweep(
        small(rounds=4),
        out=tmp_path / "s",
        methods=["fedavg", "heterofl"],
        seeds=2,
        jobs=2,
        watcher=watcher,
    )
    assert tables(tmp_path / "s") == tables(whole)
    assert len(rounds) == 16 and len(set(rounds)) == 4


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_killed_sweep_goes_on_at_its_cell(whole: Path, tmp_path: Path, jobs: int) -> None:
    file = written(tmp_path / "s.toml", methods=["fedavg", "heterofl"], seeds=2)
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "nestling", "sweep", str(file), "--out", str(out)]
    command += ["--jobs", str(jobs), "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        # while the second run or a later one is under way
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None:
            if (out / "runs" / "fedavg-seed1" / "metrics.jsonl").exists():
                break
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    logs = list((out / "runs").glob("*/metrics.jsonl"))
    assert logs and not (out / "table.md").exists()
    done = [path.parent.name for path in (out / "runs").glob("*/summary.json")]
    again: list[str] = []
    made = read_sweep(file)
    found = play_sweep(
        made, out, jobs=1, watcher=SweepWatcher(ended=lambda name, _: again.append(name))
    )
    assert not set(done) & set(again)  # what was done is not played again
    assert found.cautions == [] and tables(out) == tables(whole)


def test_a_stopped_sweep_goes_on(whole: Path, tmp_path: Path) -> None:
    """As ctrl-C stops it: after a round, with a checkpoint."""
    played: list[str] = []
    stop = SweepWatcher(round=lambda name, _: played.append(name), stop=lambda: len(played) >= 5)
    options: dict[str, Any] = {"methods": ["fedavg", "heterofl"], "seeds": 2, "jobs": 1}
    found = sweep(small(rounds=4), out=tmp_path / "s", watcher=stop, **options)
    assert played == ["fedavg-seed0"] * 4 + ["fedavg-seed1"]
    assert any("fedavg-seed1 is not finished: 1 of 4 rounds" in text for text in found.cautions)
    rest: list[str] = []
    watcher = SweepWatcher(round=lambda name, _: rest.append(name))
    sweep(small(rounds=4), out=tmp_path / "s", watcher=watcher, **options)
    assert rest.count("fedavg-seed1") == 3 and "fedavg-seed0" not in rest
    assert tables(tmp_path / "s") == tables(whole)


def test_a_sweep_grows(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "s")
    played: list[str] = []
    watcher = SweepWatcher(ended=lambda name, _: played.append(name))
    found = sweep(
        small(rounds=4), out=tmp_path / "s", methods=["heterofl"], seeds=[2], watcher=watcher
    )
    assert played == ["heterofl-seed2"]
    assert {row.label: row.seeds for row in found.rows} == {
        "FedAvg": [0, 1],
        "HeteroFL": [0, 1, 2],
    }


def test_settings_are_swept_over_and_ranked_apart(tmp_path: Path) -> None:
    found = sweep(
        small(rounds=1),
        out=tmp_path / "s",
        methods=["fedavg", Named("heterofl", {"scaler": False})],
        seeds=[3],
        vary={"split.alpha": [0.1, 1.0]},
        target=0.01,
    )
    assert found.cautions == [] and found.by == ("method", "split.alpha")
    assert [(row.method, row.studied) for row in found.rows] == [
        ("FedAvg", {"split.alpha": "0.1"}),
        ("HeteroFL", {"split.alpha": "0.1"}),
        ("FedAvg", {"split.alpha": "1.0"}),
        ("HeteroFL", {"split.alpha": "1.0"}),
    ]
    assert sum(row.marks.get("global_last") == "best" for row in found.rows) == 2
    assert found.to_latex().count("\\midrule") == 2
    assert [row.values["target_rounds"] for row in found.rows] == [{3: 1}] * 4


def test_rounds_and_what_counts_of_the_engine_are_swept_over(tmp_path: Path) -> None:
    found = sweep(
        small("fedavg"),
        out=tmp_path / "s",
        seeds=1,
        vary={"rounds": [1, 3], "engine.transport": ["float32", "fp16"]},
    )
    assert found.cautions == [] and found.by == ("rounds", "engine.transport")
    assert [row.studied for row in found.rows] == [
        {"rounds": rounds, "engine.transport": how}
        for rounds in ("1", "3")
        for how in ("float32", "fp16")
    ]
    done = {path.name: rounds_done(path) for path in (tmp_path / "s" / "runs").glob("*seed0")}
    assert done == {
        f"fedavg-rounds{rounds}-transport{how}-seed0": rounds
        for rounds in (1, 3)
        for how in ("float32", "fp16")
    }
    with pytest.raises(InputError, match="of another experiment"):  # and no cell is taken for it
        changed = small("fedavg", engine=nestling.EngineConfig("inline", precision="tf32"))
        sweep(
            changed, out=tmp_path / "s", seeds=1, vary={"rounds": [1], "engine.transport": ["fp16"]}
        )
    precisions = {"engine.precision": ["float32", "bf16"]}
    cells = Sweep(small("fedavg"), seeds=(0,), vary=precisions).cells()
    assert [c.experiment.engine.precision for c in cells] == ["float32", "bf16"]


def test_a_sweep_goes_on_from_anywhere_and_after_it_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fleet and data in files beside its own, all of them named by the way there."""
    home = tmp_path / "home"
    home.mkdir()
    for seed, name in enumerate(("a.npz", "b.npz")):
        arrays(home / name, seed=seed)
    fleet = {"tiers": [to_table(tier) for tier in TIERS]}
    (home / "fleet.toml").write_text(tomli_w.dumps(fleet))
    table = on_arrays("a.npz", rounds=2).to_table()
    table |= {"fleet": {"path": "fleet.toml"}, "method": {"name": "fedavg"}}
    table["sweep"] = {"seeds": 1, "vary": {"data.path": ["a.npz", "b.npz"]}}
    (home / "s.toml").write_text(tomli_w.dumps(table))
    names = {"fedavg-patha.npz-seed0", "fedavg-pathb.npz-seed0"}

    def played(file: str, out: str, *overrides: str) -> set[str]:
        ended: list[str] = []
        watcher = SweepWatcher(ended=lambda name, _: ended.append(name))
        found = play_sweep(read_sweep(file, overrides), Path(out), jobs=1, watcher=watcher)
        assert found.cautions == []
        return set(ended)

    monkeypatch.chdir(home)
    assert played("s.toml", "out") == names
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert played("../home/s.toml", "../home/out") == set()
    assert played("../home/s.toml", "../home/out", "rounds=3") == names
    home.rename(tmp_path / "moved")
    assert played("../moved/s.toml", "../moved/out", "rounds=3") == set()
    assert played("../moved/s.toml", "../moved/out", "rounds=4") == names
    fleet["tiers"][0]["count"] = 3
    (tmp_path / "moved" / "fleet.toml").write_text(tomli_w.dumps(fleet))
    with pytest.raises(InputError, match="of another experiment"):
        played("../moved/s.toml", "../moved/out")


def test_a_cell_of_an_earlier_version_that_names_its_fleets_file_goes_on(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(tomli_w.dumps({"tiers": [to_table(t) for t in TIERS]}))
    experiment = small("fedavg", fleet=str(tmp_path / "f.toml"), rounds=1)
    sweep(experiment, out=tmp_path / "s", seeds=1)
    asked = tmp_path / "s" / "runs" / "fedavg-seed0.toml"
    assert Experiment.read(asked).fleet.path == "" and len(Experiment.read(asked).fleet.tiers) == 3
    table = read_toml(asked) | {"fleet": {"path": "gone.toml"}}
    asked.write_text(tomli_w.dumps(table))
    found = sweep(experiment.with_changes(rounds=2), out=tmp_path / "s", seeds=1)
    assert found.cautions == [] and rounds_done(asked.with_suffix("")) == 2
    with pytest.raises(InputError, match="of another experiment"):
        sweep(experiment.with_changes(participants=1), out=tmp_path / "s", seeds=1)


def test_rows_that_were_given_are_swept_over_too(tmp_path: Path) -> None:
    with np.load(arrays(tmp_path / "d.npz")) as rows:
        experiment = on_arrays("", data=Data.of(rows["x"], rows["y"]))
    for rounds in (1, 2):  # the second time it goes on
        found = sweep(
            experiment.with_changes(rounds=rounds),
            out=tmp_path / "s",
            seeds=1,
            vary={"split.alpha": [0.5, 1.0]},
            jobs=1,
        )
        assert found.cautions == [] and len(found.rows) == 2


def test_data_may_be_what_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arrays(tmp_path / "a.npz"), arrays(tmp_path / "b.npz", seed=1)
    found = sweep(
        on_arrays("a.npz", rounds=1), out="s", seeds=1, vary={"data.path": ["a.npz", "b.npz"]}
    )
    assert len(found.rows) == 2 and not any("DATA" in text for text in found.cautions)
    assert "b.npz" in found.rows[1].studied["data"]


def test_objects_are_swept_over_too(tmp_path: Path) -> None:
    experiment = small(model=heads(2), rounds=1)
    methods: list[Any] = ["fedavg", HeteroFL(scaler=False), HeteroFL()]
    found = sweep(experiment, out=tmp_path / "s", methods=methods, seeds=2, jobs=1)
    assert len(found.rows) == 3 and all(row.seeds == [0, 1] for row in found.rows)
    longer = experiment.with_changes(rounds=2)
    again = sweep(longer, out=tmp_path / "s", methods=methods, seeds=2, jobs=1)
    assert again.cautions == []


def test_a_cell_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    path = arrays(tmp_path / "d.npz")
    found = sweep(
        on_arrays(path, rounds=1),
        out=tmp_path / "s",
        seeds=1,
        vary={"data.path": [str(path), str(tmp_path / "none.npz")]},
        jobs=1,
    )
    assert len(found.rows) == 1
    assert any("failed: data.path" in text for text in found.cautions)


def test_a_folder_of_another_sweep_is_refused_before_anything_is_played(
    whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "s")
    before = (tmp_path / "s" / "sweep.json").read_text()
    with pytest.raises(InputError, match="of another experiment"):
        sweep(small(rounds=4, participants=2), out=tmp_path / "s", methods=["fedavg"], seeds=2)
    assert (tmp_path / "s" / "sweep.json").read_text() == before


def test_two_sweeps_do_not_share_a_folder(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nestling.runs.sweep_cells.PATIENCE", 0.0)
    shutil.copytree(whole, tmp_path / "s")
    refused: list[str] = []

    def again(*_: object) -> None:
        with pytest.raises(InputError, match="another sweep is running"):
            sweep(small(rounds=4), out=tmp_path / "s", methods=["fedavg"], seeds=1)
        refused.append("refused")

    watcher = SweepWatcher(started=again)
    sweep(small(rounds=4), out=tmp_path / "s", methods=["fedavg"], seeds=1, watcher=watcher)
    assert refused == ["refused"]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"seeds": 0}, "sweep.seeds"),
        ({"seeds": [1, 1]}, "sweep.seeds"),
        ({"methods": "fedavg"}, "sweep.methods"),
        ({"methods": [3]}, "sweep.methods"),
        ({"vary": {"split.alpha": 0.1}}, "sweep.vary.split.alpha"),
        ({"vary": {"seed": [1]}}, "sweep.vary.seed"),
        ({"vary": {"method": ["fedavg"]}}, "sweep.vary.method"),
        ({"vary": {"engine": [{}]}}, "sweep.vary.engine"),
        ({"vary": {"engine.workers": [1, 2]}}, "sweep.vary.engine.workers"),
        ({"vary": {"engine.device": ["cpu"]}}, "sweep.vary.engine.device"),
        ({"vary": 3}, "sweep.vary"),
        ({"colour": 1}, "sweep.colour"),
    ],
)
def test_what_is_wrong_is_said_with_its_field(
    tmp_path: Path, given: dict[str, Any], field: str
) -> None:
    with pytest.raises(InputError) as error:
        read_sweep(written(tmp_path / "s.toml", **given))
    assert error.value.field == field


def test_bad_fields_and_methods_are_found_before_the_first_run(tmp_path: Path) -> None:
    for given in ({"methods": ["fedavg", "fedagv"]}, {"vary": {"split.alpa": [1]}}):
        with pytest.raises(InputError, match="did you mean"):
            sweep(small(), out=tmp_path / "s", **given)
    assert not (tmp_path / "s").exists()
    assert seeds_of(2, 5) == (5, 6)


def test_there_is_room_for_at_least_one() -> None:
    cells = Sweep(small(), seeds=(0, 1)).cells()
    assert 1 <= room(cells) <= 2 and room([]) == 1
    pool = small(engine=nestling.EngineConfig("pool", 2))
    assert room(Sweep(pool, seeds=(0, 1)).cells()) == 1


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.toml").write_text(small(rounds=1).to_toml())
    arguments = ["sweep", "e.toml", "--methods", "fedavg,heterofl", "--seeds", "0,7", "--jobs", "1"]
    arguments += ["--vary", "split.alpha=0.1,1.0", "--format", "csv"]
    monkeypatch.setattr("sys.argv", ["nestling", *arguments])
    with pytest.raises(SystemExit, match="0"):
        main()
    told = capsys.readouterr()
    assert told.out.splitlines()[0].startswith("label,method,split.alpha,seeds,global_last_mean")
    assert len(told.out.splitlines()) == 5
    head = json.loads((tmp_path / "runs" / "sweep-e" / "sweep.json").read_text())
    assert head["studied"] == ["method", "split.alpha"] and len(head["cells"]) == 8


def interrupted(folder: Path, *command: str, when: Callable[[int], bool]) -> tuple[str, str]:
    """What a command says on both outputs when ctrl-C is pressed as soon as `when`, which is told
    its process, answers: as on a terminal, every process that it started hears it. It must end as
    one that was interrupted."""
    process = subprocess.Popen(
        [sys.executable, "-m", "nestling", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None and not when(process.pid):
            time.sleep(0.02)
        assert process.poll() is None, "it ended before it could be interrupted"
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=240)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 130, err
    return out, err


def test_ctrl_c_ends_after_the_round_and_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(small(rounds=400).to_toml())
    metrics = tmp_path / "run" / "metrics.jsonl"
    out, err = interrupted(
        tmp_path,
        *("run", "e.toml", "--out", "run"),
        when=lambda _: metrics.exists() and metrics.stat().st_size > 100,
    )
    assert "run folder: run" in out.splitlines()[0]
    assert "go on with: nestling run --resume run" in err
    assert err.count("stopped") == 1 and "FOLDER" not in err  # said once, and with its name
    done = json.loads((tmp_path / "run" / "summary.json").read_text())["rounds_done"]
    assert len(metrics.read_text().splitlines()) == done < 400  # the checkpoint has them all
    gone_on = nestling.resume(tmp_path / "run", overrides=(f"rounds={done + 1}",))
    assert [row["round"] for row in gone_on.metrics] == list(range(1, done + 2))
    whole = nestling.run(small(rounds=done + 1))
    assert gone_on.summary["global_score"] == whole.summary["global_score"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_ends_a_sweep_after_its_rounds_and_the_same_command_goes_on(
    tmp_path: Path, jobs: int
) -> None:
    (tmp_path / "e.toml").write_text(small("fedavg", rounds=400).to_toml())
    command = ["sweep", "e.toml", "--seeds", "2", "--jobs", str(jobs), "--out", "s"]
    runs = tmp_path / "s" / "runs"

    def under_way(_: int) -> bool:
        logs = list(runs.glob("*/metrics.jsonl"))
        return len(logs) == jobs and all(log.stat().st_size > 100 for log in logs)

    out, err = interrupted(tmp_path, *command, when=under_way)
    assert err.count("finishing the round") == 1 and "Traceback" not in err
    assert err.count("stopped; the same command goes on where it stood") == 1
    assert "failed" not in out and "is not finished" in " ".join(out.split())
    done = [len(log.read_text().splitlines()) for log in runs.glob("*/metrics.jsonl")]
    assert len(done) == jobs and all(0 < rounds < 400 for rounds in done)
    most = max(done) + 1
    played: list[str] = []
    found = sweep(
        small("fedavg", rounds=most),
        out=tmp_path / "s",
        seeds=2,
        jobs=1,
        watcher=SweepWatcher(round=lambda name, _: played.append(name)),
    )
    assert len(played) == 2 * most - sum(done) and found.cautions == []
    alone = nestling.run(small("fedavg", rounds=most, seed=0)).summary["global_score"]["last"]
    assert found.rows[0].values["global_last"][0] == alone


def test_ctrl_c_while_processes_of_a_sweep_start_ends_them_quietly(tmp_path: Path) -> None:
    """On a terminal they hear it too, before they could ignore it; each plays a round and ends."""
    (tmp_path / "e.toml").write_text(small("fedavg", rounds=400).to_toml())
    command = ["sweep", "e.toml", "--seeds", "2", "--jobs", "2", "--out", "s", "--quiet"]

    def started(pid: int) -> bool:
        return (
            len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()) >= 3
        )  # beside both, one of Python's

    out, err = interrupted(tmp_path, *command, when=started)
    assert "Traceback" not in err and "failed" not in out


def test_a_process_that_dies_costs_its_cell_alone(tmp_path: Path) -> None:
    def kill(name: str, _: object) -> None:
        if name == "fedavg-seed0":
            for child in multiprocessing.active_children():
                if child.pid == holder(tmp_path / "s" / "runs" / name):
                    child.kill()

    options: dict[str, Any] = {"methods": ["fedavg"], "seeds": 3, "jobs": 2}
    found = sweep(small(rounds=40), out=tmp_path / "s", watcher=SweepWatcher(round=kill), **options)
    assert any("fedavg-seed0 failed: its process died" in text for text in found.cautions)
    assert [row.seeds for row in found.rows] == [[0, 1, 2]]  # as far as the first one came
    again = sweep(small(rounds=40), out=tmp_path / "s", **options)
    assert again.cautions == []


def holder(folder: Path) -> int:
    """The process that has taken a run folder."""
    inode = folder.stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] == "FLOCK" and words[5].split(":")[2] == str(inode):
            return int(words[4])
    return -1


def test_several_at_once_stop_after_their_rounds(whole: Path, tmp_path: Path) -> None:
    played: list[str] = []
    stop = SweepWatcher(round=lambda name, _: played.append(name), stop=lambda: len(played) >= 1)
    options: dict[str, Any] = {"methods": ["fedavg", "heterofl"], "seeds": 2, "jobs": 2}
    sweep(small(rounds=4), out=tmp_path / "s", watcher=stop, **options)
    assert set(played) <= {"fedavg-seed0", "fedavg-seed1"}
    sweep(small(rounds=4), out=tmp_path / "s", **options)
    assert tables(tmp_path / "s") == tables(whole)

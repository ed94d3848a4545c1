"""The run folder and the command line: what people script against."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import nestling
from nestling import FleetConfig, SplitConfig, Tier
from nestling.cli.main import main
from nestling.models import build
from nestling.runs.pictured import picture
from nestling.runs.sweep_cells import SweepWatcher
from tests.small import small
from tests.test_bad_input import SMALL, call


def test_the_folder_holds_what_it_promises(tmp_path: Path) -> None:
    result = nestling.run(small("heterofl"), out=tmp_path / "run")
    names = {p.name for p in (tmp_path / "run").iterdir()}
    promised = {
        "experiment.toml",
        "metrics.jsonl",
        "summary.json",
        "global.safetensors",
        "report.html",
        "federation.json",
    }
    assert promised <= names and not any(n.startswith(".") for n in names)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    keys = {
        "method",
        "seed",
        "rounds",
        "by_tier",
        "bytes_up",
        "bytes_down",
        "seconds",
        "refused",
        "commit",
    }
    assert keys <= summary.keys() and summary == result.summary
    assert {"last", "best"} <= summary["global_score"].keys() and {"last", "best"} <= summary[
        "personal_score"
    ].keys()
    assert set(summary["by_tier"]) == {"small", "middle", "large"}
    assert summary["bytes_up"] == sum(r["bytes_up"] for r in result.metrics)


def test_global_weights_load_without_nestling(tmp_path: Path) -> None:
    """Into a network built from its plain description, giving the accuracy that was reported."""
    result = nestling.run(small(), out=tmp_path / "run")
    network = build("tinycnn", shape=(1, 28, 28), classes=10, channels=(8, 16, 16))
    network.load_state_dict(load_file(tmp_path / "run" / "global.safetensors"))
    bench = result.federation.bench
    with torch.no_grad():
        right = (network.eval()(bench.x_test).argmax(1) == bench.y_test).float().mean()
    assert float(right) == pytest.approx(result.summary["global_score"]["last"])


def test_tensorboard_reads_along(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = nestling.run(small(), out=tmp_path / "run")
    reader = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    reader.Reload()
    got = [(e.step, e.value) for e in reader.Scalars("global_score")]
    assert got == [(r["round"], pytest.approx(r["global_score"])) for r in result.metrics]
    assert "small/personal_score" in reader.Tags()["scalars"]


def test_tensorboard_shows_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture when a command ends its run, and none where matplotlib is not installed."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("matplotlib")
    file = tmp_path / "small.toml"
    file.write_text(small().to_toml())

    def pictures(name: str) -> list[Any]:
        words = ["nestling", "run", str(file), "--out", str(tmp_path / name), "--quiet"]
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit, match="0"):
            main()
        reader = events.EventAccumulator(str(tmp_path / name / "tensorboard"))
        reader.Reload()
        assert [e.step for e in reader.Scalars("global_score")] == [1, 2]
        return reader.Images("scores") if reader.Tags()["images"] else []

    (shown,) = pictures("run")
    assert shown.step == 2 and (shown.width, shown.height) == (640, 480)
    assert shown.encoded_image_string.startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert pictures("without") == []


def test_a_picture_that_cannot_be_drawn_takes_nothing_from_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    nestling.run(small(), out=tmp_path / "run")

    def broken(**_: object) -> None:
        raise AttributeError("no fonts")

    monkeypatch.setattr(figure, "Figure", broken)
    picture(tmp_path / "run")
    assert "has no picture of its curves: AttributeError: no fonts" in caplog.text


def test_tensorboard_shows_the_curves_of_a_cell_that_is_done(tmp_path: Path) -> None:
    """A cell of a sweep has its picture once: not where it was stopped, but where it went on."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("matplotlib")
    rounds: list[str] = []
    stopping = SweepWatcher(round=lambda name, _: rounds.append(name), stop=lambda: bool(rounds))

    def pictures(watcher: SweepWatcher | None) -> list[int]:
        nestling.sweep(
            small(), out=tmp_path / "s", methods=["fedavg"], seeds=1, jobs=1, watcher=watcher
        )
        (folder,) = (path for path in (tmp_path / "s" / "runs").iterdir() if path.is_dir())
        reader = events.EventAccumulator(str(folder / "tensorboard"))
        reader.Reload()
        return [one.step for one in reader.Images("scores")] if reader.Tags()["images"] else []

    assert pictures(stopping) == []
    assert pictures(None) == [2]
    assert pictures(None) == [2]


def test_json_mode_prints_rounds_and_then_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", *SMALL, "--out", str(tmp_path / "run"), "--json"], monkeypatch) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("round") for row in lines[:-1]] == [1] and lines[-1][
        "method"
    ] == "shared-average"


def test_quiet_mode_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", *SMALL, "--out", str(tmp_path / "run"), "--quiet"], monkeypatch) == 0
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err == ""


def test_the_terminal_says_what_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", *SMALL, "--out", str(tmp_path / "run")], monkeypatch) == 0
    out = capsys.readouterr().out
    assert "ratio-0.5" in out and "report:" in out and "round 1/1" in out


@pytest.mark.parametrize("command", ["methods", "devices", "models"])
def test_listings(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call([command, "--json"], monkeypatch) == 0
    rows = json.loads(capsys.readouterr().out)
    assert call([command], monkeypatch) == 0
    shown = capsys.readouterr().out
    assert len(rows) >= 7 and rows[0]["name"] in shown


def test_fit_of_a_device_and_of_a_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["fit", "tinycnn", "--device", "nrf52840", "--json"], monkeypatch) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (
        0 < row["ratio"] < 1
        and row["need"]["ram"] <= row["limits"]["ram"]
        and row["binding"] == "ram"
    )
    fleet = (
        "[[tiers]]\ndevice = 'esp32'\ncount = 2\n[[tiers]]\ndevice = 'gpu-box'\ncount = "
        "1\n[[tiers]]\nmodel = 'mlp'\ncount = 1\n"
    )
    (tmp_path / "fleet.toml").write_text(fleet)
    assert (
        call(["fit", "tinycnn", "--fleet", str(tmp_path / "fleet.toml"), "--json"], monkeypatch)
        == 0
    )
    assert [r["tier"] for r in json.loads(capsys.readouterr().out)] == ["esp32", "gpu-box", "mlp"]
    assert (
        call(["fit", "resnet18", "--device", "stm32f100", "--shape", "3,32,32"], monkeypatch) == 0
    )
    assert "nothing fits" in capsys.readouterr().out


def test_reports_of_one_run_and_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        nestling.run(small(seed=ord(name)), out=tmp_path / name)
    assert call(["report", str(tmp_path / "a")], monkeypatch) == 0
    out = tmp_path / "both.html"
    assert (
        call(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)], monkeypatch)
        == 0
    )
    assert "Shared-average" in out.read_text()


def test_drop_outs_stragglers_and_changing_memory_are_played(tmp_path: Path) -> None:
    tiers = (
        Tier(name="flaky", ratio=0.5, count=10, availability=0.8, dropout=0.4),
        Tier(name="slow", ratio=1.0, count=10, slow=1.5),
        Tier(name="busy", ratio=1.0, count=10, memory_mean=80.0, memory_std=(30.0,)),
    )
    fleet = FleetConfig(tiers=tiers, deadline=0.02)
    result = nestling.run(
        small(fleet=fleet, rounds=3, participants=20, split=SplitConfig(size=20)),
        out=tmp_path / "run",
    )
    summary = result.summary
    assert summary["dropped"] > 0 and summary["late"] > 0
    assert summary["bytes_up"] < summary["bytes_down"]  # those that vanished sent nothing
    world = result.federation.world
    busy = world.fleet.member("busy", 0)
    sizes = {world.device(busy, r).piece.view.numel() for r in range(1, 30)}
    assert len(sizes) > 1 and max(sizes) <= world.plans["busy"].piece.view.numel()


def test_held_out_rows_measure_personal_score() -> None:
    result = nestling.run(
        small(
            "local",
            split=SplitConfig(kind="classes", classes=2, size=60, holdout=0.2),
            rounds=4,
            participants=0,
        )
    )
    split = result.federation.world.split
    assert (
        len(split.holdout(0)) > 0
        and result.summary["personal_score"]["last"] > result.summary["global_score"]["last"]
    )


def test_help_is_quick_to_import() -> None:
    """The command line must answer without loading torch."""
    code = "import sys, nestling.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

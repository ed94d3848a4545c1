"""`nestling export`: the model of one of a run's devices, with the report, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nestling import Data, FleetConfig, Named, SplitConfig, Tier
from nestling.devices import Figure, device
from nestling.errors import InputError
from nestling.export import sizes
from nestling.export.fold import fold
from nestling.export.quantise import quantise
from nestling.runs import run as running
from nestling.runs.export import calibration_rows, export, export_table, find_tier
from nestling.runs.run import Result
from nestling.tiny.runtime import toolchain
from tests.export.exported import exported, on_host
from tests.small import small

pytest.importorskip(
    "flatbuffers", reason="flatbuffers is not installed: pip install 'nestling[export]'"
)
pytest.importorskip("onnx", reason="onnx is not installed: pip install 'nestling[export]'")

TIERS = (
    Tier(name="left", device="nrf52840", count=1, ratio=0.5),
    Tier(name="right", device="nrf52840", count=1, ratio=0.5),
    Tier(device="stm32f405", count=1, ratio=0.25),
    Tier(name="large", ratio=1.0, count=1),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    experiment = small(fleet=FleetConfig(tiers=TIERS), split=SplitConfig(kind="iid", holdout=0.2))
    return running.run(experiment, out=tmp_path_factory.mktemp("exported") / "run")


def test_the_command_writes_the_files_and_the_report(run: Result, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "nestling.cli",
        "export",
        str(run.folder),
        "--device",
        "stm32f405",
        "--out",
        str(out),
    ]
    done = subprocess.run(
        [*command, "--calibration", "200", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert json.loads((out / "export.json").read_text()) == report
    assert set(report["files"]) == {"model.h", "model.c", "model.tflite", "model.onnx"}
    assert {name: (out / name).stat().st_size for name in report["files"]} == report["files"]
    assert report["device"] == "stm32f405" and report["test_rows"] == 2000
    assert report["ram"]["total"] == sum(
        report["ram"][part] for part in ("arena", "input", "output", "stack")
    )
    assert report["ram"]["there"] == 128 * 1024
    assert 0 < report["flash"]["weights"] < report["flash"]["total"] < report["flash"]["there"]
    assert abs(report["score_float"] - report["score_int8"]) < 0.02
    assert export_table(report).row_count >= 10


def test_the_model_is_that_of_the_tier_and_the_report_is_true(run: Result, tmp_path: Path) -> None:
    report = export(run, device="left", out=tmp_path / "out", formats=("c",), calibration=100)
    federation = run.federation
    module = run.model_for(federation.world.fleet.member("left", 0))
    assert module is not None
    assert report["parameters"] == sum(p.numel() for p in module.parameters())
    x, y = federation.bench.x_test, federation.bench.y_test
    with torch.no_grad():
        assert report["score_float"] == pytest.approx(
            float((module(x).argmax(-1) == y).float().mean())
        )
    rows = calibration_rows(federation.world, federation.bench, 100)
    quantised = quantise(fold(module, (1, 28, 28)), rows)
    # What the written source says is what the report says.
    logits = on_host(quantised, quantised.quantise(x), tmp_path)
    assert report["score_int8"] == pytest.approx(float((logits.argmax(-1) == y.numpy()).mean()))
    assert (tmp_path / "model.c").read_text() == (tmp_path / "out" / "model.c").read_text()


def test_it_is_calibrated_with_rows_that_clients_train_on(run: Result) -> None:
    world, bench = run.federation.world, run.federation.bench
    rows = calibration_rows(world, bench, 10**6)
    seen = {row.numpy().tobytes() for row in rows}
    held_out = np.concatenate([world.split.holdout(client) for client in range(len(world.fleet))])
    trained = np.concatenate([world.split.indices(client) for client in range(len(world.fleet))])
    assert len(held_out) and len(rows) == len(trained)
    assert seen == {bench.x[row].numpy().tobytes() for row in trained}
    assert len(calibration_rows(world, bench, 7)) == 7


def test_a_run_folder_has_a_place_for_it(run: Result) -> None:
    assert run.folder is not None
    report = export(run.folder, device="large", formats=("tflite",), calibration=50, name="net")
    assert Path(report["folder"]) == run.folder / "export-large"
    assert (run.folder / "export-large" / "net.tflite").exists()
    assert report["flash_estimate"]  # the tier names no device whose core could be compiled for


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "nrf52840"}, "several tiers.*left, right"),
        ({"device": "stm32f40"}, "did you mean 'stm32f405'"),
        ({"device": ""}, "unknown device"),
        ({"formats": ("c", "pt")}, "unknown format"),
        ({"calibration": 0}, "--calibration"),
        ({"name": "a-b"}, "name in C"),
    ],
)
def test_what_cannot_be_done_is_said(
    run: Result, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    settings = {"device": "left", "out": tmp_path / "out", "calibration": 20, **changes}
    with pytest.raises(InputError, match=words):
        export(run, **settings)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lacks", ["ram_bytes", "flash_bytes"])
def test_what_does_not_fit_is_refused_before_anything_is_written(
    run: Result, tmp_path: Path, lacks: str
) -> None:
    plans = run.federation.world.plans
    plan = find_tier(run.federation.world, "left")
    try:
        plans["left"] = replace(
            plan, profile=replace(plan.profile, **{lacks: Figure(2048, "datasheet")})
        )
        with pytest.raises(InputError, match=r"takes .* and nrf52840 has 2 KB"):
            export(run, device="left", out=tmp_path / "out", calibration=20)
    finally:
        plans["left"] = plan
    assert not (tmp_path / "out").exists()


def test_batch_statistics_cannot_be_exported(tmp_path: Path) -> None:
    result = running.run(
        small(rounds=1, model=Named("tinycnn", {"channels": [4, 8], "norm": "batch"}))
    )
    with pytest.raises(InputError, match="batch normalisation"):
        export(result, device="small", out=tmp_path / "out")


def test_static_batch_norm_is_exported_as_it_is_tested(tmp_path: Path) -> None:
    result = running.run(
        small(rounds=1, model=Named("tinycnn", {"channels": [4, 8], "norm": "sbn"}))
    )
    report = export(result, device="large", out=tmp_path / "out", formats=("c",))
    assert report["score_float"] == pytest.approx(
        result.metrics[-1]["by_tier"]["large"]["global_score"]
    )
    assert abs(report["score_int8"] - report["score_float"]) < 0.02


@pytest.mark.parametrize(
    "name", ["stm32f100", "nrf51822", "stm32f405", "rp2040", "stm32u575", "stm32h743", "esp32"]
)
def test_code_is_measured_for_every_core(name: str) -> None:
    if toolchain.arm_compiler() is None:
        pytest.skip("arm-none-eabi-gcc is not installed: apt-get install gcc-arm-none-eabi")
    found = sizes.sizes(exported("small-cnn")[1], device(name))
    assert 500 < found.flash["code"] < sizes.CODE_BYTES
    assert found.estimate == (name == "esp32")


def test_without_a_compiler_the_code_is_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "arm_compiler", lambda: None)
    for name, more in (("small-cnn", 0), ("tinycnn-group", sizes.FLOAT_CODE_BYTES)):
        found = sizes.sizes(exported(name)[1], device("nrf51822"))
        assert found.estimate and found.flash["code"] == sizes.CODE_BYTES + more


def test_a_missing_package_is_named() -> None:
    code = (
        "import sys; sys.modules['onnx'] = None\n"
        "from nestling.export import onnx_file\n"
        "from nestling.errors import InputError\n"
        "try: onnx_file.write(None, ())\n"
        "except InputError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install" in done.stdout and "onnx" in done.stdout


def test_a_network_of_token_ids_is_refused_in_words(tmp_path: Path) -> None:
    texts = small(
        "fedavg",
        rounds=1,
        data=Data("shakespeare", task="next-token", options={"steps": 8}),
        model=Named("gpt", {"dim": 8, "depth": 1, "heads": 2, "head_dim": 4, "hidden": 8}),
    )
    told = running.run(texts, out=tmp_path / "run")
    with pytest.raises(InputError, match="embedding of token ids"):
        export(told, device="small", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()

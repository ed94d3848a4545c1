"""`nestling export` of a device's folder: the model that stays there is the simulator's to the
bit."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from nestling import FleetConfig, SplitConfig, Tier, cli
from nestling.errors import InputError
from nestling.export.manifest import verify
from nestling.fleet.node.exporting import export_device, is_device_folder
from nestling.fleet.node.worker import Worker
from nestling.fleet.protocol.courier import LoopCourier
from nestling.fleet.protocol.wire import Member
from nestling.fleet.server.engine import Patience
from nestling.fleet.server.serving import play
from nestling.keys import make_keys
from nestling.runs import run as running
from nestling.runs.export import export
from tests.fleet.loop import six

pytest.importorskip(
    "flatbuffers", reason="flatbuffers is not installed: pip install 'nestling[export]'"
)
pytest.importorskip("onnx", reason="onnx is not installed: pip install 'nestling[export]'")

TIERS = (Tier(name="narrow", ratio=0.5, count=2), Tier(name="wide", ratio=1.0, count=1))
FILES = ("model.c", "model.h", "model.tflite", "model.onnx")


@dataclass
class Played:
    """A run as a fleet and in this process, and the client whose model is exported."""

    devices: Path
    server: Path
    simulated: running.Result
    client: int

    @property
    def device(self) -> Path:
        """The folder that `nestling join` would keep for the client."""
        return self.devices / str(self.client)


def fleet_of(method: Any, home: Path, **changes: Any) -> tuple[Path, Path]:
    """The run of a method with real workers: their devices' folders, and the server's."""
    experiment = of_three(method, **changes)
    workers = {
        c: Worker(home / "devices" / str(c) / "worker", [Member(f"device {c}", c)])
        for c in range(3)
    }
    courier = LoopCourier({100 - c: worker.handle for c, worker in workers.items()})
    patience = Patience(poll=0.0)
    play(courier, experiment, home / "server", min_clients=3, patience=patience)
    return home / "devices", home / "server"


def of_three(method: Any, **changes: Any) -> Any:
    """Two clients of one tier and one of another, who lack some classes."""
    split = SplitConfig(kind="dirichlet", alpha=0.3, size=60, public=0.02)
    return six(method, rounds=2, fleet=FleetConfig(tiers=TIERS), split=split, **changes)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Played]:
    """The run of a method, played once for all tests."""
    known: dict[str, Played] = {}

    def play_once(method: str) -> Played:
        if method not in known:
            home = tmp_path_factory.mktemp(method)
            simulated = running.run(of_three(method))
            client = simulated.federation.world.fleet.member("narrow", 0)
            known[method] = Played(*fleet_of(method, home), simulated, client)
        return known[method]

    return play_once


def same_files(a: Path, b: Path) -> bool:
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in FILES)


@pytest.mark.parametrize("method", ["fedproto", "fedper", "local"])
def test_the_device_writes_what_the_simulator_writes(
    method: str, played: Callable[[str], Played], tmp_path: Path
) -> None:
    """Byte for byte, though the device has neither the other clients' networks nor their rows."""
    run = played(method)
    shared = None if method == "local" else run.server
    there = export(run.simulated, device="narrow", out=tmp_path / "simulated")
    here = export_device(run.device, data="experiment", shared=shared, out=tmp_path / "device")
    assert same_files(tmp_path / "device", tmp_path / "simulated")
    assert {**here, "folder": ""} == {**there, "folder": ""} and here["client"] == run.client
    assert here["round"] == 2 and 0 < here["calibration_rows"] <= 60 and verify(tmp_path / "device")
    assert (run.simulated.federation.world.split.counts(run.client) == 0).any()
    other = next(c for c in range(3) if c not in (run.client, *_wide(run)))
    export_device(
        run.devices / str(other), data="experiment", shared=shared, out=tmp_path / "other"
    )
    assert not same_files(tmp_path / "device", tmp_path / "other")


def _wide(run: Played) -> list[int]:
    return [run.simulated.federation.world.fleet.member("wide", 0)]


@pytest.mark.parametrize("method", ["fedproto", "fedper"])
def test_with_rows_of_its_own_it_needs_no_others(
    method: str, played: Callable[[str], Played], tmp_path: Path
) -> None:
    """The rows of its share in a file: the same network and ranges, tested on what there is."""
    run = played(method)
    data = rows_of(run, tmp_path / "rows.npz")
    export(run.simulated, device="narrow", out=tmp_path / "simulated")
    here = export_device(run.device, data=data, shared=run.server, out=tmp_path / "device")
    assert same_files(tmp_path / "device", tmp_path / "simulated")
    assert here["test_rows"] == 60 and here["tested_on"] == "rows that it trained on"


def rows_of(run: Played, path: Path) -> str:
    world, bench = run.simulated.federation.world, run.simulated.federation.bench
    rows = world.split.indices(run.client)
    np.savez(path, x=bench.x[rows].numpy(), y=bench.y[rows].numpy())
    return str(path)


def test_the_command_knows_a_device_from_a_run(
    played: Callable[[str], Played], tmp_path: Path
) -> None:
    def asked(*words: object) -> tuple[int, str]:
        made = CliRunner().invoke(cli.app, [str(word) for word in words])
        return made.exit_code, made.output or str(made.exception)

    run = played("local")
    make_keys(tmp_path / "key")
    device = shutil.copytree(run.device, tmp_path / "device")
    code, said = asked("export", device, "--data", "experiment", "--sign", tmp_path / "key")
    assert code == 0 and "narrow" in said and "test rows" in said
    assert (
        "signed by" in asked("verify", device / "export-narrow", "--key", tmp_path / "key.pub")[1]
    )
    export(run.simulated, device="narrow", out=tmp_path / "simulated")
    assert same_files(device / "export-narrow", tmp_path / "simulated")
    for words, expected in (
        ((tmp_path,), "neither a run folder nor a device's"),
        ((run.server, "--device", "narrow"), "nestling export FOLDER --data DATA"),
        ((run.server, "--device", "narrow", "--data", "experiment"), "--data: "),
        ((run.server,), "--device: no device is named"),
    ):
        code, said = asked("export", *words)
        assert code and expected in said


def test_what_cannot_be_done_is_said(played: Callable[[str], Played], tmp_path: Path) -> None:
    run = played("fedproto")
    other, out = played("fedper"), tmp_path / "out"
    welcomed = tmp_path / "welcomed"
    shutil.copytree(run.device, welcomed)
    for path in (welcomed / "worker" / "runs").glob("*/*/result"):
        path.unlink()
    new = tmp_path / "new"
    Worker(new / "worker", [Member("new")])
    for folder, settings, words in (
        (tmp_path, {}, "not a device's folder"),
        (run.server, {}, "not a device's folder"),
        (new, {}, "no training is finished yet in"),
        (welcomed, {}, "no training is finished yet in the run"),
        (run.device, {"data": ""}, r"--data: .* join"),
        (run.device, {"data": str(tmp_path / "no.npz")}, r"--data: there is no \.npz file"),
        (run.device, {}, "--shared: a part of the model .* FedProto is on the server"),
        (run.device, {"shared": other.server}, "--shared: .* is of the run"),
        (run.device, {"shared": tmp_path}, "--shared: .* not the run folder of a fleet"),
        (run.device, {"run": "abc"}, "unknown run of this device 'abc'"),
        (run.device, {"client": 77}, "client 77 has not trained here"),
        (run.device, {"shared": run.server, "device": "wide"}, "is of tier 'narrow'"),
        (run.device, {"formats": ("pt",)}, "unknown format"),
    ):
        with pytest.raises(InputError, match=words):
            export_device(folder, **{"data": "experiment", "out": out, **settings})  # type: ignore[arg-type]
    assert not out.exists() and not is_device_folder(run.server)


def test_a_damaged_file_is_named(played: Callable[[str], Played], tmp_path: Path) -> None:
    run = played("fedper")
    device, server = tmp_path / "device", tmp_path / "server"
    shutil.copytree(run.device, device)
    shutil.copytree(run.server, server)
    (found,) = (device / "worker" / "runs").iterdir()
    memory = max((found / str(run.client) / "memory").iterdir())
    files = [found / "welcome", found / str(run.client) / "result", memory]
    for path in [*files, server / "checkpoint.bin", server / "roster.json"]:
        good = path.read_bytes()
        path.write_bytes(good[:-1])
        with pytest.raises(InputError, match=str(path)):
            export_device(device, data="experiment", shared=server, out=tmp_path / "out")
        path.write_bytes(good)
    for version in memory.parent.iterdir():
        version.unlink()
    with pytest.raises(InputError, match="kept after round 2 is not in"):
        export_device(device, data="experiment", shared=server, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_did_not_count_is_not_exported(
    played: Callable[[str], Played], tmp_path: Path
) -> None:
    """The server says which round of the client counted last: of a later one that came too late
    nothing is taken, as in the next round."""
    run = played("fedper")
    server = tmp_path / "server"
    shutil.copytree(run.server, server)
    roster = (server / "roster.json").read_text()
    assert '"counted": [\n    1,\n    2\n   ]' in roster
    edited = re.sub(r'\s*"sum": "[^"]*",', "", roster, count=1).replace(
        "    1,\n    2\n", "    1\n"
    )
    (server / "roster.json").write_text(edited)
    wanted = {"data": "experiment", "formats": ("onnx",)}
    export_device(run.device, shared=run.server, out=tmp_path / "second", **wanted)  # type: ignore[arg-type]
    export_device(run.device, shared=server, out=tmp_path / "first", **wanted)  # type: ignore[arg-type]
    first, second = ((tmp_path / way / "model.onnx").read_bytes() for way in ("first", "second"))
    assert first != second


def test_of_several_runs_the_newest_is_taken(
    played: Callable[[str], Played], tmp_path: Path
) -> None:
    run, device = played("local"), tmp_path / "device"
    shutil.copytree(run.device, device)
    (found,) = (device / "worker" / "runs").iterdir()
    older = found.parent / "0123456789abcdef"
    shutil.copytree(found, older)
    os.utime(older / "welcome", (1, 1))
    name = f"{run.client}.2.bin"
    (older / str(run.client) / "memory" / name).unlink()  # it ends a round earlier

    def onnx(where: str, **more: Any) -> bytes:
        export_device(device, data="experiment", out=tmp_path / where, formats=("onnx",), **more)
        return (tmp_path / where / "model.onnx").read_bytes()

    assert onnx("newest") == onnx("named", run=found.name) != onnx("older", run=older.name)
    (found / str(run.client) / "result").unlink()
    with pytest.raises(InputError, match=f"no training is finished .* --run {older.name}"):
        onnx("none")


def test_what_the_server_keeps_is_exported_there(tmp_path: Path) -> None:
    devices, _ = fleet_of("shared-average", tmp_path)
    with pytest.raises(InputError, match=r"are on the server .* nestling export RUN"):
        export_device(devices / "0", data="experiment", out=tmp_path / "out")

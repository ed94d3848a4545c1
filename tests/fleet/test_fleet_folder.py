"""The run folder of a fleet, in the hands of commands that are made for simulations."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import nestling
from nestling import InputError
from nestling.cli.main import main
from nestling.fleet.protocol.courier import LoopCourier
from nestling.fleet.server import serving
from nestling.fleet.server.engine import Patience
from nestling.runs.analysis import analyse
from nestling.runs.export import export
from nestling.runs.run import Result
from tests.fleet.loop import six, workers_of

QUICK = Patience(poll=0.0, refresh=0.0)


def served(method: str, home: Path) -> Result:
    courier = LoopCourier({100 + c: w.handle for c, w in workers_of(home / "devices").items()})
    return serving.play(courier, six(method, rounds=1), home / "run", min_clients=6, patience=QUICK)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["nestling", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_a_fleets_run_is_not_resumed_as_a_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served("shared-average", tmp_path)
    folder = tmp_path / "run"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code = call(monkeypatch, "run", "--resume", str(folder), "--set", "rounds=2")
    said = capsys.readouterr().err
    assert (
        code == 2 and "fleet" in said and f"nestling serve EXPERIMENT.toml --out {folder}" in said
    )
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_fleets_folder_is_marked_from_its_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the server dies before the first device was there."""

    class Crash(BaseException):
        """The server's process dies."""

    def die(*_: object) -> None:
        raise Crash

    monkeypatch.setattr(serving, "enliven", die)
    with pytest.raises(Crash):
        served("shared-average", tmp_path)
    with pytest.raises(InputError, match="fleet"):
        nestling.resume(tmp_path / "run")
    monkeypatch.undo()
    assert served("shared-average", tmp_path).summary["rounds_done"] == 1


def test_what_is_advised_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that exists is gone on with by the command that made it."""
    served("shared-average", tmp_path)
    code = call(monkeypatch, "run", "--out", str(tmp_path / "run"))
    said = capsys.readouterr().err
    assert code == 2 and "nestling serve" in said and "--resume" not in said
    monkeypatch.setattr(sys.modules["nestling.cli.main"], "app", lambda **_: 130)
    assert call(monkeypatch, "serve", "x.toml") == 130
    said = capsys.readouterr().err
    assert "the same command goes on" in said and "--resume" not in said


@pytest.mark.parametrize("method", ["fedproto", "fedmd"])
def test_models_that_stay_on_devices_are_not_exported_from_the_server(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = served(method, tmp_path)
    folder = str(tmp_path / "run")
    assert call(monkeypatch, "export", folder, "--device", "server") == 2
    assert "on the devices" in capsys.readouterr().err
    assert call(monkeypatch, "analyse", folder) == 2
    assert "on the devices" in capsys.readouterr().err
    assert not (tmp_path / "run" / "export-server").exists()
    for run in (result, folder):
        with pytest.raises(InputError, match="on the devices"):
            export(run, device="server")
        with pytest.raises(InputError, match="on the devices"):
            analyse(run)


def test_a_fleets_global_model_is_exported(tmp_path: Path) -> None:
    served("shared-average", tmp_path)
    assert export(tmp_path / "run", device="server")["round"] == 1

"""Loggers beside TensorBoard hear what it hears; each is tried for real where it is installed."""

from __future__ import annotations

import json
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import nestling
from nestling.cli.main import main
from nestling.loggers import LOGGERS
from nestling.runs.folder import scalars_of
from nestling.runs.logged import logged
from tests.small import small


def played(name: str, folder: Path) -> nestling.Result:
    """Two rounds, of which the second is gone on with."""
    for number in (1, 2):
        with logged(nestling.Watcher(), [name], folder) as watcher:
            result = (
                nestling.run(small(rounds=1), out=folder, watcher=watcher)
                if number == 1
                else nestling.resume(folder, overrides=("rounds=2",), watcher=watcher)
            )
    return result


def expected(result: nestling.Result) -> dict[str, list[tuple[int, float]]]:
    found = defaultdict(list)
    for row in result.metrics:
        for name, value in scalars_of(row):
            found[name].append((row["round"], pytest.approx(value)))
    assert "global_score" in found and "small/personal_score" in found
    return dict(found)


def test_mlflow_has_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    result = played("mlflow", tmp_path / "run")
    client = tracking.MlflowClient(tracking_uri=(tmp_path / "run" / "mlflow").as_uri())
    home = client.get_experiment_by_name("nestling")
    (run,) = client.search_runs([home.experiment_id])  # one, though it was gone on with
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.params["method.name"] == "shared-average"
    for name, rows in expected(result).items():
        history = client.get_metric_history(run.info.run_id, name)
        assert [(m.step, m.value) for m in history] == rows, name


def records(log: bytes) -> Iterator[bytes]:
    """What a .wandb file holds: a head of seven bytes, then blocks as in a log of LevelDB."""
    at, whole = 7, b""
    while at + 7 <= len(log):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", log, at)
        whole += log[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # all of a record, or its last part
            yield whole
            whole = b""


def test_wandb_has_every_round_and_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    try:
        result = played("wandb", tmp_path / "run")
    finally:
        wandb.teardown()  # its process of service ends, and has written everything
    found, ids = defaultdict(list), set()
    for file in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")):
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add((record.run.run_id, record.run.project, record.run.display_name))
            if record.WhichOneof("record_type") == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                for name, value in row.items():
                    if not name.startswith("_"):
                        found[name].append((row["_step"], value))
    assert dict(found) == expected(result)
    assert ids == {((tmp_path / "run" / "wandb.id").read_text().strip(), "nestling", "run")}


def test_wandb_in_another_mode_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "of-line")
    with pytest.raises(nestling.InputError, match=r"WANDB_MODE: .*of-line.*offline"):
        played("wandb", tmp_path / "run")


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_package_names_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with (
        pytest.raises(nestling.InputError, match=rf"pip install 'nestling\[{name}\]'"),
        logged(nestling.Watcher(), [name], tmp_path / "run"),
    ):
        pytest.fail("the run must not begin")


def test_an_unknown_logger_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(nestling.InputError, match="did you mean 'wandb'"),
        logged(nestling.Watcher(), ["wanbd"], tmp_path),
    ):
        pytest.fail("the run must not begin")


class Told:
    """A logger that fails in the round `fails`; 0: never."""

    def __init__(self, fails: int = 0) -> None:
        self.fails, self.steps, self.finished = fails, list[int](), list[bool]()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        if step == self.fails:
            raise ConnectionError("the server is gone")
        self.steps.append(step)

    def close(self, finished: bool) -> None:
        self.finished.append(finished)


def test_a_logger_that_fails_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    loggers, notes = {"good": Told(), "bad": Told(fails=2)}, []
    monkeypatch.setattr(
        "nestling.runs.logged.logger_of", lambda name: lambda folder, settings: loggers[name]
    )
    with logged(nestling.Watcher(note=notes.append), loggers, Path()) as watcher:
        nestling.run(small(rounds=3), watcher=watcher)
    assert loggers["good"].steps == [1, 2, 3] and loggers["good"].finished == [True]
    assert loggers["bad"].steps == [1] and loggers["bad"].finished == []
    assert "NOT LOGGED to bad any more: the server is gone" in notes


def test_the_command_line_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, file = Told(), tmp_path / "small.toml"
    file.write_text(small().to_toml())
    monkeypatch.setattr("nestling.runs.logged.logger_of", lambda name: lambda folder, _: told)
    command = ["nestling", "run", str(file), "--out", str(tmp_path / "run"), "--log", "mlflow"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit, match="0"):
        main()
    assert told.steps == [1, 2] and told.finished == [True]


def test_a_sweep_logs_every_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = dict[str, Told]()
    for place in ("logged", "sweep"):
        monkeypatch.setattr(
            f"nestling.runs.{place}.logger_of",
            lambda name: lambda folder, _: told.setdefault(folder.name, Told()),
        )
    nestling.sweep(small(rounds=2), out=tmp_path, seeds=2, jobs=1, log=["mlflow"])
    assert len(told) == 2
    assert all(own.steps == [1, 2] and own.finished == [True] for own in told.values())


@pytest.mark.parametrize("command", ["sweep", "serve"])
def test_other_commands_refuse_an_unknown_logger_before_they_begin(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "small.toml"
    file.write_text(small().to_toml())
    options = ["--insecure"] if command == "serve" else []
    out = tmp_path / "out"
    words = ["nestling", command, str(file), *options, "--out", str(out), "--log", "wanbd"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "did you mean 'wandb'" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize(
    ("name", "variable", "value"),
    [("mlflow", "MLFLOW_TRACKING_URI", "http://127.0.0.1:9"), ("wandb", "WANDB_MODE", "online")],
)
def test_a_fleet_s_run_that_is_enclosed_refuses_to_send(
    name: str,
    variable: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, out = tmp_path / "small.toml", tmp_path / "out"
    file.write_text(small().to_toml())
    monkeypatch.setattr("nestling.loggers.logger_of", lambda name: None)
    monkeypatch.setenv(variable, value)
    words = ["nestling", "serve", str(file), "--insecure", "--out", str(out), "--log", name]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code and "--no-enclose" in capsys.readouterr().err
    assert not out.exists()

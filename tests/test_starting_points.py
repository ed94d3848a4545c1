"""What `nestling new` writes passes its own test and runs as it says; what it must not write, it
does not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nestling.cli.main import main
from nestling.cli.starting import STARTS
from tests.shell import ROOT, Shell

NAMES = {"method": "slow_mean", "model": "rings", "data": "readings", "fleet": "info"}


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    (tmp_path / "work").mkdir()
    return Shell(tmp_path / "work", tmp_path / "programs")


@pytest.mark.parametrize("kind", STARTS)
def test_it_passes_its_test_and_runs(kind: str, shell: Shell) -> None:
    said = shell.type(f"nestling new {kind} {NAMES[kind]}").stdout.splitlines()
    files = said[0].removeprefix("written: ").split(", ")
    assert sorted(files) == sorted(path.name for path in shell.folder.iterdir())
    assert (
        " passed" in shell.type(f"{said[1].removeprefix('test it: ')} -p no:cacheprovider").stdout
    )
    command = said[2].removeprefix("run it:  ")
    less = "" if kind == "data" else "--set split.size=40 --set train.epochs=1"
    shell.type(f"{command} --set rounds=1 {less} --out out")
    run = shell.folder / "out"
    assert json.loads((run / "summary.json").read_text())["rounds_done"] == 1
    written = (run / "experiment.toml").read_text()
    wanted = {"fleet": "snapdragon-8-gen-3"}.get(kind, f'name = "{NAMES[kind]}:')
    assert wanted in written


@pytest.mark.parametrize("kind", STARTS)
@pytest.mark.parametrize("name", ["info", "a", "my_own_very_long_name_of_a_file"[:30]])
def test_it_is_well_formed(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its name: one that is also a word of the file must not hide it."""
    monkeypatch.chdir(tmp_path)
    assert call(["new", kind, name], monkeypatch) == 0
    files = [str(path) for path in tmp_path.glob("*.py")]
    settings = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or "ruff"
    left_out = ["--ignore", "D103"]  # tests say it in their names
    for command in (["check", *left_out, *settings], ["format", "--check", *settings]):
        done = subprocess.run([ruff, *command, *files], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    if kind == "method":
        assert len((tmp_path / f"{name}.py").read_text().splitlines()) <= 40


def test_nothing_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the file nor its test, and where one of them is there the other is not written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_mine.py").write_text("mine")
    assert call(["new", "method", "mine"], monkeypatch) == 2
    assert "test_mine.py exists already" in capsys.readouterr().err
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"test_mine.py": "mine"}
    (tmp_path / "numpy.py").write_text("mine")
    assert call(["new", "data", "numpy"], monkeypatch) == 2
    assert (tmp_path / "numpy.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["methods", "x"], "did you mean 'method'"),
        (["method", "../x"], "small letters, digits and _"),
        (["method", "Mine"], "small letters, digits and _"),
        (["method", "my-own"], "small letters, digits and _"),
        (["method", "lambda"], "small letters, digits and _"),
        (["method", "é"], "small letters, digits and _"),
        (["method", "x" * 31], "at most 30"),
        (["data", "numpy"], "would hide it"),
        (["data", "json"], "would hide it"),
        (["model", "nestling"], "would hide it"),
    ],
)
def test_bad_names_are_refused_with_what_is_wanted(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(["new", *arguments], monkeypatch) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def call(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["nestling", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)

"""A run folder that somebody else made says what it likes: on the terminal it is text, on its own
line, and no order."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import nestling
from nestling.cli.main import main
from nestling.cli.terminal import Console
from nestling.files import read_toml
from nestling.runfiles import AUDIT
from tests.small import small

EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\rnestling: all is well\u2028\u202e"
LINE = EVIL + "\nnestling: all is well"


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("honest") / "run"
    nestling.run(small("fedavg", rounds=1), out=folder)
    return folder


def in_a_key(table: dict[str, Any]) -> None:
    table[LINE] = 1


def in_a_tier(table: dict[str, Any]) -> None:
    table["fleet"]["tiers"][0]["name"] = EVIL


def in_the_data(table: dict[str, Any]) -> None:
    table["data"]["name"] = LINE


def in_code(table: dict[str, Any]) -> None:
    table["model"]["name"] = f"{LINE}:network"


def hostile(honest: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a run folder whose experiment, summary, rounds and audit log say such things."""
    shutil.copytree(honest, folder)
    table = read_toml(folder / "experiment.toml")
    change(table)
    (folder / "experiment.toml").write_text(tomli_w.dumps(table))
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"method": LINE, "notes": [LINE], "norm": LINE}
    (folder / "summary.json").write_text(json.dumps(summary))
    row = json.loads((folder / "metrics.jsonl").read_text())
    row["refusals"] = [{"client": 0, "reason": LINE}]
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "checkpoint.bin").unlink()
    (folder / AUDIT).write_text(
        chained({"event": "started", "round": 0, "state": ""})
        + chained({"event": "joined", "name": LINE}, 1)
    )
    return folder


def chained(row: dict[str, Any], number: int = 0) -> str:
    """A line of an audit log, the first or the second, whose hash is right."""
    body = json.dumps(row)
    last = "0" * 64
    if number:
        last = json.loads(chained({"event": "started", "round": 0, "state": ""}))["hash"]
    own = hashlib.sha256(last.encode() + body.encode()).hexdigest()
    return f'{body[:-1]},"hash":"{own}"}}\n'


@pytest.mark.parametrize("change", [in_a_key, in_a_tier, in_the_data, in_code])
def test_what_a_folder_says_draws_nothing_and_forges_no_line(
    change: Callable[[dict[str, Any]], None],
    honest: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = str(hostile(honest, tmp_path / "run", change))
    monkeypatch.chdir(tmp_path)
    said, forms = "", [["--format", form] for form in ("markdown", "latex", "csv", "json")]
    for words in (
        ["audit", folder],
        ["export", folder, "--device", "small"],
        ["analyse", folder, "--rows", "20"],
        ["report", folder],
        ["report", folder, str(honest)],
        *(["compare", folder, str(honest), *form] for form in ([], *forms)),
        ["watch", folder, "--once"],
        ["back", folder],
        ["run", "--resume", folder, "--set", "rounds=2"],
    ):
        monkeypatch.setattr(sys, "argv", ["nestling", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        told = capsys.readouterr()
        lines = (told.out + told.err).split("\n")
        bad = [line for line in lines if not line.isprintable()]
        assert not bad and stop.value.code in (0, 1, 2, None), (words, bad)
        # a CSV's cells have their lines in quotes
        bad = [line for line in lines if line.startswith("nestling: all is well")]
        assert not bad or "csv" in words, words
        assert "Traceback" not in told.err, (words, told.err)
        said += told.out + told.err
    assert r"\x1b[2J" in said


def test_a_console_keeps_its_own_colours(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(force_terminal=True, color_system="standard", highlight=False)
    console.print("[bold]Zürich → 日本[/bold] \x1b[2J")
    assert capsys.readouterr().out == "\x1b[1mZürich → 日本\x1b[0m \\x1b[2J\n"

"""The page on comparing, played as it stands with fewer rounds, from an empty folder."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nestling.cli.main import main
from tests.shell import ROOT, blocks

PAGE = ROOT / "docs" / "comparing.md"


def test_every_command_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for text in (*blocks(PAGE, "python"), *blocks(PAGE, "toml")):
        name = text.splitlines()[0].removeprefix("# ")
        Path(name).write_text(text.replace("rounds = 20", "rounds = 2"))
    Path("one.toml").write_text(Path("readings.toml").read_text().partition("[sweep]")[0])
    subprocess.run([sys.executable, "readings.py"], check=True)
    commands = [shlex.split(line) for block in blocks(PAGE, "sh") for line in block.splitlines()]
    assert len(commands) == 6
    said = []
    for command in commands:
        monkeypatch.setattr("sys.argv", command)
        with pytest.raises(SystemExit, match="0"):
            main()
        said.append(capsys.readouterr().out)
    assert "24 runs, 12 of them done" in said[1]
    assert "8 runs, 0 of them done" in said[2]
    assert "\\bottomrule" in said[3]
    assert "train.lr differs: 0.02 (HeteroFL), 0.1 (FedAvg)." in said[5]
    shown = subprocess.run(
        [sys.executable, "in_python.py"], check=True, capture_output=True, text=True
    )
    assert "| FedAvg | 6 |" in shown.stdout and "Sequential" in shown.stdout

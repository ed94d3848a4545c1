"""The example with everything of the user's own runs as a user runs it, and learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "own_everything.py"


def test_the_example_learns(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    found = re.fullmatch(r"accuracy ([\d.]+)%, ([\d.]+) rings off\n", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) > 70 and float(found[2]) < 0.4  # a guess: 33 %, 0.9 rings off


def test_it_is_short() -> None:
    assert len([line for line in EXAMPLE.read_text().splitlines() if line.strip()]) <= 32

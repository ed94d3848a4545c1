"""State costs what is used: a large fleet costs what its sampled clients cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "fleet_size.py"


def peak(size: int) -> float:
    found = subprocess.run([sys.executable, str(SCRIPT), "--one", str(size)], capture_output=True, text=True, check=True)
    return float(json.loads(found.stdout.splitlines()[-1])["megabytes"])


def test_a_hundred_thousand_devices_cost_no_more_memory_than_a_hundred() -> None:
    assert peak(100_000) - peak(100) < 200

"""The examples of tasks, on real data and unequal devices, each above what needs no training."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tasks_table import LINES, experiment

from nestling import Data, EngineConfig, Experiment, run
from nestling.data import load

ROOT = Path(__file__).resolve().parents[2]
REAL = os.environ.get("NESTLING_DATA")
ABOVE = {
    "activity": {"most frequent": 0.4},
    "digits": {"most frequent": 0.3},
    "digits-kwt": {"most frequent": 0.3},
    "anomalies": {"distance from the mean": 0.04},
    "forecast": {"last value": 0.3, "mean of the window": 0.04},
    "text": {"most frequent": 0.12, "table of pairs": 0.02},
}
"""By how much each must be above which of its baselines, far less than it is."""


def learned(line: str, folder: Path) -> tuple[Experiment, dict[str, Any]]:
    asked = experiment(line, "shared-average", 0)
    found = run(asked, out=folder / "run")
    assert len(found.summary["by_tier"]) > 2, "devices of several kinds"
    return asked, found.summary


def check(line: str, folder: Path) -> None:
    asked, summary = learned(line, folder)
    data = asked.data.load()
    for name, margin in ABOVE[line].items():
        floor = LINES[line].baselines[name](data)
        assert summary["global_score"]["last"] > floor + margin, name


def test_there_is_a_margin_for_every_line() -> None:
    assert set(ABOVE) == set(LINES)


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="NESTLING_DATA is not set")
@pytest.mark.parametrize("line", [name for name in LINES if name != "text"])
def test_real_data_are_learned(line: str, tmp_path: Path) -> None:
    check(line, tmp_path)


@pytest.mark.slow
@pytest.mark.minutes
def test_the_text_is_learned_beyond_pairs(tmp_path: Path) -> None:
    check("text", tmp_path)


def test_what_the_example_of_the_text_says_of_its_baselines() -> None:
    data = experiment("text", "fedavg", 0).data.load()
    text = (ROOT / "examples" / LINES["text"].file).read_text()
    found = {name: f"{told(data):.0%}" for name, told in LINES["text"].baselines.items()}
    assert found == {"most frequent": "16%", "table of pairs": "28%"}
    assert "16 %" in text and "28 %" in text


def test_the_text_is_learned_in_little(tmp_path: Path) -> None:
    """Short rows, a small transformer, a few rounds: well above the most frequent character."""
    asked = experiment("text", "shared-average", 0).with_changes(
        data=Data("shakespeare", task="next-token", options={"steps": 16}),
        rounds=3,
        participants=2,
        engine=EngineConfig("inline"),
    )
    small = replace(asked.model, options={"dim": 16, "depth": 1, "heads": 2, "head_dim": 8})
    tested = replace(asked.evaluate, every=3, clients=3)
    found = run(asked.with_changes(model=small, evaluate=tested), out=tmp_path / "run").summary
    data = load("shakespeare", task="next-token", options={"steps": 16})
    floor = LINES["text"].baselines["most frequent"](data)
    assert found["global_score"]["last"] > floor + 0.05

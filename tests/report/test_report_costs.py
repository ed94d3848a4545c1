"""Accuracy against what it costs, and how unequal clients are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nestling
from nestling.report.folder import read_run
from nestling.report.page import write_comparison, write_report
from nestling.report.run_page import run_body
from tests.report.made_up_run import write_run
from tests.small import small


def changed(folder: Path, **fields: Any) -> Path:
    """A run's lines with some fields changed; None leaves one out."""
    file = folder / "metrics.jsonl"
    rows = [{**json.loads(line), **fields} for line in file.read_text().splitlines()]
    kept = [{k: v for k, v in row.items() if v is not None} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    return folder


def test_accuracy_is_drawn_over_every_cost_that_a_run_knows(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    page = write_report(folder).read_text()
    for name in ("rounds", "bytes", "time", "energy"):
        assert f"Accuracy by tier over {name}" in page
    page = write_report(changed(folder, energy_joules=None)).read_text()
    assert "Accuracy by tier over time" in page and "over energy" not in page


def test_a_comparison_draws_them_too(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", method="x", title="Other")]
    page = write_comparison(runs, tmp_path / "all.html").read_text()
    assert "Global accuracy over virtual time" in page and "Global accuracy over energy" in page
    for run in runs:
        changed(run, clock_seconds=None, energy_joules=0)
    page = write_comparison(runs, tmp_path / "all.html").read_text()
    assert "over virtual time" not in page and "accuracy over energy" not in page


def test_a_run_names_its_worst_clients_and_the_page_shows_them(tmp_path: Path) -> None:
    result = nestling.run(small("heterofl", rounds=2), out=tmp_path / "run")
    last = result.metrics[-1]
    worst = last["worst_clients"]
    values = [entry["personal_score"] for entry in worst]
    assert values == sorted(values) and values[0] == last["metrics"]["personal_worst"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "How unequal clients are" in page and "A tenth do not reach" in page
    assert "The worst of the clients tested after round 2." in page


def test_nothing_odd_in_them_stops_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path, rounds=2)
    for odd in (3, "x", [None], [{}], [{"client": "x"}], [{"client": 1e400}], [{"client": 1}]):
        changed(folder, worst_clients=odd, metrics=odd, clock_seconds=odd)
        assert run_body(read_run(folder))

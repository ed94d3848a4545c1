"""Who trained what, when and why: the grid of clients and rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nestling.report.folder import read_run
from nestling.report.history import Turn, binned, turns_of
from nestling.report.page import write_report
from nestling.report.run_page import run_body
from tests.report.made_up_run import change, write_run


def written(folder: Path, records: list[dict[str, Any]], clients: int) -> Path:
    """A made-up run whose rounds are these, of clients in turn of two tiers."""
    write_run(folder, rounds=2)
    tiers = [{"name": "small", "count": clients, "params": 250}, {"name": "large", "params": 1000}]
    split = {
        "kinds": ["a"],
        "clients": [
            {"id": c, "tier": ("small", "large")[c % 2], "counts": [1]} for c in range(clients)
        ],
    }
    change(folder / "federation.json", tiers=tiers, split=split, model={"params": 1000})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_turn_says_how_much_was_trained_and_what_became_of_it(tmp_path: Path) -> None:
    refused = {"client": 4, "reason": "values that are not finite"}
    records = [
        {"round": 1, "clients": [0, 1, 2], "trained": [250, 1000, 125]},
        {
            "round": 2,
            "clients": [0, 1, 3, 4],
            "trained": [250, 1000, 1000, 250],
            "missed": [1],
            "late_clients": [3],
            "refusals": [refused],
            "clipped": [{"client": 0, "reason": "its step"}],
        },
        {"round": 3, "clients": [5]},
    ]
    found = turns_of(read_run(written(tmp_path, records, 6)))
    assert found == {
        (0, 0): Turn(0.25),
        (1, 0): Turn(1.0),
        (2, 0): Turn(0.125, "smaller"),
        (0, 1): Turn(0.25, "clipped", "its step"),
        (1, 1): Turn(1.0, "dropped"),
        (3, 1): Turn(1.0, "late"),
        (4, 1): Turn(0.25, "refused", "values that are not finite"),
        (5, 2): Turn(1.0),  # an earlier version's round, which does not say how much
    }
    page = write_report(tmp_path).read_text()
    for words in (
        "25.0% of the model; refused: values that are not finite",
        "12.5% of the model; less than at rest",
        "100.0% of the model; dropped out",
        "100.0% of the model; too late",
        "25.0% of the model; clipped: its step",
    ):
        assert words in page, words


def test_rounds_together_tell_the_mean_of_what_counted_and_the_worst() -> None:
    cell = binned([Turn(0.5), Turn(0.25), Turn(1.0, "refused", "why"), Turn(0.5, "clipped", "x")])
    assert cell.share == pytest.approx(1.25 / 3)
    assert cell.mark == "refused"
    assert cell.text == "41.7% of the model; 4 times; refused 1×; clipped 1×; last: x"
    assert binned([Turn(1.0, "dropped")]).share is None


def test_a_thousand_rounds_of_a_hundred_clients_stay_under_five_megabytes(tmp_path: Path) -> None:
    why = "a step 12.3 times as long as the median one, which counts as 10 times " * 4
    everybody = list(range(100))
    records = [
        {
            "round": at,
            "clients": everybody,
            "trained": [(250, 1000)[c % 2] - (c + at) % 3 * 50 for c in everybody],
            "missed": [(7 * at) % 100],
            "refusals": [{"client": c, "reason": why} for c in range(at % 100)],
            "loss": 1.0,
        }
        for at in range(1, 1001)
    ]
    page = write_report(written(tmp_path, records, 100))
    assert page.stat().st_size < 5_000_000
    text = page.read_text()
    assert "A column is 5 rounds; metrics.jsonl holds all 1,000." in text
    assert 'id="c-history-title"' in text


def test_more_clients_than_are_shown_are_counted(tmp_path: Path) -> None:
    records = [{"round": 1, "clients": [0, 1, 98, 99]}]
    page = write_report(written(tmp_path, records, 2)).read_text()
    assert "Not shown: 2 more clients that took part." in page


def test_nothing_odd_in_a_round_stops_the_page(tmp_path: Path) -> None:
    odd = [None, "x", {}, [None], [{}], [-1], [1e400], 3]
    for key in ("clients", "trained", "missed", "late_clients", "refusals", "clipped"):
        for value in odd:
            record = {"round": 1, "clients": [0], "trained": [5], key: value}
            assert run_body(read_run(written(tmp_path, [record], 3)))

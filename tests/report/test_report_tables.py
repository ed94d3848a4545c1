from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from nestling.report.tables import overall_row, terminal_table, tier_rows
from tests.report.made_up_run import TIERS, change, write_run


def printed(folder: Path) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(terminal_table(folder))
    return console.file.getvalue()  # type: ignore[attr-defined]


def load(folder: Path) -> tuple[dict, dict]:
    return json.loads((folder / "summary.json").read_text()), json.loads(
        (folder / "federation.json").read_text()
    )


def test_a_row_holds_what_the_files_say(tmp_path: Path) -> None:
    summary, federation = load(write_run(tmp_path))
    row = tier_rows(summary, federation)[0]
    assert (row["tier"], row["label"], row["count"], row["ratio"], row["params"]) == (
        "f446",
        "STM32F446RE",
        8,
        0.125,
        1234,
    )
    assert row["share"] == 1234 / 60_000
    assert (row["ram_need"], row["ram_limit"], row["seconds_limit"]) == (61_440, 131_072, None)
    said = summary["by_tier"]["f446"]
    for kind in ("global", "personal"):
        assert [row[f"{kind}_{key}"] for key in ("last", "best", "best_round")] == list(
            said[f"{kind}_score"].values()
        )


def test_an_estimate_is_marked_wherever_it_enters() -> None:
    def estimated(**sources: str) -> list[str]:
        return tier_rows({}, {"tiers": [{"name": "a", "sources": sources}]})[0]["estimated"]

    assert estimated(ram="datasheet", power="measured") == []
    assert estimated(ram="estimate") == ["ram"]
    assert estimated(power="estimate") == ["energy"]
    assert estimated(macs_per_second="estimate") == ["seconds", "energy"]


def test_tiers_without_a_device_or_a_federation_still_have_rows() -> None:
    federation = {
        "tiers": [
            {
                "name": "a",
                "device": None,
                "need": None,
                "limits": None,
                "sources": None,
                "reasons": None,
            }
        ]
    }
    summary = {
        "by_tier": {
            "b": {
                "global_score": {"last": 0.5, "best": 0.6, "best_round": 3},
                "personal_score": None,
            }
        }
    }
    assert [
        (row["tier"], row["global_last"], row["ram_limit"])
        for row in tier_rows(summary, federation)
    ] == [
        ("a", None, None),
        ("b", 0.5, None),
    ]
    assert tier_rows(None, None) == []
    assert overall_row(None)["global_last"] is None


def test_two_tiers_of_one_device_are_told_apart() -> None:
    tiers = [
        {"name": "near", "title": "Pi"},
        {"name": "far", "title": "Pi"},
        {"name": "x", "title": "Nano"},
    ]
    assert [row["label"] for row in tier_rows({}, {"tiers": tiers})] == [
        "Pi (near)",
        "Pi (far)",
        "Nano",
    ]


def test_a_tier_with_another_network_says_so() -> None:
    tiers = [{"name": "a", "model": "tinycnn"}, {"name": "b", "model": "mlp"}, {"name": "c"}]
    assert [
        row["own_model"] for row in tier_rows({}, {"model": {"name": "tinycnn"}, "tiers": tiers})
    ] == [False, True, False]


def test_the_terminal_shows_global_and_personal_last_and_best_apart(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    numbers = (
        dict(zip(("last", "best"), (0.1111, 0.2222), strict=True)),
        dict(zip(("last", "best"), (0.3333, 0.4444), strict=True)),
    )
    change(folder / "summary.json", global_score=numbers[0], personal_score=numbers[1])
    text = printed(folder)
    last_row = next(line for line in text.splitlines() if line.startswith("all "))
    assert [word for word in last_row.split() if word.endswith("%")] == [
        "11.11%",
        "22.22%",
        "33.33%",
        "44.44%",
    ]
    assert all(str(tier["name"]) in text for tier in TIERS)
    assert "HeteroFL on mnist12k, 20 rounds" in text


def test_the_terminal_works_on_an_unfinished_run_and_takes_no_markup(tmp_path: Path) -> None:
    folder = write_run(tmp_path, done=3)
    change(folder / "federation.json", tiers=[{"name": "[red]x[/red]", "title": "[/]"}])
    text = printed(folder)
    assert "[red]x[/red]" in text
    assert "3 of 20 rounds" in text

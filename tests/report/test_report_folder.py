from __future__ import annotations

import json
from pathlib import Path

import pytest

from nestling.errors import InputError
from nestling.report.folder import is_behind, read_run, summarise, traffic_totals
from tests.report.made_up_run import change, write_run


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere: there is no such folder"):
        read_run(tmp_path / "nowhere")


def test_a_file_is_not_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(InputError, match="is not a folder"):
        read_run(tmp_path / "x")


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no metrics\.jsonl"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "bad",
    [
        '{"round": 3, "loss"',
        "not json",
        "[1, 2]",
        '{"loss": 1}',
        '{"round": "three"}',
        "[" * 100_000,
    ],
)
def test_a_corrupt_line_is_named_with_its_file(tmp_path: Path, bad: str) -> None:
    path = write_run(tmp_path) / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], bad, *lines[3:]]) + "\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 3: not "):
        read_run(tmp_path)


def test_what_earlier_versions_called_otherwise_is_read_under_its_name_of_today(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path)
    today = read_run(folder)
    assert "global_score" in today.summary and "kinds" in today.federation["split"]
    for file in ("metrics.jsonl", "summary.json", "federation.json"):
        text = (folder / file).read_text()
        for new, old in (("_score", "_accuracy"), ('"kinds"', '"class_names"')):
            text = text.replace(new, old)
        (folder / file).write_text(text)
    then = read_run(folder)
    assert (then.metrics, then.summary) == (today.metrics, today.summary)
    assert then.federation == today.federation


def test_bytes_that_are_no_text_are_a_corrupt_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"round": 1}\n{"round": \xff}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2"):
        read_run(tmp_path)


def test_a_last_line_cut_at_any_byte_is_tolerated(tmp_path: Path) -> None:
    whole = b'{"round": 1}\n{"round": 2, "title": "\xc3\xa9"}'
    start = whole.index(b"\n") + 1
    for end in range(start, len(whole)):
        (tmp_path / "metrics.jsonl").write_bytes(whole[:end])
        assert [record["round"] for record in read_run(tmp_path).metrics] == [1]
    (tmp_path / "metrics.jsonl").write_bytes(whole)
    assert [record["round"] for record in read_run(tmp_path).metrics] == [1, 2]


def test_a_last_line_that_is_complete_but_corrupt_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n{"round": 2, "lo\n')
    with pytest.raises(InputError, match="line 2"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("summary.json", '{\n"method": }'),
        ("federation.json", "[]"),
        ("experiment.toml", "rounds = "),
    ],
)
def test_other_corrupt_files_are_named(tmp_path: Path, name: str, text: str) -> None:
    (write_run(tmp_path) / name).write_text(text)
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        read_run(tmp_path)


def test_a_round_written_twice_counts_once_and_the_later_wins(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"round":1,"loss":1}\n{"round":2,"loss":2}\n{"round":2,"loss":3}\n{"round":3,"loss":4}\n'
    )
    assert [(record["round"], record["loss"]) for record in read_run(tmp_path).metrics] == [
        (1, 1),
        (2, 3),
        (3, 4),
    ]


def test_the_summary_counted_from_the_rounds_equals_the_one_that_was_written(
    tmp_path: Path,
) -> None:
    run = read_run(write_run(tmp_path))
    written = json.loads((tmp_path / "summary.json").read_text())
    (tmp_path / "summary.json").unlink()
    counted = summarise(read_run(tmp_path))
    for key in (
        "global_score",
        "personal_score",
        "by_tier",
        "bytes_up",
        "bytes_down",
        "clock_seconds",
        "rounds_done",
        "refused",
        "late",
    ):
        assert counted[key] == written[key], key
    assert [counted[key] for key in ("method", "data", "model", "seed", "rounds")] == [
        "heterofl",
        "mnist12k",
        "tinycnn",
        0,
        20,
    ]
    assert not is_behind(run)


@pytest.mark.parametrize("text", [None, "null"])
def test_a_run_without_a_summary_is_unfinished(tmp_path: Path, text: str | None) -> None:
    write_run(tmp_path, done=7)
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    run = read_run(tmp_path)
    assert is_behind(run)
    assert summarise(run)["rounds_done"] == 7


def test_the_summary_of_before_a_resume_does_not_hide_newer_rounds(tmp_path: Path) -> None:
    write_run(tmp_path)
    change(tmp_path / "summary.json", rounds_done=10, bytes_up=1)
    run = read_run(tmp_path)
    assert is_behind(run)
    assert summarise(run)["bytes_up"] == 20 * 480_000
    assert summarise(run)["title"] == "HeteroFL"


def test_the_best_round_is_the_earliest_of_equals_and_nan_is_no_accuracy(tmp_path: Path) -> None:
    values = ["0.5", "0.9", "null", "0.9", "NaN"]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"round":{n},"global_score":{v}}}\n' for n, v in enumerate(values, 1))
    )
    assert summarise(read_run(tmp_path))["global_score"] == {
        "last": 0.9,
        "best": 0.9,
        "best_round": 2,
    }


def test_traffic_adds_up_where_the_totals_are_missing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"round":1,"bytes_up":1,"bytes_down":2}\n{"round":2,"bytes_up":3,"bytes_down":4}\n'
    )
    assert traffic_totals(read_run(tmp_path)) == [3, 10]

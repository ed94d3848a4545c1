from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from nestling.errors import InputError
from nestling.report.charts import BENT, SCORE
from nestling.report.compare import compare
from nestling.report.comparison import spread
from nestling.report.folder import read_run, summarise
from nestling.report.grouping import ComparedRun, settings_of
from nestling.report.page import write_comparison
from nestling.report.words import DASH, duration, energy
from tests.report.made_up_run import change, write_run
from tests.report.test_report_page import drawn, outline


def entries(*folders: Path) -> list[ComparedRun]:
    return [ComparedRun(run, summarise(run)) for run in map(read_run, folders)]


def test_runs_that_differ_in_the_seed_alone_are_one_setting(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(3)]
    other = write_run(tmp_path / "other", method="fedavg", title="FedAvg")
    settings = settings_of(entries(*runs, other))
    assert [(setting.label, len(setting.entries)) for setting in settings] == [
        ("HeteroFL", 3),
        ("FedAvg", 1),
    ]


def test_where_a_run_is_carried_out_does_not_set_it_apart(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1)
    with (second / "experiment.toml").open("a") as file:
        file.write('[engine]\nname = "pool"\nworkers = 2\n')
    assert len(settings_of(entries(first, second))) == 1


def test_another_configuration_is_another_setting_and_says_in_what(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b", rate=0.5, seed=1)
    assert [setting.label for setting in settings_of(entries(first, second))] == [
        "HeteroFL (rate = 0.05)",
        "HeteroFL (rate = 0.5)",
    ]


def test_a_copy_of_a_run_adds_no_certainty(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 1), ("copy", 0))
    ]
    (setting,) = settings_of(entries(*runs))
    assert [entry.run.name for entry in setting.entries] == ["a", "b"]
    text = outline(write_comparison(runs, tmp_path / "all.html")).text
    assert "copy" in text
    assert "1 run without a line key repeats a seed" in text


def test_mean_and_spread_over_seeds() -> None:
    assert spread([0.5, 0.6, 0.7]).text == "60.00 ± 10.00%"
    assert spread([0.5, None]).text == "50.00%"
    assert spread([None]).text == "–"


def test_the_page_gives_mean_and_spread_and_keeps_columns_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(3)]
    shown = {
        "global_score": [(0.91, 0.95), (0.92, 0.96), (0.93, 0.98)],
        "personal_score": [(0.71, 0.75), (0.72, 0.77), (0.75, 0.79)],
    }
    for at, run in enumerate(runs):
        change(
            run / "summary.json",
            **{
                key: {"last": v[at][0], "best": v[at][1], "best_round": 5}
                for key, v in shown.items()
            },
        )
    text = outline(write_comparison(runs, tmp_path / "all.html")).text
    expected = []
    for values in shown.values():
        for column in zip(*values, strict=True):
            expected.append(
                f"{100 * statistics.fmean(column):.2f} ± {100 * statistics.stdev(column):.2f}%"
            )
    assert " ".join(["HeteroFL 3", *expected]) in text
    assert "Global accuracy over rounds" in text
    assert "Global accuracy over bytes" in text


def told(folder: Path, method: str, *accuracies: float) -> list[Path]:
    """Runs of a method, one a seed, that end with these accuracies."""
    runs = []
    for seed, value in enumerate(accuracies):
        run = write_run(
            folder / f"{method}-{seed}", method=method, title=method, seed=seed, personal=False
        )
        known = {"last": value, "best": value, "best_round": 20}
        change(run / "summary.json", global_score=known)
        runs.append(run)
    return runs


def test_what_cannot_be_told_from_the_best_is_underlined(tmp_path: Path) -> None:
    runs = [
        *told(tmp_path, "best", 0.91, 0.95, 0.89),
        *told(tmp_path, "tied", 0.90, 0.90, 0.90),  # ahead in one seed
        *told(tmp_path, "behind", 0.50, 0.52, 0.48),
    ]
    found = compare(*runs)
    assert [row.marks.get("global_last") for row in found.rows] == ["best", "tie", None]
    texts = ["91.67 ± 3.06%", "90.00 ± 0.00%", "50.00 ± 2.00%"]
    assert [row.text(found.columns[0]) for row in found.rows] == texts
    latex = found.to_latex()
    in_latex = [text.replace("±", "$\\pm$").replace("%", "\\%") for text in texts]
    assert latex.count("\\textbf{") == latex.count("\\underline{") == 1
    assert f"best & 3 & \\textbf{{{in_latex[0]}}}" in latex
    assert f"tied & 3 & \\underline{{{in_latex[1]}}}" in latex
    assert f"behind & 3 & {in_latex[2]}" in latex
    page = found.to_html()
    shown = [
        f'<span class="spread">{text.replace(" ± ", " ±" + chr(160))}</span>' for text in texts
    ]
    assert page.count(f"<b>{shown[0]}</b>") == page.count(f"<u>{shown[1]}</u>") == 1
    assert page.count("<u>") == 1 and shown[2] in page and f"<b>{shown[2]}</b>" not in page
    assert f"**{texts[0]}**" in found.to_markdown() and f"<u>{texts[1]}</u>" in found.to_markdown()


def test_what_a_target_took_in_time_and_energy(tmp_path: Path) -> None:
    """Of the first test that reached it: its own virtual seconds and joules, not the run's."""
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(2)]
    found = compare(*runs, target=0.8)
    (row,) = found.rows
    firsts = []
    for seed, run in enumerate(runs):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        first = next(one for one in lines if (one["global_score"] or 0) >= 0.8)
        assert 1 < first["round"] < 20
        assert row.values["target_seconds"][seed] == 61.5 * first["round"]
        assert row.values["target_joules"][seed] == 880.0 * first["round"]
        firsts.append(first["round"])
    columns = {column.key: column for column in found.columns}
    mean = statistics.fmean(firsts)
    assert row.text(columns["target_seconds"]) == duration(61.5 * mean)
    assert row.text(columns["target_joules"]) == energy(880.0 * mean)
    assert columns["target_seconds"].title == "virtual time to 80%"
    assert columns["target_joules"].title == "energy to 80%"
    never = compare(*runs, target=0.9999)
    (row,) = never.rows
    empty = {column.key: row.text(column) for column in never.columns if "target" in column.key}
    assert len(empty) == 4 and set(empty.values()) == {DASH}
    for run in runs:  # time and energy have no column where they are not known
        change(run / "summary.json", clock_seconds=0, energy_joules=0)
    keys = {column.key for column in compare(*runs, target=0.9999).columns}
    assert keys.isdisjoint({"clock_seconds", "target_seconds", "energy_joules", "target_joules"})


def test_the_seeds_of_a_setting_have_a_band_of_one_deviation(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(3)]
    alone = write_run(tmp_path / "alone", method="fedavg", title="FedAvg")
    page = write_comparison([*runs, alone], tmp_path / "all.html")
    chart = drawn(page, "c-global-rounds")
    bands = [path for path in chart.iter("path") if str(path.get("class")).startswith("band")]
    assert [band.get("class") for band in bands] == ["band s0"]  # one seed has no spread
    rows = [row.split("\t") for row in str(chart.get("data-table")).split("\n")]
    assert rows[0][-2:] == ["low", "high"]
    told = {(row[0], int(row[1])): row[2:] for row in rows[1:]}
    accuracies = [
        {one["round"]: one["global_score"] for one in read_run(run).metrics} for run in runs
    ]
    for at in (1, 10, 20):
        values = [one[at] for one in accuracies]
        mean, sd = statistics.fmean(values), statistics.stdev(values)
        found = [float(value) for value in told["HeteroFL", at]]
        assert found == pytest.approx([mean, mean - sd, mean + sd])
        assert told["FedAvg", at][1:] == ["", ""]
    # what is drawn is as high as these numbers: along the upper edge, and back along the lower
    edge = [float(pair.split()[1]) for pair in str(bands[0].get("d"))[1:-1].split("L")]
    upper, lower = edge[: len(edge) // 2], edge[: len(edge) // 2 - 1 : -1]
    assert SCORE.places is not None and BENT in page.read_text()
    place = SCORE.places
    edges = [map(float, row[3:]) for row in rows[1:] if row[0] == "HeteroFL"]
    widths = [place(high) - place(low) for low, high in edges]
    tall = [low - high for low, high in zip(lower, upper, strict=True)]
    scale = max(tall) / max(widths)
    assert scale > 0
    assert tall == pytest.approx([scale * width for width in widths], abs=0.25)


def test_runs_on_different_data_carry_a_warning(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1)]
    assert "DIFFERENT DATA" not in outline(write_comparison(runs, tmp_path / "all.html")).text
    change(runs[1] / "summary.json", data="cifar10")
    assert (
        "DIFFERENT DATA: mnist12k (HeteroFL #1), cifar10 (HeteroFL #2)."
        in outline(write_comparison(runs, tmp_path / "all.html")).text
    )


def test_unfinished_and_bare_runs_compare(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text(json.dumps({"round": 1, "global_score": 0.5}) + "\n")
    text = outline(
        write_comparison(
            [write_run(tmp_path / "half", done=5), bare], tmp_path / "new" / "all.html"
        )
    ).text
    assert "5 of 20" in text
    assert "bare" in text


def test_the_same_folder_twice_is_one_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    assert (
        "1 run compared"
        in outline(write_comparison([run, tmp_path / "." / "a"], tmp_path / "all.html")).text
    )


def test_files_beside_the_runs_of_a_sweep_are_passed_over_and_others_refused(
    tmp_path: Path,
) -> None:
    """What a shell makes of `runs/sweep/runs/*`."""
    runs = [write_run(tmp_path / f"fedavg-alpha0.{seed}", seed=seed) for seed in range(2)]
    for run in runs:
        (tmp_path / f"{run.name}.toml").write_text("rounds = 2")
    found = compare(*sorted(tmp_path.iterdir()))
    assert [entry.run.folder for entry in found.entries] == runs
    page = write_comparison(sorted(tmp_path.iterdir()), tmp_path / "all.html")
    assert "2 runs compared" in page.read_text()
    for name in (page, tmp_path / f"{runs[0].name}.toml"):
        with pytest.raises(InputError, match="is not a folder"):
            compare(name)


def test_nothing_to_compare_and_a_folder_as_target_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to compare"):
        write_comparison([], tmp_path / "all.html")
    with pytest.raises(InputError, match="is a folder"):
        write_comparison([write_run(tmp_path / "a")], tmp_path)


def test_methods_of_different_groups_are_no_fair_column_and_the_reason_is_said(
    tmp_path: Path,
) -> None:
    runs = [
        write_run(tmp_path / "a", method="heterofl", title="HeteroFL", group="A"),
        write_run(tmp_path / "b", method="lotteryfl", title="LotteryFL", group="C"),
        write_run(tmp_path / "c", method="fedavg", title="FedAvg", group=""),
    ]
    found = compare(*runs)
    assert found.terminal().row_count == 3
    assert any(
        "groups A" in text and "C (personal" in text and "measured by" in text
        for text in found.cautions
    )
    assert "Not one fair column" in outline(write_comparison(runs, tmp_path / "all.html")).text
    assert not any("fair" in text for text in compare(runs[0], runs[2]).cautions)


def test_accuracies_from_different_batch_statistics_are_no_fair_column(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / norm, norm=norm, group="A") for norm in ("batch", "tracked")]
    assert any("batch and tracked" in text for text in compare(*runs).cautions)


def test_a_table_names_the_score_as_the_task_does(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", method="fedavg", title="FedAvg")]
    for run in runs:
        for name in ("summary.json", "federation.json"):
            change(run / name, task={"name": "reconstruction", "score": "AUROC"})
    found = compare(*runs, target=0.5)
    assert "& global AUROC, last &" in found.to_latex()
    assert "rounds to 50\\% global AUROC &" in found.to_latex()
    for text in (found.to_latex(), found.to_markdown(), found.to_html()):
        assert "AUROC, last" in text and "accuracy" not in text.lower()
    assert found.to_csv().startswith("label,method,seeds,global_last_mean,")


def test_scores_of_different_kinds_are_not_ranked_against_each_other(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", method="fedavg", title="FedAvg")]
    change(runs[1] / "summary.json", task={"name": "reconstruction", "score": "AUROC"})
    found = compare(*runs)
    (said,) = [text for text in found.cautions if text.startswith("DIFFERENT SCORES")]
    assert "accuracy (HeteroFL), AUROC (FedAvg)" in said
    assert found.gaps == [] and [row.marks for row in found.rows] == [{}, {}]
    assert "global score, last" in found.to_markdown()


def test_a_label_tells_what_sets_a_setting_apart_and_no_more(tmp_path: Path) -> None:
    settings = ("alpha = 0.3", "alpha = 1.0", "alpha = 0.3\nlr = 0.1", "alpha = 0.3\nmu = 2")
    for at, text in enumerate(settings):
        run = write_run(tmp_path / str(at))
        with (run / "experiment.toml").open("a") as file:
            file.write(f"[more]\n{text}\n")
    labels = [s.label for s in settings_of(entries(*(tmp_path / str(at) for at in range(4))))]
    assert labels == [
        "HeteroFL (more.alpha = 0.3, more.lr = –)",
        "HeteroFL (more.alpha = 1.0)",
        "HeteroFL (more.lr = 0.1)",
        "HeteroFL (more.mu = 2)",
    ]

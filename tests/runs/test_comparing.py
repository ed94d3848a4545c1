"""Runs that were really played, compared: what differs beside the method is said, and nothing else
is called a seed."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nestling
from nestling import InputError, SplitConfig, Train
from nestling.cli.main import main
from nestling.fair import GROUPS
from nestling.report.compare import Comparison, compare
from tests.runs.test_fingerprint import (
    METHOD_CODE,
    arrays,
    fingerprint,
    heads,
    on_arrays,
)
from tests.small import TIERS, small


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds, and runs that differ in something else."""
    home = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "heterofl"):
        for seed in range(2):
            nestling.run(small(method, seed=seed), out=home / f"{method}-{seed}")
    others: dict[str, dict[str, Any]] = {
        "alpha": {"split": SplitConfig(kind="dirichlet", alpha=0.1, size=60)},
        "lr": {"train": Train(epochs=1, batch=20, lr=0.05)},
        "fleet": {
            "fleet": nestling.FleetConfig(
                tiers=(*TIERS[:2], replace(TIERS[2], name="l", ratio=0.75))
            )
        },
        "ratio": {"fleet": nestling.FleetConfig(tiers=(*TIERS[:2], replace(TIERS[2], ratio=0.75)))},
        "rounds": {"rounds": 1},
    }
    for name, change in others.items():
        nestling.run(small("heterofl", **change), out=home / name)
    return home


def of(runs: Path, *names: str, **options: Any) -> Comparison:
    return compare(*(runs / name for name in names), **options)


FAIR = ("fedavg-0", "fedavg-1", "heterofl-0", "heterofl-1")


def test_a_fair_table_says_nothing_but_what_is_noise(runs: Path) -> None:
    found = of(runs, *FAIR)
    assert found.cautions == []
    assert [(row.label, row.seeds) for row in found.rows] == [
        ("FedAvg", [0, 1]),
        ("HeteroFL", [0, 1]),
    ]
    (line,) = found.gaps
    assert "FedAvg" in line and "HeteroFL" in line and "2 " in line


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("alpha", "split.alpha differs: 1.0 (FedAvg), 0.1 (HeteroFL)."),
        ("lr", "train.lr differs: 0.02 (FedAvg), 0.05 (HeteroFL)."),
        (
            "fleet",
            "fleet.tiers differs: small, middle, large (FedAvg), small, middle, l (HeteroFL).",
        ),
        ("ratio", "fleet.tiers.large.ratio differs: 1.0 (FedAvg), 0.75 (HeteroFL)."),
        ("rounds", "rounds differs: 2 (FedAvg), 1 (HeteroFL)."),
    ],
)
def test_every_other_difference_is_said(runs: Path, other: str, said: str) -> None:
    assert of(runs, "fedavg-0", other).cautions == [said]


def test_what_is_under_study_is_no_caution(runs: Path) -> None:
    assert of(runs, "heterofl-0", "alpha").cautions == []  # the one field that differs
    tier = of(runs, "heterofl-0", "ratio")
    assert tier.cautions == [] and tier.by == ()
    assert [row.studied for row in tier.rows] == [
        {"fleet.tiers.large.ratio": "1.0"},
        {"fleet.tiers.large.ratio": "0.75"},
    ]
    swept = of(runs, "heterofl-0", "ratio", "fleet", by=["fleet.tiers"])
    assert swept.cautions == [] and len(swept.rows) == 3
    assert of(runs, "fedavg-0", "alpha", by=["method", "split"]).cautions == []
    both = of(runs, "heterofl-0", "alpha", "lr").cautions
    assert any("split.alpha" in text for text in both) and any("train.lr" in text for text in both)
    only = of(runs, "heterofl-0", "alpha", "lr", by=["train.lr"]).cautions
    assert [text.partition(" ")[0] for text in only] == ["split.alpha"]


def test_different_data_are_never_called_seeds(tmp_path: Path) -> None:
    one, other = arrays(tmp_path / "one.npz"), arrays(tmp_path / "other.npz", seed=1)
    shutil.copy(one, tmp_path / "copy.npz")
    nestling.run(on_arrays(one), out=tmp_path / "a")
    nestling.run(on_arrays(other, seed=1), out=tmp_path / "b")
    nestling.run(on_arrays(tmp_path / "copy.npz", seed=2), out=tmp_path / "c")
    found = compare(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert [row.seeds for row in found.rows] == [[0, 2], [1]]  # a copy elsewhere is the same data
    assert found.cautions[0].startswith("DIFFERENT DATA: one.npz #")
    assert "training rows, test rows" in found.cautions[0] and "labels" not in found.cautions[0]
    assert "one.npz" in found.rows[0].label and "other.npz" in found.rows[1].label


def test_another_object_of_the_same_class_is_another_setting(tmp_path: Path) -> None:
    for number, count in enumerate((1, 4)):
        experiment = small("fedavg", model=heads(count), rounds=1, seed=number)
        nestling.run(experiment, out=tmp_path / str(count))
    found = compare(tmp_path / "1", tmp_path / "4")
    assert len(found.rows) == 2
    assert any("not the same in code or shape" in text for text in found.cautions)


def test_a_method_whose_code_changed_is_another_setting(
    tmp_path: Path, module: Callable[[str], None]
) -> None:
    for seed, factor in enumerate((3, 3, 35)):
        module(METHOD_CODE.format(pace=1, factor=factor))
        experiment = small("code_of_mine:Average", rounds=1, seed=seed)
        nestling.run(experiment, out=tmp_path / f"r{seed}")
    same = compare(tmp_path / "r0", tmp_path / "r1")
    assert [row.seeds for row in same.rows] == [[0, 1]] and same.cautions == []
    found = compare(*(tmp_path / f"r{seed}" for seed in range(3)))
    assert [row.seeds for row in found.rows] == [[0, 1], [2]]
    codes = [fingerprint(tmp_path / f"r{seed}")["method"]["code"] for seed in (0, 2)]
    labels = [f"FedAvg (code = {code})" for code in codes]
    assert [row.label for row in found.rows] == labels
    (said,) = [text for text in found.cautions if "in code" in text]
    assert said == (
        f"The methods code_of_mine:Average are not the same in code: {labels[0]} / {labels[1]}."
    )
    # beside another method it is said as well, and one version alone is no difference
    nestling.run(small("heterofl", rounds=1), out=tmp_path / "other")
    three = compare(tmp_path / "other", tmp_path / "r0", tmp_path / "r2").cautions
    assert any("not the same in code" in text for text in three)
    assert compare(tmp_path / "other", tmp_path / "r0").cautions == []
    # of what was made with an earlier form it is not known
    path = tmp_path / "r1" / "federation.json"
    told = json.loads(path.read_text())
    del told["fingerprint"]["form"], told["fingerprint"]["method"]
    path.write_text(json.dumps(told))
    (unknown,) = [t for t in compare(tmp_path / "r0", tmp_path / "r1").cautions if "in code" in t]
    assert "may not be the same in code" in unknown and "different versions" in unknown


def test_a_run_that_repeats_a_seed_is_said_everywhere(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(runs / "fedavg-0", tmp_path / "copy")
    folders = [runs / "fedavg-0", runs / "fedavg-1", tmp_path / "copy"]
    found = compare(*folders)
    said = "copy repeats a seed of the same setting and is left out of the means."
    assert found.cautions == [said] and [row.seeds for row in found.rows] == [[0, 1]]
    assert f"% {said}\n" in found.to_latex() and f"\n- {said}\n" in found.to_markdown()
    assert said in found.to_html() and said in json.loads(found.to_json())["cautions"]
    for form in ([], ["--format", "latex"]):
        arguments = ["nestling", "compare", *map(str, folders), *form]
        monkeypatch.setattr("sys.argv", arguments)
        with pytest.raises(SystemExit, match="0"):
            main()
        told = capsys.readouterr()
        assert said in (told.err if form else told.out)
    shutil.copytree(runs / "fedavg-0", tmp_path / "more" / "copy")
    twice = compare(*folders, tmp_path / "more" / "copy").cautions
    assert len(twice) == 1 and "repeat a seed of the same setting and are" in twice[0]
    assert str(tmp_path / "more" / "copy") in twice[0]  # one name for two does not say which


def test_folders_of_earlier_versions_open_and_are_said_to_have_no_fingerprint(
    runs: Path, tmp_path: Path
) -> None:
    old = []
    for name in ("fedavg-0", "fedavg-1"):
        shutil.copytree(runs / name, tmp_path / name)
        path = tmp_path / name / "federation.json"
        said = json.loads(path.read_text())
        del said["fingerprint"]
        path.write_text(json.dumps(said))
        old.append(tmp_path / name)
    found = compare(*old)
    assert [row.seeds for row in found.rows] == [[0, 1]]
    assert any("fedavg-0, fedavg-1 have no fingerprints" in text for text in found.cautions)


def test_seeds_that_only_one_setting_has_are_said(runs: Path) -> None:
    cautions = of(runs, *FAIR[:3]).cautions
    assert any(
        text.startswith("The seeds differ: 0, 1 (FedAvg); 0 (HeteroFL)") for text in cautions
    )


def test_the_table_in_every_format(runs: Path, tmp_path: Path) -> None:
    found = of(runs, *FAIR, target=0.05)
    best = max(found.rows, key=lambda row: row.mean("global_last") or 0)
    latex = found.to_latex()
    assert "\\toprule" in latex and latex.count("\\midrule") == 1 and "\\bottomrule" in latex
    assert (
        f"\\textbf{{{best.text(found.columns[0])}}}".replace("±", "$\\pm$").replace("%}", "\\%}")
        in latex
    )
    assert f"**{best.text(found.columns[0])}**" in found.to_markdown()
    lines = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert [line["label"] for line in lines] == ["FedAvg", "HeteroFL"]
    means = [float(line["global_last_mean"]) for line in lines]
    assert means == pytest.approx([row.mean("global_last") for row in found.rows])
    told = json.loads(found.to_json())
    assert told["rows"][0]["values"]["target_rounds"].keys() == {"0", "1"}
    for name in ("t.md", "t.tex", "t.csv", "t.json", "t.html"):
        assert found.save(tmp_path / name).stat().st_size > 100
    page = (tmp_path / "t.html").read_text()
    assert "rounds to 5%" in page.lower() and best.label in page
    assert "<table" in found._repr_html_()
    with pytest.raises(InputError, match=r"\.tex"):
        found.save(tmp_path / "t.doc")


def test_a_target_counts_what_it_took(runs: Path) -> None:
    metrics = nestling.load(runs / "fedavg-0").metrics
    goal = metrics[1]["global_score"]
    (row,) = of(runs, "fedavg-0", target=goal).rows
    first = next(m for m in metrics if m["global_score"] >= goal)
    assert row.values["target_rounds"][0] == first["round"]
    assert row.values["target_bytes"][0] == first["bytes_up_total"] + first["bytes_down_total"]
    (never,) = of(runs, "fedavg-0", target=0.999).rows
    assert "target_rounds" not in never.values
    for wrong in (0, 1.0, 90):
        with pytest.raises(InputError, match="no score"):
            of(runs, "fedavg-0", target=wrong)


def test_the_command_says_it_too(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["compare", str(runs / "fedavg-0"), str(runs / "lr"), "--format", "latex"]
    monkeypatch.setattr("sys.argv", ["nestling", *arguments, "--out", str(tmp_path / "t.md")])
    with pytest.raises(SystemExit, match="0"):
        main()
    told = capsys.readouterr()
    assert told.out.rstrip().endswith("\\end{tabular}")
    assert "train.lr differs" in told.err and (tmp_path / "t.md").exists()
    assert GROUPS  # the groups of comparability are still asked

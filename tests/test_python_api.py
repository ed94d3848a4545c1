"""What people use from Python and in notebooks."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import nestling
from nestling import InputError
from nestling.methods import ALIASES, METHODS, method_class
from tests.report.made_up_run import write_run
from tests.shell import ROOT
from tests.small import small


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("api") / "run"
    nestling.run(small("heterofl", rounds=3), out=path)
    return path


def test_dir_shows_the_public_names_and_all_of_them_are_there() -> None:
    assert dir(nestling) == sorted(nestling.__all__)
    assert {"compare", "load", "sweep", "run", "resume"} <= set(dir(nestling))
    for name in dir(nestling):
        assert getattr(nestling, name) is not None
    with pytest.raises(AttributeError, match="no attribute"):
        nestling.nonsense  # noqa: B018


def test_a_run_is_loaded_with_its_models_when_they_are_asked_for(run: Path) -> None:
    played = nestling.resume(run)
    loaded = nestling.load(run)
    assert loaded.metrics == played.metrics and loaded.summary == played.summary
    assert callable(loaded.made)  # nothing was put together yet
    ours, theirs = loaded.model, played.model
    assert ours is not None and theirs is not None
    for name, tensor in theirs.state_dict().items():
        assert (ours.state_dict()[name] == tensor).all()
    assert loaded.model_for(0) is not None
    nestling.resume(run)  # the folder is free again


def test_a_run_under_way_is_loaded_too(tmp_path: Path) -> None:
    seen: list[int] = []

    def look(_: object) -> None:
        seen.append(nestling.load(tmp_path / "run").summary["rounds_done"])

    nestling.run(small(rounds=2), out=tmp_path / "run", watcher=nestling.Watcher(round=look))
    assert seen == [1, 2]


def test_a_callback_may_stop_a_run_and_keep_its_result(tmp_path: Path) -> None:
    rounds: list[int] = []
    watcher = nestling.Watcher(
        round=lambda row: rounds.append(row["round"]), stop=lambda: len(rounds) == 2
    )
    stopped = nestling.run(small(rounds=5), out=tmp_path / "run", watcher=watcher)
    assert stopped.summary["rounds_done"] == 2 and stopped.model is not None
    gone_on = nestling.resume(tmp_path / "run")
    whole = nestling.run(small(rounds=5))
    assert gone_on.summary["global_score"] == whole.summary["global_score"]
    without = nestling.run(small(rounds=5), watcher=nestling.Watcher(stop=lambda: True))
    assert without.summary["rounds_done"] == 1


def test_a_sweep_is_followed_and_stopped(tmp_path: Path) -> None:
    """With what is public alone."""
    told: list[object] = []
    rounds: list[str] = []
    watcher = nestling.SweepWatcher(
        started=lambda cells: told.append(dict(cells)),
        round=lambda name, row: rounds.append(f"{name} {row['round']}"),
        ended=lambda name, why: told.append((name, why)),
        stop=lambda: len(rounds) >= 3,
    )
    options: dict[str, Any] = {"methods": "fedavg", "seeds": 2, "jobs": 1}
    found = nestling.sweep(small(rounds=2), out=tmp_path / "s", watcher=watcher, **options)
    first, second = "fedavg-seed0", "fedavg-seed1"
    assert rounds == [f"{first} 1", f"{first} 2", f"{second} 1"]
    assert told == [{first: (2, 0), second: (2, 0)}, (first, ""), (second, "")]
    assert any(f"{second} is not finished" in text for text in found.cautions)
    told.clear(), rounds.clear()
    finished = nestling.sweep(small(rounds=2), out=tmp_path / "s", watcher=watcher, **options)
    assert told[0] == {first: (2, 2), second: (2, 1)} and rounds == [f"{second} 2"]
    assert finished.cautions == []


def test_a_notebook_shows_a_result_as_a_table(run: Path) -> None:
    for result in (nestling.load(run), nestling.run(small(rounds=1))):
        html = result._repr_html_()
        assert "<table>" in html and str(result.summary["title"]) in html and "large" in html
    assert "data-value" in nestling.compare(run)._repr_html_()


def test_a_prompt_shows_a_result_on_one_line_and_a_comparison_as_a_table(run: Path) -> None:
    """Not the metrics of every round, which fill the screen."""
    result = nestling.load(run)
    said = repr(result)
    last = result.summary["global_score"]["last"]
    assert said.startswith("<Result: HeteroFL on ") and said.endswith(f"{run}>")
    assert "3 rounds" in said and f"global {last:.2%}" in said and len(said) < 100 + len(str(run))
    assert repr(nestling.run(small(rounds=1))).endswith("%>")  # without a folder
    found = nestling.compare(run)
    assert "| HeteroFL | 1 |" in repr(found) and len(repr(found)) < 1000


@pytest.mark.skipif(not importlib.util.find_spec("pandas"), reason="pandas is an extra")
def test_data_frames(run: Path) -> None:
    result = nestling.load(run)
    frame = result.to_pandas()
    assert list(frame["round"]) == [1, 2, 3]
    assert list(frame["global_score"]) == [row["global_score"] for row in result.metrics]
    assert "large/global_score" in frame and frame["bytes"].is_monotonic_increasing
    lines = nestling.compare(run).to_pandas()
    assert list(lines["seed"]) == [0] and lines["global_last"][0] == frame["global_score"][2]


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is an extra")
def test_plots(run: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    result = nestling.load(run)
    for over in ("rounds", "bytes", "seconds", "joules"):
        axes = result.plot(over)
        assert axes.get_ylabel() == "accuracy"
    lines = result.plot().get_lines()
    assert [line.get_label() for line in lines] == ["global", "personal"]
    assert list(lines[0].get_ydata()) == [row["global_score"] for row in result.metrics]
    with pytest.raises(InputError, match="rounds"):
        result.plot("time")


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="matplotlib is an extra")
def test_a_comparison_is_plotted_with_the_band_of_its_seeds(tmp_path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(2)]
    other = write_run(tmp_path / "other", method="fedavg", title="FedAvg")
    found = nestling.compare(*runs, other)
    for over in ("rounds", "bytes", "seconds", "joules"):
        axes = found.plot(over)
        assert axes.get_ylabel() == "global accuracy"
        assert {line.get_label() for line in axes.get_lines()} == {"HeteroFL", "FedAvg"}
        assert len(axes.collections) == 1  # one seed has no spread
    assert found.plot(ax=axes) is axes
    heterofl = next(one for one in found.plot().get_lines() if one.get_label() == "HeteroFL")
    ends = [nestling.load(one).summary["global_score"]["last"] for one in runs]
    assert heterofl.get_ydata()[-1] == pytest.approx(sum(ends) / 2)
    with pytest.raises(InputError, match="rounds"):
        found.plot("time")


@pytest.mark.parametrize(("package", "call"), [("pandas", "to_pandas"), ("matplotlib", "plot")])
def test_what_is_not_installed_is_named(
    run: Path, package: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [known for known in sys.modules if known.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"needs {package}.*nestling\[notebook\]"):
        getattr(nestling.load(run), call)()


def test_papers_names_of_methods_are_known() -> None:
    assert set(ALIASES.values()) <= set(METHODS) and not set(ALIASES) & set(METHODS)
    assert nestling.Experiment(method="inco").method.name == "incoavg"
    assert nestling.Experiment.from_table({"method": {"name": "fed-cma"}}).method.name == "fedcma"
    assert method_class("hetero-fl") is method_class("heterofl")


def test_the_version_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "nestling", "--version"], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == nestling.__version__


def test_the_example_of_readme_md_runs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, but for one round instead of ten and the name of a run that is there."""
    pytest.importorskip("matplotlib").use("agg")
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "rounds=10" in shown and "runs/NAME" in shown
    monkeypatch.chdir(run.parent)
    names: dict[str, object] = {}
    exec(shown.replace("rounds=10", "rounds=1").replace("runs/NAME", run.name), names)
    assert all(isinstance(names[name], nn.Module) for name in ("model", "small"))

"""The analysis of real runs, from a result and from a folder, and the command that writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import nestling
from nestling import FleetConfig, Named, Tier
from nestling.errors import InputError
from nestling.runfiles import ANALYSIS
from nestling.runs.analysis import analyse, client_networks, sample_rows, spread, write_analysis
from nestling.runs.run import opened
from tests.small import small
from tests.test_bad_input import SMALL, call

MIXED = FleetConfig(
    tiers=(
        Tier(name="mlp", model="mlp", model_options={"hidden": [16]}, count=2),
        Tier(name="cnn", ratio=0.5, count=2),
    )
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in which every client keeps a network of its own, of two kinds."""
    path = tmp_path_factory.mktemp("runs") / "local"
    nestling.run(small("local", fleet=MIXED, participants=0), out=path)
    return path


def test_a_folder_and_its_result_give_the_same_analysis(tmp_path: Path) -> None:
    result = nestling.run(small("local", fleet=MIXED, participants=0), out=tmp_path / "run")
    assert analyse(result, rows=40) == analyse(tmp_path / "run", rows=40)


def test_what_is_opened_are_the_models_that_were_tested(folder: Path) -> None:
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with opened(folder) as result:
        bench, world = result.federation.bench, result.federation.world
        right = {}
        for device, network in client_networks(result.federation, range(4)):
            with torch.no_grad():
                right[device.id] = float(
                    (network(bench.x_test).argmax(1) == bench.y_test).float().mean()
                )
        for tier in world.plans:
            own = [right[c] for c in right if world.device(c).tier == tier]
            assert sum(own) / len(own) == pytest.approx(
                result.metrics[-1]["by_tier"][tier]["global_score"], abs=1e-6
            )
        with pytest.raises(InputError, match="another process"), opened(folder):
            pass
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_the_numbers_of_an_analysis(folder: Path) -> None:
    found = analyse(folder, rows=60)
    assert [c["tier"] for c in found["clients"]] == ["mlp", "mlp", "cnn", "cnn"] and found[
        "round"
    ] == 2
    assert found["labels"] == sorted(found["labels"]) and {
        found["labels"].count(c) for c in range(10)
    } == {6}
    with opened(folder) as result:
        y = result.federation.bench.y_test[found["rows"]]
        for place, (_, network) in enumerate(
            client_networks(result.federation, [c["id"] for c in found["clients"]])
        ):
            with torch.no_grad():
                named = network(result.federation.bench.x_test[found["rows"]]).argmax(1)
            assert found["agreement"]["right"][place] == pytest.approx(
                float((named == y).float().mean()), abs=1e-5
            )
    assert y.tolist() == found["labels"]
    first, features = found["cka"]["first"], found["cka"]["features"]
    # MLPs have no convolutions
    assert [value is None for value in first[0]] == [True] * 4 and first[2][3] is not None
    assert all(value is not None for row in features for value in row) and features[0][0] == 1
    maps = {one["stage"]: one for one in found["maps"]}
    assert maps["first"]["clients"] == [2, 3] and maps["features"]["clients"] == [0, 1, 2, 3]
    assert all(len(places) == len(one["rows"]) for one in maps.values() for places in one["at"])


def test_clients_of_one_global_model_say_the_same(tmp_path: Path) -> None:
    tiers = (Tier(name="half", ratio=0.5, count=2), Tier(name="full", ratio=1.0, count=2))
    found = analyse(nestling.run(small(fleet=FleetConfig(tiers=tiers), rounds=1)), rows=30)
    equal, likeness = found["agreement"]["equal"], found["cka"]["last"]
    assert equal[0][1] == equal[2][3] == 1 and equal[0][2] < 1
    assert likeness[0][1] == pytest.approx(1) and likeness[0][2] < 1


def test_clients_are_spread_over_tiers_and_rows_over_classes(folder: Path) -> None:
    with opened(folder) as result:
        world = result.federation.world
        assert [[world.device(c).tier for c in spread(world, n)] for n in (1, 3, 9)] == [
            ["mlp"],
            ["mlp", "mlp", "cnn"],
            ["mlp", "mlp", "cnn", "cnn"],
        ]
        rows = sample_rows(result.federation, 10**6)
        assert len(rows.unique()) == len(result.federation.bench.y_test)


def test_a_diverged_client_is_left_out_by_name() -> None:
    result = nestling.run(small("local", fleet=MIXED, participants=0))
    store, broken = result.federation.world.store, 1
    store.put(broken, {name: t * torch.nan for name, t in store.get(broken).items()}, 3)
    found = analyse(result, rows=20)
    assert broken not in [c["id"] for c in found["clients"]] and len(found["clients"]) == 3
    assert any(f"Client {broken} is left out" in note for note in found["notes"])


def test_bad_requests_are_refused(tmp_path: Path, folder: Path) -> None:
    for changes, words in (
        ({"clients": 1}, "at least 2 clients"),
        ({"rows": 3}, "at least 8 rows"),
    ):
        with pytest.raises(InputError, match=words):
            analyse(folder, **changes)
    with pytest.raises(InputError, match="is not a run folder"):
        analyse(tmp_path)
    (tmp_path / "experiment.toml").write_text(small().to_toml())
    with pytest.raises(InputError, match="has not finished a round"):
        analyse(tmp_path)
    with pytest.raises(InputError, match="no folder to write to"):
        write_analysis(
            nestling.run(small(rounds=1, participants=1, model=Named("tinycnn", {"channels": [4]})))
        )


def test_the_command_writes_the_analysis_and_the_report_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, page = tmp_path / "run", tmp_path / "page.html"
    assert (
        call(
            ["run", *SMALL, "--set", "method.name=local", "--out", str(run), "--quiet"], monkeypatch
        )
        == 0
    )
    assert "The clients' models compared" not in (run / "report.html").read_text()
    assert (
        call(
            ["analyse", str(run), "--clients", "2", "--rows", "20", "--out", str(page)], monkeypatch
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert all(str(path) in shown for path in (run / ANALYSIS, run / "report.html", page))
    assert len(json.loads((run / ANALYSIS).read_text())["clients"]) == 2
    for written in (run / "report.html", page):
        assert "models compared" in written.read_text() and "c-cka-features" in written.read_text()
    assert call(["analyse", str(tmp_path / "nowhere")], monkeypatch) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_a_run_that_went_on_says_that_its_analysis_is_older(tmp_path: Path) -> None:
    run = tmp_path / "run"
    nestling.run(small("local", rounds=1), out=run)
    write_analysis(run, clients=2, rows=20)
    nestling.resume(run, overrides=("rounds=2",))
    assert "after round 1, while the run has played 2 rounds" in (run / "report.html").read_text()

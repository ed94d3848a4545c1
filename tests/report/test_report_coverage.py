"""How often each channel was trained: counted, kept over a resume, and pictured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nestling
from nestling import EngineConfig, Experiment
from nestling.report.bands import stretches
from nestling.report.folder import read_run
from nestling.report.page import write_comparison, write_report
from nestling.report.run_page import run_body
from nestling.runs import checkpoint
from nestling.runs.assemble import assemble
from nestling.runs.coverage import Coverage
from nestling.store import ClientStore
from nestling.views import masked, prefix, rolling
from nestling.world import Piece
from tests.report.made_up_run import write_run
from tests.shell import ROOT
from tests.small import small

LAYER = "stages.1.conv.weight"


def counts(folder: Path) -> dict[str, Any]:
    """The counts of a run's main network, by layer."""
    network = json.loads((folder / "coverage.json").read_text())["networks"]["main"]
    return {layer["name"]: layer["counts"] for layer in network["layers"]}


@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
def test_the_counts_are_those_of_the_pieces(method: str, tmp_path: Path) -> None:
    result = nestling.run(small(method, rounds=3), out=tmp_path / "run")
    found, replies = counts(tmp_path / "run"), 0
    world, rule = result.federation.world, result.federation.method
    axes = world.main.axes
    expected = np.zeros(len(found[LAYER]))
    for row in result.metrics:
        for client in row["clients"]:
            view = rule.piece(world.device(client, row["round"]), row["round"]).view
            expected[view.where(LAYER)[0]] += 1
            replies += 1
    assert found[LAYER] == expected.tolist()
    assert len(found[LAYER]) == axes.shapes[LAYER][0]
    falling = found[LAYER] == sorted(found[LAYER], reverse=True)
    assert falling == (method == "heterofl")
    assert max(found[LAYER]) <= replies == 9


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    nestling.run(small("fedrolex", rounds=4), out=tmp_path / "whole")
    nestling.run(small("fedrolex", rounds=2), out=tmp_path / "parts")
    nestling.resume(tmp_path / "parts", overrides=("rounds=4",))
    assert counts(tmp_path / "parts") == counts(tmp_path / "whole")


def test_every_engine_counts_the_same(tmp_path: Path) -> None:
    found = []
    for engine in (EngineConfig("inline"), EngineConfig("pool", workers=2), EngineConfig("cohort")):
        out = tmp_path / engine.name
        nestling.run(small("fedrolex", rounds=2).with_changes(engine=engine), out=out)
        found.append(counts(out))
    assert found[0] == found[1] == found[2]


def test_a_checkpoint_holds_the_counts_of_its_round(tmp_path: Path) -> None:
    nestling.run(small("fedrolex", rounds=2), out=tmp_path / "run")
    saved = checkpoint.load(tmp_path / "run")
    assert saved is not None and saved[1].round == 2
    told = saved[1].coverage["networks"]["main"]
    assert told["client_rounds"] == 6
    assert told["counts"] == [c for layer in counts(tmp_path / "run").values() for c in layer]


def test_counts_go_on_from_what_was_told_and_from_nothing_else() -> None:
    reference = assemble(small("heterofl"), ClientStore())[1].world.main
    first = Coverage()
    first.add([Piece(reference, reference.full)] * 2)
    told = json.loads(json.dumps(first.told()))
    again = Coverage()
    again.restore(told, {reference.name: reference})
    assert again.told() == first.told()
    for damaged in ({}, None, {**told, "networks": {"main": {"counts": [1]}}}, {"networks": 3}):
        begun = Coverage()
        begun.restore(damaged, {reference.name: reference})
        assert begun.told() == {}


def test_views_that_are_drawn_anew_are_counted_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nestling.runs.coverage.MOST_NOTES", 3)
    reference = assemble(small("heterofl"), ClientStore())[1].world.main
    counted = Coverage()
    for step in range(7):
        counted.add([Piece(reference, rolling(reference.axes, 0.5, step))])
        assert len(counted._notes) <= 3
    assert counted.told()["networks"]["main"]["client_rounds"] == 7


def test_a_round_without_masks_looks_at_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = assemble(small("heterofl"), ClientStore())[1].world.main
    view, counted = prefix(reference.axes, 0.5), Coverage()
    _ = reference.parameters

    class Untouched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, *_: Any, **__: Any) -> Any:
            raise AssertionError(f"{func} was called")

    masks = {LAYER: torch.ones(reference.axes.shapes[LAYER], dtype=torch.bool)}
    with Untouched():
        counted.add([Piece(reference, view), Piece(reference, masked(view, masks))])
        assert counted.told()["masked"] == 1


@pytest.mark.parametrize("method", ["lotteryfl", "prunefl"])
def test_masks_are_not_counted_and_the_page_says_so(method: str, tmp_path: Path) -> None:
    nestling.run(small(method, rounds=2), out=tmp_path / "run")
    told = json.loads((tmp_path / "run" / "coverage.json").read_text())
    assert told["masked"] > 0
    assert "not counted: masks say" in (tmp_path / "run" / "report.html").read_text()


def test_a_method_that_shares_no_weights_has_no_picture(tmp_path: Path) -> None:
    nestling.run(small("fedproto", rounds=1), out=tmp_path / "run")
    assert not (tmp_path / "run" / "coverage.json").exists()
    assert '<section id="coverage"' not in (tmp_path / "run" / "report.html").read_text()


def test_the_picture_says_who_trained_what(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    layers = [
        {"name": "a.conv.weight", "by": "outputs", "counts": [8, 8, 2, 0]},
        {"name": "head.weight", "by": "whole", "counts": [8]},
    ]
    told = {"round": 4, "rounds": 3, "networks": {"main": {"client_rounds": 8, "layers": layers}}}
    (folder / "coverage.json").write_text(json.dumps(told))
    page = write_report(folder).read_text()
    for words in (
        "a.conv, outputs 0 to 1: 100.0%, 8 of 8 replies",
        "a.conv, output 2: 25.0%, 2 of 8 replies",
        "a.conv, output 3: 0.0%, 0 of 8 replies",
        "head, the whole layer: 100.0%",
        "1 of 5 channels",
        "not counted before round 2",
    ):
        assert words in page, words


def test_a_comparison_shows_method_beside_method(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", method="x", title="Other")]
    for at, folder in enumerate(runs):
        layers = [{"name": "conv.weight", "by": "outputs", "counts": [4, 2 * at]}]
        told = {"round": 2, "rounds": 2, "networks": {"main": {"client_rounds": 4}}}
        told["networks"]["main"]["layers"] = layers  # type: ignore[index]
        (folder / "coverage.json").write_text(json.dumps(told))
    page = write_comparison(runs, tmp_path / "all.html").read_text()
    assert "How often each channel was trained: HeteroFL" in page
    assert "How often each channel was trained: Other" in page
    assert "conv, output 1: 50.0%, 2 of 4 replies" in page
    assert "1 of 2 channels" in page


def test_nothing_odd_in_the_file_stops_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path, rounds=2)
    for odd in (
        {"networks": 3},
        {"networks": {"main": None}},
        {"networks": {"main": {"client_rounds": "x", "layers": [{"counts": [1]}]}}},
        {"networks": {"main": {"client_rounds": 2, "layers": [{"counts": [None, -1, "x"]}]}}},
        {"networks": {"main": {"client_rounds": 2, "layers": [{"counts": [1, 2], "by": 5}]}}},
    ):
        (folder / "coverage.json").write_text(json.dumps(odd))
        assert run_body(read_run(folder))


def test_neighbours_alike_are_one_cell_and_many_channels_few() -> None:
    assert stretches([1.0, 1.0, 0.5]) == [(0, 1, 1.0), (2, 2, 0.5)]
    many = stretches([at / 1000 for at in range(1000)])
    assert len(many) <= 130
    assert many[0][0] == 0
    assert many[-1][1] == 999


def test_the_example_of_the_page_reaches_what_reading_the_page_md_says(tmp_path: Path) -> None:
    """Who trains what does not depend on how long: a batch of all rows will do."""
    said = (ROOT / "docs" / "reading_the_page.md").read_text()
    quick = ("train.batch=10000", "evaluate.every=12", "engine.name=inline")
    for method in ("fedavg", "heterofl", "fedrolex", "flexfl"):
        overrides = (f"method.name={method}", *quick)
        asked = Experiment.read(ROOT / "examples" / "coverage.toml", overrides)
        nestling.run(asked, out=tmp_path / method)
        network = json.loads((tmp_path / method / "coverage.json").read_text())["networks"]["main"]
        shares = [n / network["client_rounds"] for one in network["layers"] for n in one["counts"]]
        if method == "fedavg":
            assert f"{shares.count(0)} of the {len(shares)} channels" in " ".join(said.split())
        else:
            assert f"{min(shares):.1%}" in said
        if method in ("heterofl", "fedrolex"):
            assert f"{sum(shares) / len(shares):.1%}" in said

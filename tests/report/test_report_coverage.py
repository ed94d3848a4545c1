"""How often each channel was trained: counted, kept over a resume, and pictured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nestling
from nestling.report.bands import stretches
from nestling.report.folder import read_run
from nestling.report.page import write_comparison, write_report
from nestling.report.run_page import run_body
from nestling.runs.assemble import assemble
from nestling.runs.coverage import Coverage
from nestling.store import ClientStore
from nestling.world import Piece
from tests.report.made_up_run import write_run
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


def test_counts_that_are_ahead_of_the_checkpoint_are_not_taken() -> None:
    reference = assemble(small("heterofl"), ClientStore())[1].world.main
    piece = Piece(reference, reference.full)
    first = Coverage()
    first.add([piece])
    first.told(1)
    first.add([piece, piece])
    written = json.loads(json.dumps(first.told(2)))
    for round, replies in ((2, 3), (1, 1)):
        again = Coverage()
        again.restore(written, round, {reference.name: reference})
        assert again.networks[reference.name].client_rounds == replies
    begun = Coverage()
    begun.restore(written, 0, {reference.name: reference})
    assert begun.networks == {}
    for damaged in ({}, None, {"round": 1, "networks": {"main": {"layers": [{}]}}}):
        begun.restore(damaged, 1, {reference.name: reference})
        assert begun.networks == {}


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

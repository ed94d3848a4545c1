"""Three of eight devices with good keys lie, over TLS and Flower, and the server merges by a rule:
the model ends as if nobody had lied."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (nestling[fleet])")

from tests.fleet import lying
from tests.fleet.flower.test_liars import Story, told
from tests.fleet.loop import inline
from tests.fleet.processes import SECONDS


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    root: Path = tmp_path_factory.mktemp("rule")
    devices = lying.handles(root / "devices", lying.all_three)
    return told(root, lying.asked("aligned"), devices, deadline=SECONDS)  # all are heard


def test_the_model_ends_near_that_of_an_honest_fleet(story: Story) -> None:
    honest = inline(lying.asked("mean"))[1][-1]["global_score"]
    assert honest > 0.75
    assert story.rows[-1]["global_score"] > honest - 0.05


def test_nobody_could_be_refused(story: Story) -> None:
    assert [row["merged"] for row in story.rows] == [len(lying.NAMES)] * lying.ROUNDS
    assert not any(row.get("refusals") for row in story.rows)


def test_who_goes_far_or_claims_many_rows_is_named(story: Story) -> None:
    clients = {name: client for client, name in enumerate(lying.NAMES)}
    for row in story.rows:
        assert {clients["far"], clients["rows"]} <= {one["client"] for one in row["clipped"]}
    assert f"says it has {lying.ROWS} rows" in story.server.text

"""Every method that needs no classes trains every task; every other refuses it before it starts;
the pages say which is which."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestling import Data, Experiment, FleetConfig, InputError, Named, SplitConfig, Tier, Train, run
from nestling.cli.listing import method_rows
from nestling.methods import METHODS, method_class
from nestling.runs.assemble import assemble
from nestling.tasks import TASKS
from tests.small import QUICK, small

RNG = np.random.default_rng(0)
N = 120
FEW = RNG.normal(size=(N, 6)).astype(np.float32)
PICTURES = RNG.normal(size=(N, 1, 8, 8)).astype(np.float32)
CLASSES = np.arange(N) % 3
WAVES = np.sin(np.arange(24)[:, None] * (0.3 + RNG.random((N, 1, 2)))).astype(np.float32)
COUNTED = (np.cumsum(RNG.integers(1, 3, (N, 13)), 1) % 7).astype(np.int64)
LEARNED: dict[str, tuple[Data, Named]] = {
    "multi-label": (
        Data.of(PICTURES, PICTURES[:, 0, 0, :3] > 0, layout="chw", task="multi-label"),
        Named("tinycnn", {"channels": [8, 8]}),
    ),
    "regression": (
        Data.of(FEW, 2 * FEW[:, :2] + 1, task="regression"),
        Named("mlp", {"hidden": [16, 16]}),
    ),
    "forecast": (
        Data.of(WAVES, layout="lc", task="forecast"),
        Named("forecaster", {"channels": 8, "depth": 3}),
    ),
    "reconstruction": (
        Data.of(
            FEW + 3 * (CLASSES == 2)[:, None], CLASSES, task="reconstruction", normal=("0", "1")
        ),
        Named("autoencoder", {"hidden": [16, 8], "code": 4}),
    ),
    "next-token": (
        Data.of(COUNTED, layout="tokens", task="next-token"),
        Named("gpt", {"dim": 16, "depth": 2, "hidden": 16, "heads": 2, "head_dim": 8}),
    ),
}
SERVE_ALL = [name for name in METHODS if method_class(name).info.any_task]
SETTINGS: dict[str, dict[str, Any]] = {
    **QUICK,
    "fedhm": {"dense": 0, "linear": True},
    "prism": {"dense": 0, "linear": True},
    "flexfl": {"ratios": "uniform"},
}
IN_DEPTH = {"fedin": {"forecast", "next-token"}, "incoavg": set[str]()}
"""Methods that need blocks, and the tasks whose network has some; pictures bring another."""


def experiment(method: str, task: str) -> Experiment:
    data, network = LEARNED[task]
    if method in IN_DEPTH and task == "multi-label":
        network = Named("tinyresnet")
    return small(
        Named(method, SETTINGS.get(method, {})),
        data=data,
        model=network,
        participants=0,
        train=Train(epochs=1, batch=16, lr=0.05),
        split=SplitConfig(public=0.1, min_size=4),
        fleet=FleetConfig(
            tiers=(Tier("small", ratio=0.5, count=2), Tier("whole", ratio=1.0, count=1))
        ),
    )


def test_there_is_data_for_every_task() -> None:
    assert {*LEARNED, "classification"} == set(TASKS)


@pytest.mark.parametrize(
    "task",
    [pytest.param(t, marks=() if t == "next-token" else pytest.mark.slow) for t in LEARNED],
)
@pytest.mark.parametrize("method", SERVE_ALL)
def test_a_method_without_classes_trains_it(tmp_path: Path, method: str, task: str) -> None:
    if method in IN_DEPTH and task not in {*IN_DEPTH[method], "multi-label"}:
        pytest.skip("it needs a network of blocks")
    found = run(experiment(method, task), out=tmp_path / "run").summary
    for key in ("global_score", "personal_score"):
        assert math.isfinite(found[key]["last"]), key
    assert math.isfinite(found["metrics"]["test_loss"]["last"])


@pytest.mark.parametrize("method", [name for name in METHODS if name not in SERVE_ALL])
def test_any_other_refuses_it(method: str) -> None:
    with pytest.raises(InputError, match="serves classification only") as caught:
        assemble(replace(experiment("fedavg", "regression"), method=method))
    assert caught.value.field == "method.name"


def test_the_pages_and_the_list_say_which() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    text = page[page.index("## Which method") : page.index("The others send")]
    assert sorted(set(re.findall(r"`([a-z-]+)`", text)) & set(METHODS)) == sorted(SERVE_ALL)
    assert len(SERVE_ALL) == 20  # "Twenty methods", here and in other pages
    assert {row["name"] for row in method_rows() if row["any_task"]} == set(SERVE_ALL)

"""Every method with every task: it learns something, alike on every engine, or refuses in a line
that says why."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nestling
from nestling import Data, EngineConfig, Experiment, FleetConfig, Named, SplitConfig, Tier, Train
from nestling.cli.listing import method_rows
from nestling.errors import InputError
from nestling.methods import METHODS, method_class
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.tasks import TASKS
from nestling.training.stacks.together import work_together
from tests.engines.test_cohort import WAYS, alone, assert_same, trainer
from tests.small import QUICK, errands_of, small

ROWS, STEPS, WORDS = 240, 8, 7
CHANCE = np.random.default_rng(5)
NUMBERS = CHANCE.normal(size=(ROWS, 6)).astype(np.float32)
WAVES = np.sin(CHANCE.uniform(0, 6, (ROWS, 1, 1)) + np.arange(16)[:, None] * [[0.4, 0.7]])
TEXT = (CHANCE.integers(0, WORDS, (ROWS, 1)) + np.arange(STEPS + 1)) % WORDS
LINES = NUMBERS @ CHANCE.normal(size=(6, 3)).astype(np.float32)
KINDS = (LINES[:, 0] > 0).astype(int)

MLP = Named("mlp", {"hidden": [16, 16]})
DATA: dict[str, tuple[dict[str, Any], Named]] = {
    "classification": ({"x": NUMBERS, "y": KINDS}, MLP),
    "multi-label": ({"x": NUMBERS, "y": LINES > 0}, MLP),
    "regression": ({"x": NUMBERS, "y": LINES}, MLP),
    "reconstruction": (
        {"x": NUMBERS, "y": KINDS, "normal": ("0",)},
        Named("autoencoder", {"hidden": [16, 4, 16]}),
    ),
    "forecast": ({"x": WAVES.astype(np.float32), "y": KINDS, "horizon": 4}, Named("forecaster")),
    "next-token": ({"x": TEXT, "y": KINDS, "layout": "tokens"}, Named("gpt", {"depth": 2})),
}
"""Of every task: rows, and a network for them."""
SET: dict[str, dict[str, Any]] = {
    "fedhm": {"linear": True, "dense": 0},
    "fedin": {"averaging": "group"},
    "flexfl": {"ratios": "uniform"},
    "prism": {"linear": True, "dense": 0},
}
"""Settings with which methods take networks of other kinds."""
DEEP = {"incoavg": tuple(DATA), "fedin": ("multi-label", "regression", "reconstruction")}
"""Methods that cut the depth, and the tasks whose networks here are not deep enough for them."""
PICKY = {
    "depthfl": "an exit behind every stage",
    "draftfed": "has none",
    "fedftg": "takes token ids",
    "fedhm": "no layer to factorise",
    "fedin": "cannot be cut in depth",
    "fedzkt": "takes token ids",
    "hafl-ghn": "no vectors of words",
    "inclusivefl": "cannot be cut in depth",
    "incoavg": "cannot be cut in depth",
    "prism": "no layer to factorise",
    "scalefl": "an exit behind every stage",
}
"""Methods that do not take an LSTM over words, and what they say of it."""

ANY = [name for name in METHODS if method_class(name).info.any_task]
OTHERS = [name for name in METHODS if name not in ANY]
EQUAL = (Tier(name="equal", ratio=0.5, count=4),)
BESIDE = [name for name in DATA if name != "classification"]


def made(method: str, task: str, **changes: Any) -> Experiment:
    rows, network = DATA[task]
    settings: dict[str, Any] = {
        "data": Data.of(**rows, task=task),
        "model": network,
        "rounds": 1,
        "split": SplitConfig(kind="dirichlet", alpha=1.0),
        "train": Train(epochs=1, batch=16, lr=0.01, augment="none"),
    }
    return small(Named(method, SET.get(method, {})), **{**settings, **changes})


def state(federation: Federation) -> dict[str, Any]:
    parts, store = federation.method.state(), federation.world.store
    kept = {f"client {c}": store.get(c) for c in store.clients()}
    return {f"{k}/{n}": t for k, part in {**parts, **kept}.items() for n, t in part.items()}


def test_every_task_is_played() -> None:
    assert set(DATA) == set(TASKS) and len(ANY) >= 18


def served() -> list[Any]:
    """Methods with tasks; each method once in the quick tests."""
    pairs = [(method, task) for method in ANY for task in BESIDE]
    quick = {(method, BESIDE[k % len(BESIDE)]) for k, method in enumerate(ANY)}
    return [
        pair if pair in quick else pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs
    ]


@pytest.mark.parametrize(("method", "task"), served())
def test_it_is_learned_and_engines_agree(method: str, task: str) -> None:
    """Stacked and one by one the same up to rounding; scores are numbers."""
    if task in DEEP.get(method, ()):
        with pytest.raises(InputError, match=r"cut in depth|needs a residual network"):
            assemble(made(method, task))
        return
    played = {
        engine: nestling.run(made(method, task, engine=EngineConfig(engine, 1)))
        for engine in ("inline", "cohort")
    }
    alone, stacked = (state(result.federation) for result in played.values())
    assert alone.keys() == stacked.keys() and alone
    for name, tensor in alone.items():
        apart = float((tensor.double() - stacked[name].double()).norm())
        assert apart <= 1e-3 * float(tensor.double().norm()) + 1e-6, name
    last = played["inline"].metrics[-1]
    assert math.isfinite(last["global_score"]) and math.isfinite(last["personal_score"])
    assert last["loss"] == pytest.approx(played["cohort"].metrics[-1]["loss"], rel=1e-3)


@pytest.mark.parametrize("task", BESIDE)
@pytest.mark.parametrize("method", ["fedavg", "heterofl", "fedrolex", "shared-average", "flexfl"])
def test_the_loss_falls_in_parts_of_a_network(method: str, task: str) -> None:
    train = Train(epochs=2, batch=16, lr=0.005, augment="none")
    result = nestling.run(made(method, task, rounds=4, train=train, participants=4))
    first, last = (result.metrics[k]["metrics"]["test_loss"] for k in (0, -1))
    assert last < first


@pytest.mark.parametrize("method", OTHERS)
def test_others_refuse_in_a_line(method: str) -> None:
    with pytest.raises(InputError, match="serves classification only, and regression") as found:
        assemble(made(method, "regression"))
    assert found.value.field == "method.name" and "any task" in str(found.value.fix)


@pytest.mark.parametrize("method", METHODS)
def test_texts_are_classified(method: str) -> None:
    """Networks of token ids serve every method that takes them; others say what they want."""
    text = Data.of(TEXT[:, :STEPS], KINDS, layout="tokens")
    lstm = Named("lstm", {"words": WORDS, "hidden": [16], "dim": 8})
    rates = {"pareto": [[0.5, 0.5], [0.0, 0.0]]} if method == "distreal" else {}
    options = {**QUICK.get(method, {}), **SET.get(method, {}), **rates}
    asked = made(method, "classification", data=text, model=lstm)
    asked = asked.with_changes(method=Named(method, options), split=SplitConfig(public=0.2))
    if method in PICKY:
        with pytest.raises(InputError, match=PICKY[method]):
            assemble(asked)
        return
    assert math.isfinite(nestling.run(asked).metrics[-1]["personal_score"])


def test_the_pages_and_the_list_say_which() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    text = page[page.index("## Which method") : page.index("The others send")]
    assert sorted(set(re.findall(r"`([a-z-]+)`", text)) & set(METHODS)) == sorted(ANY)
    assert len(ANY) == 20  # "Twenty methods", here and in other pages
    assert {row["name"] for row in method_rows() if row["any_task"]} == set(ANY)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("task", BESIDE)
def test_what_a_gpu_records_gives_the_same(task: str, way: str) -> None:
    """The same decisions and the same arithmetic as on a GPU, without graphs."""
    asked, federation = assemble(made("fedavg", task, fleet=FleetConfig(tiers=EQUAL)))
    method, site = asked.make_method(), site_of(federation)
    errands, train = errands_of(federation, 3), trainer(way)
    expected = alone(method, errands, site)
    for _ in range(2):
        assert_same(expected, work_together(method, errands, site, train))

"""A fleet learns whatever a run learns: devices bring rows of their own, whose targets are of any
task, and everything of the user's own is found there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestling import Data, Evaluation, Experiment, FleetConfig, Named, SplitConfig, Tier, Train
from nestling.errors import InputError
from nestling.fleet.node.own_data import read_rows
from nestling.fleet.node.worker import Worker, form_of
from nestling.fleet.protocol.courier import LoopCourier
from nestling.fleet.protocol.wire import Hello, Member, Welcome
from nestling.fleet.server.serving import welcome_of
from nestling.runs.assemble import assemble
from nestling.runs.loop import play
from nestling.tasks import TASKS
from tests.fleet.loop import inline, live, same, state_of, workers_of

CHANCE = np.random.default_rng(5)
ROWS, TEST = 120, np.arange(120) % 5 == 0
WAVES = np.sin(np.arange(16) / 2 + CHANCE.random((ROWS, 3, 1)) * 6).astype(np.float32)
PLACES = np.arange(ROWS) % 4
HEIGHTS = (30 + 7 * WAVES[:, :2, 3]).astype(np.float32)
FLAGS = WAVES[:, :, 0] > 0
TEXTS = (np.arange(13) + CHANCE.integers(0, 9, (ROWS, 1))) % 9
RUN = "ab" * 16


def of(x: Any, y: Any, **settings: Any) -> Data:
    return Data.of(x, y, client=PLACES, test=TEST, **{"scale": "none", **settings})


ODD = (np.arange(ROWS) % 7 == 0).astype(np.int64)
CASES: dict[str, tuple[Data, Named, str]] = {
    "classification": (of(WAVES, ODD, layout="cl"), Named("cnn1d", {"channels": [8, 8]}), "fedavg"),
    "multi-label": (of(WAVES, FLAGS, layout="cl", task="multi-label"), Named("mlp"), "heterofl"),
    "regression": (of(WAVES, HEIGHTS, layout="cl", task="regression"), Named("mlp"), "fedavg"),
    "forecast": (
        of(WAVES, ODD, layout="cl", task="forecast", horizon=4),
        Named("forecaster", {"channels": 8, "depth": 2}),
        "fedavg",
    ),
    "reconstruction": (
        of(WAVES, ODD, layout="cl", task="reconstruction", normal=("0",)),
        Named("autoencoder", {"hidden": [16], "code": 4}),
        "fedavg",
    ),
    "next-token": (
        of(TEXTS, ODD, layout="tokens", task="next-token"),
        Named("gpt", {"dim": 16, "depth": 1, "hidden": 16}),
        "heterofl",
    ),
}
"""Of every task: data whose rows say whose they are, a network, a method."""


def test_there_is_a_case_for_every_task() -> None:
    assert set(CASES) == set(TASKS)


def experiment(task: str, **changes: Any) -> Experiment:
    data, model, method = CASES[task]
    tiers = (Tier(name="small", ratio=0.5, count=2), Tier(name="large", ratio=1.0, count=2))
    settings: dict[str, Any] = {
        "method": method,
        "rounds": 2,
        "participants": 0,
        "data": data,
        "model": model,
        "fleet": FleetConfig(tiers=tiers),
        "split": SplitConfig(kind="natural", public=0.0),
        "train": Train(epochs=1, batch=8, lr=0.02),
        "evaluate": Evaluation(every=1, clients=4),
    }
    return Experiment(**{**settings, **changes})


def files(task: str, home: Path) -> dict[int, str]:
    """Every client's training rows as they were before the run prepared anything, in a file."""
    split, found = assemble(experiment(task))[1].world.split, {}
    used = np.flatnonzero(~TEST & ((ODD == 0) | (task != "reconstruction")))
    y = {"classification": ODD, "multi-label": FLAGS, "regression": HEIGHTS}.get(task)
    x = TEXTS if task == "next-token" else WAVES
    for client in range(4):
        rows = used[split.indices(client)]
        found[client] = str(home / f"{client}.npz")
        np.savez(found[client], x=x[rows], **({} if y is None else {"y": y[rows]}))
    return found


@pytest.mark.parametrize("task", CASES)
def test_devices_with_rows_of_their_own(task: str, tmp_path: Path) -> None:
    """As the run in one process, bit for bit; what is measured is the task's."""
    here, wanted = inline(experiment(task))
    workers = workers_of(tmp_path / "w", 4, data=files(task, tmp_path))
    _, there = live(
        experiment(task), LoopCourier({c: worker.handle for c, worker in workers.items()})
    )
    rows = list(play(there))
    assert [row["dropped"] + row["refused"] + row["late"] for row in rows] == [0, 0]
    assert same(state_of(there), state_of(here))
    assert rows[-1]["global_score"] == wanted[-1]["global_score"]
    assert rows[-1]["metrics"].keys() >= {"test_loss"}
    entries = there.engine.roster.entries  # type: ignore[attr-defined]
    assert sum(entry.member.rows for entry in entries) == len(here.bench.x)


def told(task: str) -> Welcome:
    settled, federation = assemble(experiment(task))
    return Welcome.from_bytes(welcome_of(RUN, settled, federation))


@pytest.mark.parametrize("task", CASES)
def test_the_form_of_a_run_takes_no_memory_and_is_that_of_its_data(task: str) -> None:
    form, data = form_of(told(task)).dataset, assemble(experiment(task))[1].bench
    assert form.learned.name == task
    for blank, real in ((form.x, data.x), (form.y, data.y)):
        assert blank.dtype == real.dtype and blank.shape == real.shape
    assert form.x.untyped_storage().nbytes() <= 4 * 8 * 64


def test_values_are_brought_to_the_scale_of_the_run(tmp_path: Path) -> None:
    welcome = told("regression")
    np.savez(tmp_path / "a.npz", x=WAVES[:5], y=HEIGHTS[:5])
    rows = read_rows(tmp_path / "a.npz", welcome)
    back = rows.y.double().numpy() * welcome.scale + welcome.mean
    assert np.allclose(back, HEIGHTS[:5], atol=1e-4) and abs(float(rows.y.mean())) < 2


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "flags": ("multi-label", {"x": WAVES[:4], "y": 2 * FLAGS[:4]}, "more than flags"),
    "few labels": ("multi-label", {"x": WAVES[:4], "y": FLAGS[:4, :2]}, "3 numbers a sample"),
    "words": ("regression", {"x": WAVES[:4], "y": np.array([["a", "b"]] * 4)}, "2 numbers"),
    "nan": ("regression", {"x": WAVES[:4], "y": np.full((4, 2), np.nan)}, "NaN"),
    "short": ("forecast", {"x": WAVES[:4, :, :15]}, "samples are"),
    "no x": ("reconstruction", {"y": ODD[:4]}, "has no array 'x'"),
    "strange token": ("next-token", {"x": TEXTS[:4] + 5}, "holds token"),
    "floats": ("next-token", {"x": TEXTS[:4].astype(np.float32)}, "token ids"),
    "below": ("next-token", {"x": TEXTS[:4] - 9}, "token ids"),
    "none": ("forecast", {"x": WAVES[:0]}, "at least one sample"),
}


@pytest.mark.parametrize("name", BAD)
def test_rows_that_cannot_be_used_are_named(name: str, tmp_path: Path) -> None:
    task, arrays, message = BAD[name]
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(InputError, match=message) as error:
        read_rows(tmp_path / "bad.npz", told(task))
    assert error.value.field == "--data" and "bad.npz" in str(error.value)
    hello = Hello.from_bytes(
        Worker(tmp_path / "w", [Member("a")], str(tmp_path / "bad.npz")).handle(
            told(task).to_bytes()
        )
    )
    assert not hello.members and "bad.npz" in hello.error


@pytest.mark.parametrize(
    "change",
    [
        {"mean": (1.0,)},
        {"mean": (1.0, 2.0), "scale": (1.0, 0.0)},
        {"mean": (1.0, float("inf")), "scale": (1.0, 1.0)},
        {"classes": 0},
    ],
)
def test_a_welcome_that_says_what_cannot_be(change: dict[str, Any]) -> None:
    letter = replace(told("regression"), **change).to_bytes()
    with pytest.raises(InputError):
        Welcome.from_bytes(letter)


def test_classes_are_counted_where_there_are_classes(tmp_path: Path) -> None:
    for task, counted in (("classification", True), ("regression", False)):
        data = files(task, tmp_path)
        worker = Worker(tmp_path / task, [Member("a")], data[0], tell_classes=True)
        (member,) = Hello.from_bytes(worker.handle(told(task).to_bytes())).members
        assert (member.counts is not None) == counted


# -- everything of the user's own ---------------------------------------------------------------

OWN = '''"""What a user has: a data set, a network and a metric."""

import numpy as np
from torch import nn


def rings(rows=240, seed=0):
    chance = np.random.default_rng(seed)
    y, client = chance.integers(0, 3, rows), chance.integers(0, 2, rows)
    angle, radius = chance.uniform(0, 2 * np.pi, rows), 1 + y + chance.normal(0, 0.1, rows)
    x = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).astype(np.float32)
    return x, y, client


def load():
    x, y, client = rings()
    return {"x": x, "y": y, "client": client}


class Network(nn.Sequential):
    def __init__(self, shape, classes):
        layers = nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
        super().__init__(*layers)


def rings_apart(y, found):
    return float(np.abs(y - found).mean())
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "users_rings.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    import users_rings  # type: ignore[import-not-found]

    return users_rings


def rings(**changes: Any) -> Experiment:
    tiers = (Tier(name="small", ratio=0.5, count=1), Tier(name="large", ratio=1.0, count=1))
    settings: dict[str, Any] = {
        "method": "heterofl",
        "rounds": 4,
        "participants": 0,
        "data": Data("users_rings:load", scale="none"),
        "model": Named("users_rings:Network"),
        "fleet": FleetConfig(tiers=tiers),
        "split": SplitConfig(kind="natural", public=0.0),
        "train": Train(epochs=3, batch=10, lr=0.1),
        "evaluate": Evaluation(every=1, metrics=("users_rings:rings_apart",)),
    }
    return Experiment(**{**settings, **changes})


def test_own_code_and_own_rows_on_devices(own: Any, tmp_path: Path) -> None:
    """A data set, a network and a metric of the user's own, as in examples/own_everything.py; every
    device has rows of its own."""
    here, wanted = inline(rings())
    data = {}
    for client in range(2):
        rows = here.world.split.indices(client)
        data[client] = str(tmp_path / f"{client}.npz")
        np.savez(data[client], x=here.bench.x[rows].numpy(), y=here.bench.y[rows].numpy())
    workers = workers_of(tmp_path / "w", 2, data=data)
    _, there = live(rings(), LoopCourier({c: w.handle for c, w in workers.items()}))
    found = list(play(there))
    assert same(state_of(there), state_of(here))
    assert found[-1]["metrics"]["rings_apart"] == wanted[-1]["metrics"]["rings_apart"] < 1.5
    assert isinstance(there.world.main.module, torch.nn.Sequential)


@pytest.mark.slow
def test_a_detector_over_processes(tmp_path: Path) -> None:
    """A server and two devices as processes: the score is the task's, in log, endpoint and page."""
    pytest.importorskip("flwr", reason="flwr is not installed (nestling[fleet])")
    from tests.fleet.processes import fleet

    np.savez(tmp_path / "all.npz", x=WAVES, y=ODD, client=PLACES % 2, test=TEST)
    for client in range(2):
        rows = (client == PLACES % 2) & ~TEST & (ODD == 0)
        np.savez(tmp_path / f"{client}.npz", x=WAVES[rows])
    data = Data(
        "npz",
        path=str(tmp_path / "all.npz"),
        layout="cl",
        scale="none",
        task="reconstruction",
        normal=("0",),
    )
    tiers = (Tier(name="small", ratio=0.5, count=1), Tier(name="large", ratio=1.0, count=1))
    wanted = experiment("reconstruction", data=data, fleet=FleetConfig(tiers=tiers))
    _, rows_here = inline(wanted)
    with fleet(tmp_path) as own_fleet:
        own_fleet.keys("a", "b")
        server = own_fleet.start_server(wanted)
        own_fleet.start_client("a", "small", data=str(tmp_path / "0.npz"))
        own_fleet.start_client("b", "large", data=str(tmp_path / "1.npz"))
        server.wait_done(180)
    lines = [json.loads(line) for line in (server.out / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["global_score"] == rows_here[-1]["global_score"]
    assert {"auroc", "pauc", "test_loss"} <= lines[-1]["metrics"].keys()
    page = (server.out / "report.html").read_text().split("<body", 1)[1]
    assert "AUROC" in page and "accuracy" not in page.lower()
    assert "accuracy" not in (server.out / "server.log.jsonl").read_text().lower()

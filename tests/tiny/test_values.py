"""Targets that are values, on boards: anomaly detection, regression and forecasts are trained as
PyTorch trains them, and to the bit as the same C on this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nestling
from nestling import (
    Data,
    EngineConfig,
    Evaluation,
    Experiment,
    FleetConfig,
    Named,
    SplitConfig,
    Tier,
    Train,
)
from nestling.errors import InputError
from nestling.models import build
from nestling.planning.descriptor import DescriptorSettings
from nestling.planning.forecast import ram
from nestling.planning.plan import plan
from nestling.runs.assemble import assemble
from nestling.tiny.runtime import native, toolchain
from nestling.tiny.runtime.data import SELF, head_of, labels_of, pack
from nestling.tiny.runtime.job import Job, Step
from tests.tiny.nets import train_with_torch
from tests.tiny.test_federation import final, needs_qemu, needs_unicorn, on_host, same
from tests.tiny.test_lowering import HARD, Pair

pytestmark = pytest.mark.skipif(
    toolchain.host_compiler() is None,
    reason="there is no C compiler: apt-get install gcc, or pip install ziglang",
)

CHANCE = np.random.default_rng(11)
STEPS = np.arange(16) / 16


def sensors(rows: int = 240) -> tuple[np.ndarray, np.ndarray]:
    """Windows of three channels; in a sixth of them one channel has stopped."""
    phase, pace = CHANCE.random((2, rows, 1, 1)) * 6
    waves = np.sin(phase + (4 + pace) * (STEPS + np.arange(3)[:, None] / 3))
    y = (np.arange(rows) % 6 == 0).astype(np.int64)
    waves[y == 1, 1] = 0.0
    return (waves + 0.05 * CHANCE.standard_normal(waves.shape)).astype(np.float32), y


X, ODD = sensors()
HEIGHTS = np.stack([X[:, 0].mean(-1) + X[:, 2].max(-1), X[:, 1, 0]], 1).astype(np.float32)
DETECTOR = Named("autoencoder", {"hidden": [16, 16], "code": 4})
TASKS: dict[str, tuple[Data, Named]] = {
    "reconstruction": (
        Data.of(X, ODD, layout="cl", task="reconstruction", normal=("0",)),
        DETECTOR,
    ),
    "regression": (Data.of(X, HEIGHTS, layout="cl", task="regression"), Named("cnn1d")),
    "forecast": (
        Data.of(X, layout="cl", task="forecast", y=ODD, horizon=4),
        Named("cnn1d", {"norm": "none"}),
    ),
}


def experiment(task: str, tiers: tuple[Tier, ...], **changes: Any) -> Experiment:
    data, model = TASKS[task]
    settings: dict[str, Any] = {
        "method": "heterofl",
        "rounds": 2,
        "participants": 0,
        "data": data,
        "model": model,
        "fleet": FleetConfig(tiers=tiers),
        "split": SplitConfig(kind="iid", public=0.0, size=30),
        "train": Train(epochs=1, batch=10, lr=0.02, momentum=0.5),
        "engine": EngineConfig("inline"),
        "evaluate": Evaluation(every=100, clients=2),
    }
    return Experiment(**{**settings, **changes})


# -- the runtime -----------------------------------------------------------------------------------


def wide_layers() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 9), nn.ReLU(), nn.Linear(9, 48))


def batches(rows: int, steps: int = 6, size: int = 7, inner: int = 0) -> list[Step]:
    chance = np.random.default_rng(3)
    return [Step(chance.integers(0, rows, size), inner=inner) for _ in range(steps)]


@pytest.mark.parametrize("itself", [True, False], ids=["the sample", "values"])
def test_values_of_the_data_are_what_is_learned(itself: bool) -> None:
    x = torch.from_numpy(X[:20])
    y = x.flatten(1) if itself else torch.cos(x.flatten(1))
    blob, net, steps = pack(x, y), wide_layers(), batches(20)
    assert head_of(blob).values == 48 and not len(labels_of(blob))
    assert len(blob) == 40 + 20 * 48 * 4 * (1 if itself else 2)
    settings = DescriptorSettings(0.1, momentum=0.9, decay=1e-3, ce=0.0, mse=0.7)
    made = plan(net, (3, 16), momentum=True, target=True)
    before = made.pack(net.state_dict())
    done = native.run_job(Job(made, before, settings, steps), blob)
    one_class = torch.zeros(20, dtype=torch.long)
    loss = train_with_torch(net, x, one_class, steps, settings, targets=y)
    after = made.pack(net.state_dict())
    assert np.abs(after - before).max() > 1e-3
    assert np.abs(done.weights - after).max() < 1e-5 and done.loss == pytest.approx(loss, rel=1e-5)


def test_data_with_labels_are_as_before() -> None:
    blob = pack(X[:3], np.array([4, 0, 7]))
    assert head_of(blob).values == 0 and labels_of(blob).tolist() == [4, 0, 7]
    assert native.FlashData(blob).rows == 3


def test_a_moved_image_is_rebuilt_as_it_was() -> None:
    """The sample that is its own target is the one of the data: what is moved is the input."""
    x = torch.from_numpy(CHANCE.random((6, 1, 4, 4), dtype=np.float32))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 16))
    made = plan(net, (1, 4, 4), target=True)
    moves = CHANCE.integers(-2, 3, (3, 2)).astype(np.int8)
    steps, settings = [Step(np.arange(3), moves)], DescriptorSettings(0.1, ce=0.0, mse=1.0)
    job = Job(made, made.pack(net.state_dict()), settings, steps)
    itself = pack(x, x.flatten(1))
    assert int.from_bytes(itself[20:24], "little") >> 8 == SELF
    told = pack(x, x.flatten(1) + 0.0)
    far = native.run_job(replace(job, targets=x.flatten(1).numpy()), pack(x, np.zeros(6)))
    for blob in (itself, told):
        assert native.run_job(job, blob).weights.tobytes() == far.weights.tobytes()


@pytest.mark.parametrize(
    ("values", "target", "settings", "code"),
    [
        (47, True, DescriptorSettings(0.1, ce=0.0, mse=1.0), "whose targets are not"),
        (48, True, DescriptorSettings(0.1, ce=1.0, mse=1.0), "whose targets are not"),
        (0, True, DescriptorSettings(0.1, ce=0.0, mse=1.0), "whose targets are not"),
        (48, False, DescriptorSettings(0.1, ce=0.0, mse=1.0), "no buffer for"),
        (48, False, DescriptorSettings(0.1, ce=0.0, inner=1.0), "no buffer for"),
    ],
)
def test_targets_that_do_not_belong_to_the_job(
    values: int, target: bool, settings: DescriptorSettings, code: str
) -> None:
    y = CHANCE.random((5, values), dtype=np.float32) if values else np.zeros(5, np.int64)
    made = plan(wide_layers(), (3, 16), target=target)
    job = Job(made, made.pack(wide_layers().state_dict()), settings, batches(5, 1, 2, inner=3))
    with pytest.raises(native.RuntimeRefused, match=code):
        native.run_job(job, pack(X[:5], y))


@pytest.mark.parametrize(
    "y",
    [
        np.full((4, 2), np.nan),
        np.zeros((4, 0)),
        np.zeros((3, 2)),
        np.array(0),
        np.zeros((4, 2), np.int64),
    ],
    ids=["nan", "none", "few", "a single one", "two labels a sample"],
)
def test_values_that_cannot_be_packed(y: np.ndarray) -> None:
    with pytest.raises(InputError):
        pack(X[:4], y)


# -- as PyTorch ------------------------------------------------------------------------------------

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "local": {},
    "heterofl": {},
    "fedprox": {"mu": 0.5},
    "fednova": {},
    "shared-average": {},
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", METHODS)
def test_a_board_learns_values_as_pytorch_does(method: str, task: str) -> None:
    """Also with a smaller part inside, whose loss is the squared error too."""
    data, model = TASKS[task]
    split = SplitConfig(kind="iid", public=0.0, size=25)
    train = replace(HARD, lr=0.02)
    Pair(Named(method, METHODS[method]), data=data, model=model, split=split, train=train).check()


# -- what a board needs, and what it cannot do -----------------------------------------------------


def test_the_room_for_a_target_is_planned() -> None:
    """What a tier's board is said to need is what the job's plan takes."""
    _, federation = assemble(experiment("reconstruction", (Tier(board="lm3s6965evb", count=2),)))
    (made,) = federation.world.plans.values()
    assert made.fit is not None and made.fit.need is not None
    net = made.piece.reference.network(made.piece.view)
    job_plan = plan(net, (3, 16), momentum=True, target=True)
    assert job_plan.parts["target"] == 4 * 48
    assert made.fit.need.ram == sum(ram(job_plan).values())
    assert any("target" in line for line in made.fit.reasons)


@pytest.mark.parametrize(
    ("data", "model", "named"),
    [
        (Data.of(X, HEIGHTS > 0, layout="cl", task="multi-label"), Named("mlp"), "multi-label"),
        (
            Data.of(CHANCE.integers(0, 9, (60, 13)), ODD[:60], layout="tokens", task="next-token"),
            Named("gpt"),
            "next-token",
        ),
        (Data.of(X, ODD, layout="cl"), Named("lstm"), "LSTM"),
        (Data.of(X[:, None], ODD, layout="chw"), Named("kwt"), "attention"),
        (Data.of(np.tile(X[:, None], (1, 1, 4, 1)), ODD, layout="chw"), Named("vit"), "attention"),
        (Data.of(X, layout="cl", task="forecast", y=ODD), Named("forecaster"), "padding"),
    ],
    ids=["flags", "tokens", "recurrent", "frames", "patches", "dilation"],
)
def test_what_the_firmware_lacks_is_named_before_anybody_trains(
    data: Data, model: Named, named: str
) -> None:
    tiers = (Tier(board="host", ratio=1.0, count=2),)
    with pytest.raises(InputError) as error:
        assemble(experiment("forecast", tiers, data=data, model=model, method="fedavg"))
    assert named in error.value.message and error.value.fix
    assert error.value.field in ("data.task", "fleet.tiers[0].board")
    simulated = experiment(
        "forecast", (Tier(ratio=1.0, count=2),), data=data, model=model, method="fedavg", rounds=1
    )
    assert nestling.run(simulated).summary["rounds_done"] == 1


def test_an_embedding_is_named() -> None:
    net = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(40, 3))
    with pytest.raises(InputError, match="no embedding"):
        plan(net, (10,))


# -- on boards -------------------------------------------------------------------------------------


@needs_qemu
@pytest.mark.parametrize("task", TASKS)
def test_boards_learn_values_to_the_bit_as_the_host(task: str, tmp_path: Path) -> None:
    """Three boards of three kinds beside a simulated device, each with what fits it."""
    tiers = (
        Tier(board="microbit", count=1),
        Tier(board="lm3s6965evb", count=1),
        Tier(board="mps2-an386", count=1),
        Tier(name="simulated", ratio=1.0, count=1),
    )
    wanted = experiment(task, tiers)
    result = nestling.run(wanted, out=tmp_path / "run")
    hosted = nestling.run(on_host(wanted))
    assert same(final(result.federation), final(hosted.federation))
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "boards.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 6 and all(
        row["verified"] and row["ram"] <= row["ram_there"] for row in rows
    )


@needs_qemu
def test_a_board_trains_the_smallest_view_of_the_benchmarks_detector(tmp_path: Path) -> None:
    """MLPerf Tiny's autoencoder on 640 values: a target that no frame of the link would hold."""
    x = CHANCE.standard_normal((40, 640)).astype(np.float32)
    data = Data.of(x, np.arange(40) % 4 == 0, layout="f", task="reconstruction", normal=("False",))
    wanted = experiment(
        "reconstruction",
        (Tier(board="netduinoplus2", count=1), Tier(name="whole", ratio=1.0, count=1)),
        data=data,
        model=Named("autoencoder"),
        method="shared-average",
        split=SplitConfig(kind="iid", public=0.0, size=10),
        train=Train(epochs=1, batch=5, lr=0.01),
        rounds=1,
    )
    result = nestling.run(wanted, out=tmp_path / "run")
    (row,) = [
        json.loads(line) for line in (tmp_path / "run" / "boards.jsonl").read_text().splitlines()
    ]
    assert row["verified"] and row["ram"] <= 128 * 1024 and row["parameters"] > 2 * 640
    assert same(final(result.federation), final(nestling.run(on_host(wanted)).federation))


@needs_unicorn
def test_so_does_a_board_that_exists_nowhere() -> None:
    wanted = experiment(
        "reconstruction",
        (Tier(name="odd", board="unicorn:ram=20K,flash=96K,cpu=m3", ratio=0.25, count=1),),
        rounds=1,
    )
    result = nestling.run(wanted)
    assert same(final(result.federation), final(nestling.run(on_host(wanted)).federation))


def test_the_benchmarks_detector_is_what_the_firmware_knows() -> None:
    net = build("autoencoder", shape=(640,), classes=640)
    made = plan(net, (640,), target=True)
    assert made.params == sum(p.numel() for p in net.parameters())

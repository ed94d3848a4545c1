"""Boards beside any other engine: the same federation, and errors that name the field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import nestling
from nestling import EngineConfig, Experiment, FleetConfig, Named, Tier, Train
from nestling.engines import Inline
from nestling.engines.boards import Boards
from nestling.errors import InputError
from nestling.runs.assemble import assemble
from nestling.tiny.runtime import toolchain
from tests.small import TIERS, small

needs_compiler = pytest.mark.skipif(
    toolchain.host_compiler() is None,
    reason="there is no C compiler: apt-get install gcc, or pip install ziglang",
)
HOSTED = FleetConfig(
    tiers=tuple(replace(tier, board="host") if tier.name != "large" else tier for tier in TIERS)
)
ALL_HOSTED = FleetConfig(tiers=tuple(replace(tier, board="host") for tier in TIERS))


def run(fleet: FleetConfig, **changes: Any) -> nestling.Result:
    settings = {
        "data": "mnist12k-8x8",
        "participants": 0,
        "fleet": fleet,
        "train": Train(epochs=1, batch=20, lr=0.02),
    }
    method = changes.pop("method", "shared-average")
    return nestling.run(small(method, **{**settings, **changes}))


def weights(result: nestling.Result) -> dict[str, torch.Tensor]:
    return {
        f"{kind}/{n}": t
        for kind, part in result.federation.method.state().items()
        for n, t in part.items()
    }


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a)


@needs_compiler
@pytest.mark.parametrize(
    "method", ["shared-average", "heterofl", Named("fedprox", {"mu": 0.1}), "local"], ids=str
)
def test_a_tier_in_the_c_runtime_equals_one_in_pytorch(method: Any) -> None:
    """Same rows, same order, same arithmetic up to rounding: after two rounds 1e-4 apart at
    most."""
    simulated, hosted = run(FleetConfig(tiers=TIERS), method=method), run(HOSTED, method=method)
    assert isinstance(hosted.federation.engine, Boards) and isinstance(
        simulated.federation.engine, Inline
    )
    a, b = weights(simulated), weights(hosted)
    if a:
        assert 0 < furthest(a, b) < 1e-4
    for mine, theirs in zip(simulated.metrics, hosted.metrics, strict=True):
        assert mine["clients"] == theirs["clients"] and mine["bytes_up"] == theirs["bytes_up"]
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-4)


@needs_compiler
@pytest.mark.parametrize(
    "engine", [EngineConfig("pool", 2), EngineConfig("cohort", 1)], ids=lambda e: e.name
)
def test_the_other_clients_may_be_trained_by_any_engine(engine: EngineConfig) -> None:
    assert furthest(weights(run(HOSTED)), weights(run(HOSTED, engine=engine))) < 1e-5


@needs_compiler
def test_clients_on_boards_give_the_same_bits_twice() -> None:
    first, second = (
        weights(run(ALL_HOSTED)),
        weights(run(ALL_HOSTED, engine=EngineConfig("pool", 1))),
    )
    assert all(torch.equal(first[k], second[k]) for k in first)


@needs_compiler
def test_a_run_with_boards_is_resumed(tmp_path: Any) -> None:
    whole = run(HOSTED)
    nestling.run(
        small(data="mnist12k-8x8", participants=0, fleet=HOSTED, rounds=1), out=tmp_path / "run"
    )
    resumed = nestling.resume(tmp_path / "run", overrides=("rounds=2",))
    assert all(torch.equal(t, weights(resumed)[k]) for k, t in weights(whole).items())


@needs_compiler
@pytest.mark.parametrize(
    ("changes", "field", "named"),
    [
        ({"method": "moon"}, "fleet.tiers[", "no word for the objective"),
        ({"train": Train(optimizer="adam")}, "fleet.tiers[", "adam"),
        ({"model": Named("tinycnn", {"channels": [8, 16], "norm": "batch"})}, "", "batch norm"),
    ],
)
def test_what_a_board_cannot_train_is_said(changes: dict[str, Any], field: str, named: str) -> None:
    with pytest.raises(InputError) as error:
        run(ALL_HOSTED, **changes)
    assert field in str(error.value) and named in str(error.value) and "client" in str(error.value)


def one(**tier: Any) -> Experiment:
    return small(
        data="mnist12k-8x8",
        participants=0,
        fleet=FleetConfig(tiers=(Tier(count=2, **tier),)),
        train=Train(momentum=0.0),
    )


def test_a_board_brings_its_device() -> None:
    experiment, federation = assemble(one(board="microbit"))
    assert (
        experiment.fleet.tiers[0].device == "nrf51822"
        and experiment.fleet.tiers[0].name == "microbit"
    )
    assert federation.world.plans["microbit"].fit is not None
    assert Experiment.from_table(experiment.to_table()).fleet == experiment.fleet


@pytest.mark.parametrize(
    ("tier", "field"),
    [
        ({"board": "microbitt"}, "fleet.tiers[0].board"),
        ({"board": "unicorn:ram=x"}, "fleet.tiers[0].board"),
        ({"board": "unicorn:ram=20K,flash=64K,cpu=m3"}, "fleet.tiers[0].device"),
        ({"board": "host"}, "fleet.tiers[0]"),
    ],
)
def test_bad_boards_name_the_field(tier: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as error:
        assemble(one(**tier))
    assert error.value.field == field and error.value.fix


def test_too_many_emulated_boards_are_refused() -> None:
    fleet = FleetConfig(tiers=(Tier(board="microbit", count=65),))
    with pytest.raises(InputError) as error:
        assemble(small(data="mnist12k-8x8", fleet=fleet, train=Train(momentum=0.0)))
    assert error.value.field == "fleet.tiers[0].count" and "host" in str(error.value.fix)

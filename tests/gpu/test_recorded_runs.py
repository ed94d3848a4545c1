"""Runs on the GPU as they happen: resumed, uneven, with clients that vanish, alone, too large for
memory, not finite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import nestling
from nestling import EngineConfig, Experiment, FleetConfig, Named, SplitConfig, Tier
from nestling.engines import CudaCohort
from nestling.engines.cuda.slot import Slot
from nestling.message import Message
from nestling.methods.submodel.heterofl import HeteroFL
from nestling.runs.assemble import assemble, site_of
from nestling.runs.loop import play
from nestling.runs.run import resume
from nestling.training.client import Client
from nestling.training.objectives import Batch, Given, Net, supervised
from nestling.training.phase import Phase
from tests.gpu.test_every_method import TOLERANCE, UNEVEN, apart, played, states
from tests.small import small

pytestmark = pytest.mark.gpu


def looks_at_values(net: Net, batch: Batch, given: Given) -> torch.Tensor:
    loss = supervised(net, batch, given)
    return loss * 2 if loss.item() > 1e9 else loss


class Stubborn(HeteroFL):
    """An objective that no recording can follow."""

    def phases(self, client: Client, received: Message) -> list[Phase]:
        return [client.train.phase(client.round, objective=looks_at_values)]


def gpu(method: Any, precision: str = "float32", **changes: Any) -> Experiment:
    return small(
        method,
        **{**UNEVEN, **changes},
        engine=EngineConfig("cohort", device="cuda", precision=precision),
    )


@pytest.mark.parametrize("method", ["shared-average", "fedrolex", "scaffold", "fedmd", "feddf"])
def test_a_resumed_run_equals_one_that_was_not(method: str, tmp_path: Path) -> None:
    whole = nestling.run(gpu(method, rounds=4))
    nestling.run(gpu(method, rounds=2), out=tmp_path / "run")
    again = resume(tmp_path / "run", overrides=("rounds=4",))
    assert apart(states(whole), states(again)) == 0


def test_the_run_says_what_it_used(tmp_path: Path) -> None:
    nestling.run(gpu("heterofl", "tf32", rounds=4), out=tmp_path / "run")
    engine = json.loads((tmp_path / "run" / "summary.json").read_text())["engine"]
    assert (
        engine["name"] == "cohort"
        and engine["precision"] == "tf32"
        and engine["device"] == "cuda:0"
    )
    assert engine["device_name"] == torch.cuda.get_device_name(0)
    assert (
        engine["kinds_recorded"] == 3
        and engine["kinds_not_recorded"] == 0
        and engine["graphs"] >= 9
    )


@pytest.mark.parametrize("norm", ["batch", "sbn", "tracked", "group"])
def test_uneven_sizes_with_every_norm(norm: str) -> None:
    model = Named("tinycnn", {"channels": [8, 16, 16], "norm": norm})
    one, other = (played("heterofl", device, model=model) for device in ("cpu", "cuda"))
    assert apart(states(one), states(other)) <= TOLERANCE
    # A graph for full batches, one for short ones, two to load and store: sizes do not multiply
    # them.
    engine = other.summary["engine"]
    assert engine["graphs"] <= 4 * 8 * engine["kinds_recorded"]


def test_clients_that_vanish() -> None:
    tiers = tuple(
        Tier(name=t.name, ratio=t.ratio, count=t.count, dropout=0.4) for t in UNEVEN["fleet"].tiers
    )
    one, other = (
        played("shared-average", device, fleet=FleetConfig(tiers=tiers), rounds=4)
        for device in ("cpu", "cuda")
    )
    assert one.summary["dropped"] == other.summary["dropped"] > 0
    assert apart(states(one), states(other)) <= TOLERANCE


@pytest.mark.parametrize("size", [1, 2, 37])
def test_one_client(size: int) -> None:
    alone: dict[str, Any] = {
        "fleet": FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=1),)),
        "participants": 1,
        "split": SplitConfig(kind="iid", size=size),
    }
    one, other = (played("shared-average", device, **alone) for device in ("cpu", "cuda"))
    assert apart(states(one), states(other)) <= TOLERANCE


def test_many_small_clients_are_a_stack() -> None:
    many: dict[str, Any] = {
        "fleet": FleetConfig(tiers=(Tier(name="all", ratio=0.25, count=40),)),
        "participants": 24,
    }
    even = {**many, "split": SplitConfig(kind="iid", size=64)}
    for setting in (many, even):
        one, other = (played("fedprox", device, **setting) for device in ("cpu", "cuda"))
        assert apart(states(one), states(other)) <= TOLERANCE
    assert any("stack" in note for note in other.federation.engine.notes)


def test_a_cohort_that_must_be_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    work, failed = Slot.work, []

    def short_of_memory(self: Slot, job: Any) -> Any:
        if len(failed) < 2:
            failed.append(job)
            torch.empty(2**60, device="cuda")
        return work(self, job)

    monkeypatch.setattr(Slot, "work", short_of_memory)
    result = played("heterofl", "cuda")
    assert len(failed) == 2 and any("do not fit" in note for note in result.federation.engine.notes)
    assert apart(states(played("heterofl", "cpu")), states(result)) <= TOLERANCE


def test_replies_that_are_not_finite_are_refused() -> None:
    """One client's inputs are no numbers: what it sends is refused, and the round is played again
    without it."""
    experiment, federation = assemble(gpu("heterofl", rounds=4))
    assert isinstance(federation.engine, CudaCohort)
    spoilt = federation.method.choose(2, 8)[0]
    rows = torch.from_numpy(federation.world.split.indices(spoilt)).cuda()
    federation.bench.x = federation.bench.x.clone()
    federation.bench.x[rows] = torch.nan
    federation.engine.open(experiment.make_method(), site_of(federation))
    found = list(play(federation))
    expected = [int(spoilt in row["clients"]) for row in found]
    assert [row["refused"] for row in found] == expected and sum(expected) >= 1
    assert all(torch.isfinite(t).all() for t in federation.method.state()["weights"].values())


def test_objectives_that_look_at_values_are_told_of_and_still_right() -> None:
    result = nestling.run(gpu(Stubborn(), rounds=3))
    assert any("NOT RECORDED" in note for note in result.federation.engine.notes)
    assert result.summary["engine"]["kinds_not_recorded"] >= 1
    plain = nestling.run(small(Stubborn(), **UNEVEN))
    assert apart(states(plain), states(result)) <= TOLERANCE


def test_who_draws_after_a_recording_that_failed_still_can() -> None:
    nestling.run(gpu(Stubborn(), rounds=3))
    kept = float(
        torch.nn.functional.dropout(torch.ones(10_000, device="cuda"), 0.5).gt(0).float().mean()
    )
    assert 0.45 < kept < 0.55


def test_dropout_is_the_same_in_two_runs() -> None:
    model = Named("vgg16", {"width": 0.125, "hidden": [32], "dropout": 0.5})
    changes: dict[str, Any] = {
        "model": model,
        "rounds": 2,
        "participants": 3,
        "data": nestling.Data("mnist12k"),
    }
    one, other, third = (nestling.run(gpu("all-large", **changes, seed=seed)) for seed in (0, 0, 1))
    # Sums on the device are not in the same order every time, so that equal draws are told by how
    # much nearer they lead.
    assert 5 * apart(states(one), states(other)) <= apart(states(one), states(third))

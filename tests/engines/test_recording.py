"""The engine for a GPU, where there is none: it is chosen, takes the same decisions and does the same arithmetic, without graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import nestling.assemble
import nestling.message
from nestling import EngineConfig, FleetConfig, SplitConfig, Tier
from nestling.assemble import assemble, site_of
from nestling.engines import Cohort, CudaCohort, Inline, Pool, choose_where, make_engine
from nestling.engines.cuda import Settings
from nestling.errors import InputError
from nestling.methods import METHODS
from nestling.rounds import Federation, play
from nestling.training.group import Group
from nestling.training.together import Losses
from nestling.where import CPU, Where
from tests.engines.test_cohort import recording
from tests.small import small

GPU = Where(torch.device("cuda", 0), "tf32", recorded=True)
RECORDED = replace(CPU, recorded=True)
UNEVEN = SplitConfig(kind="quantity", alpha=2.0, min_size=3)
TIERS = (Tier(name="small", ratio=0.25, count=5), Tier(name="large", ratio=1.0, count=4))


# -- which engine ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["auto", "cohort"])
def test_a_gpu_gets_the_recording_engine(name: str) -> None:
    engine = make_engine(name, 0, work_items=1000, where=GPU, compile=True)
    assert isinstance(engine, CudaCohort)
    assert engine.where == GPU and engine.settings == Settings("tf32", True)


def test_in_process_on_a_gpu_is_what_it_says() -> None:
    engine = make_engine("inline", 0, work_items=1000, where=GPU)
    assert isinstance(engine, Inline) and engine.where == GPU


def test_the_engine_gets_the_device_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its name, nor another spelling of it: what `assemble` hands on is the very object."""
    chosen, given = replace(CPU, precision="tf32"), []

    def spy(*args: Any, **named: Any) -> Any:
        given.extend(a for a in (*args, *named.values()) if isinstance(a, (Where, torch.device)))
        return Inline()

    monkeypatch.setattr(nestling.assemble, "choose_where", lambda *_: chosen)
    monkeypatch.setattr(nestling.assemble, "make_engine", spy)
    _, federation = assemble(small("fedavg"))
    assert len(given) == 1 and given[0] is chosen
    assert federation.world.where is chosen and site_of(federation).where is chosen


def test_where_there_is_a_gpu_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for name, device in (("auto", "auto"), ("cohort", "auto"), ("cohort", "cuda"), ("auto", "cuda")):
        assert choose_where(name, device, "bf16") == Where(torch.device("cuda", 1), "bf16", recorded=True)
    assert choose_where("inline", "cuda") == Where(torch.device("cuda", 1), "float32", recorded=False)
    for name in ("inline", "pool", "ray"):
        assert choose_where(name, "auto") == CPU
    assert choose_where("auto", "cpu") == CPU
    with pytest.raises(InputError, match="works on CPU cores"):
        choose_where("pool", "cuda")


@pytest.mark.parametrize("make", [Inline, Pool, Cohort, lambda: CudaCohort(GPU), lambda: Inline(GPU)])
def test_an_engine_refuses_data_on_another_device(make: Callable[[], Any]) -> None:
    experiment, federation = assemble(small("fedavg"))
    site = site_of(federation)
    engine = make()
    elsewhere = site if engine.where == GPU else replace(site, x=site.x.to("meta"))
    with pytest.raises(ValueError, match=r"the clients' data are on .*, and the engine computes on"):
        engine.open(experiment.make_method(), elsewhere)


def test_a_run_says_what_it_used() -> None:
    result = nestling.run(small("fedavg", engine=EngineConfig("cohort", 1)))
    assert result.summary["engine"] == {"name": "cohort", "device": "cpu", "precision": "float32"}


# -- what is the same work -----------------------------------------------------------------------------------------------------------


def recorded_federation(method: Any, **changes: Any) -> tuple[Federation, CudaCohort]:
    """A federation whose engine records, as on a GPU, and whose clients are told so."""
    settings = {"fleet": FleetConfig(tiers=TIERS), "participants": 0, "split": UNEVEN, **changes}
    experiment, federation = assemble(small(method, **settings))
    federation.world.where = RECORDED
    federation.engine = engine = recording()
    engine.where = RECORDED
    engine.open(experiment.make_method(), site_of(federation))
    return federation, engine


@pytest.mark.parametrize("method", METHODS)
def test_work_that_comes_back_is_known_again(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of work has the same key in every round, whichever channels a window holds and however many rows a client has."""
    federation, engine = recorded_federation(method, rounds=7)
    seen: list[set[Any]] = []

    def only_look(found: list[Group]) -> list[Losses]:
        seen[-1].update(group.key for group in found)
        return [Losses(torch.zeros(len(g.clients)), [1] * len(g.clients), [1] * len(g.clients)) for g in found]

    monkeypatch.setattr(engine, "_train_all", only_look)
    federation.settle = True  # one round at a time
    rounds = play(federation)
    for _ in range(7):
        seen.append(set())
        next(rounds)
    first, later = set().union(*seen[:4]), set().union(*seen[4:])
    assert later and later <= first
    # One kind a tier and phase: unequal numbers of rows are no other work. A client's first rounds may have phases of their own.
    assert len(first) <= 4 * len(TIERS)

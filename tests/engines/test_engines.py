"""Every engine gives the same result, bit for bit, for any number of workers."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import nestling
import nestling.message
import nestling.runs.loop
from nestling import EngineConfig
from nestling.engines import ClientError, Inline, Pool, make_engine
from nestling.errors import InputError
from nestling.methods import METHODS
from nestling.runs.assemble import assemble, site_of
from nestling.training.client import Errand
from tests.small import errands_of, small


def states(experiment: nestling.Experiment) -> dict[str, torch.Tensor]:
    result = nestling.run(experiment)
    method, store = result.federation.method, result.federation.world.store
    kept = {f"client {c}/{n}": t for c in store.clients() for n, t in store.get(c).items()}
    return {
        **{f"{kind}/{n}": t for kind, part in method.state().items() for n, t in part.items()},
        **kept,
    }


@pytest.mark.parametrize("method", METHODS)
def test_the_pool_equals_the_plain_loop(method: str) -> None:
    alone = states(small(method))
    pooled = states(small(method, engine=EngineConfig("pool", 2)))
    assert alone.keys() == pooled.keys() and alone
    assert all(torch.equal(alone[k], pooled[k]) for k in alone)


def test_the_number_of_workers_does_not_matter() -> None:
    one, three = (states(small(engine=EngineConfig("pool", n), participants=4)) for n in (1, 3))
    assert all(torch.equal(one[k], three[k]) for k in one)


def test_a_killed_worker_is_replaced_and_its_task_done() -> None:
    experiment, federation = assemble(small())
    inline = Inline()
    inline.open(experiment.make_method(), site_of(federation))
    expected = {o.client: o.reply for o in inline.run(errands_of(federation))}
    pool = Pool(2)
    pool.open(experiment.make_method(), site_of(federation))
    try:
        for member in pool._members:
            assert member.process.pid is not None
            os.kill(member.process.pid, signal.SIGKILL)
        got = {o.client: o.reply for o in pool.run(errands_of(federation))}
    finally:
        pool.close()
    assert got.keys() == expected.keys()
    assert all(
        torch.equal(got[c]["weights"][n], t) for c in got for n, t in expected[c]["weights"].items()
    )


@pytest.mark.parametrize("engine", [Inline(), Pool(1)])
def test_an_error_names_the_client(engine: Inline | Pool) -> None:
    experiment, federation = assemble(small())
    engine.open(experiment.make_method(), site_of(federation))
    broken = Errand(
        2,
        1,
        "main",
        {"index": {}, "dropped": [], "private": []},
        nestling.message.Message({"weights": {}}),
    )
    try:
        with pytest.raises(ClientError, match="client 2 failed in round 1"):
            list(engine.run([broken]))
    finally:
        engine.close()


def test_auto_picks_by_what_there_is_to_do() -> None:
    assert isinstance(make_engine("auto", 2, work_items=10_000), Pool)
    assert isinstance(make_engine("auto", 2, work_items=3), Inline)
    assert isinstance(make_engine("auto", 2, work_items=10_000, portable=False), Inline)
    with pytest.raises(InputError, match="did you mean 'pool'"):
        make_engine("poll", 0, 1)

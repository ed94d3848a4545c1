"""Steps that are written down and replayed."""

from __future__ import annotations

import pytest
import torch

import nestling
from nestling import EngineConfig
from nestling.training.stacks import traced
from tests.small import small


@pytest.fixture
def at_once(monkeypatch):
    """Everything is traced the first time, and nothing is known from before."""
    monkeypatch.setattr(traced, "OFTEN", 0)
    monkeypatch.setattr(traced, "_seen", traced.OrderedDict())


def _weights(method: str, **changes):
    experiment = small(
        method, rounds=2, participants=4, engine=EngineConfig("cohort", workers=1), **changes
    )
    return nestling.run(experiment).federation.method.state()


def _programs() -> list:
    return [found for found in traced._seen.values() if callable(found)]


@pytest.mark.parametrize("method", ["heterofl", "fedprox", "moon", "fedproto", "scaffold", "fedmd"])
def test_a_replayed_step_gives_the_bits_of_the_plain_one(method, monkeypatch):
    monkeypatch.setattr(traced, "_seen", traced.OrderedDict())
    monkeypatch.setattr(traced, "OFTEN", 10**9)
    plain = _weights(method)
    monkeypatch.setattr(traced, "OFTEN", 0)
    replayed = _weights(method)
    assert _programs(), "nothing was traced"
    for kind, state in plain.items():
        for name, tensor in state.items():
            assert torch.equal(tensor, replayed[kind][name]), (kind, name)


def test_unequal_clients_and_short_batches_replay_too(at_once, monkeypatch):
    uneven = {"split": nestling.SplitConfig(kind="dirichlet", alpha=0.3)}
    replayed = _weights("heterofl", **uneven)
    assert _programs()
    monkeypatch.setattr(traced, "OFTEN", 10**9)
    monkeypatch.setattr(traced, "_seen", traced.OrderedDict())
    plain = _weights("heterofl", **uneven)
    assert all(
        torch.equal(t, replayed[kind][name])
        for kind, part in plain.items()
        for name, t in part.items()
    )


def test_a_tensor_from_outside_is_never_frozen_into_a_program(at_once):
    outside = torch.tensor([2.0])

    def scaled(x):
        return x * outside

    assert traced.replayed("key", scaled, torch.ones(3)).tolist() == [2, 2, 2]
    outside.fill_(5)
    assert traced.replayed("key", scaled, torch.ones(3)).tolist() == [5, 5, 5]
    assert not _programs()


def test_what_cannot_be_traced_runs_the_plain_way(at_once):
    def by_value(x):
        return x + 1 if bool((x > 0).all()) and x.sum().item() > 0 else x - 1

    assert traced.replayed("key", by_value, torch.ones(2)).tolist() == [2, 2]
    assert traced.replayed("key", by_value, -torch.ones(2)).tolist() == [-2, -2]


def test_other_shapes_are_other_programs(at_once):
    def total(x):
        return x.view(-1).sum() / x.shape[0]

    assert float(traced.replayed("key", total, torch.ones(2, 3))) == 3
    assert float(traced.replayed("key", total, torch.ones(4, 3))) == 3
    assert float(traced.replayed("key", total, torch.ones(2, 5))) == 5
    assert len(_programs()) == 3


def test_memory_is_bounded(at_once, monkeypatch):
    monkeypatch.setattr(traced, "MOST", 3)
    for size in range(1, 9):
        traced.replayed("key", torch.neg, torch.ones(size))
    assert len(traced._seen) == 3

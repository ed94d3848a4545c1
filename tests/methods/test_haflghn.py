"""HAFL-GHN: any architectures, one φ; bytes, engines, learning, and what it does with devices that
cannot train φ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nestling
from nestling import (
    EngineConfig,
    Evaluation,
    FleetConfig,
    InputError,
    Named,
    SplitConfig,
    Tier,
    Train,
)
from nestling.methods.lowrank.haflghn import HAFLGHN, weights_of
from nestling.models.hypernetwork import Generated
from nestling.runs.assemble import assemble
from nestling.runs.federation import Federation
from nestling.views import State
from tests.methods.learning import alone, learned, mean
from tests.small import small

MIXED = FleetConfig(
    tiers=(
        Tier(name="mlp", model="mlp", model_options={"hidden": [16]}, count=2),
        Tier(name="resnet", model="resnet8", model_options={"channels": [8, 8, 16]}, count=1),
        Tier(name="tinycnn", ratio=1.0, count=1),
    )
)
LITTLE: dict[str, Any] = {"max_shape": (16, 16, 5), "basis": 8, "hidden": 16}


def phi_after(experiment: nestling.Experiment) -> State:
    return dict(nestling.run(experiment).federation.method.weights)


def size_of(federation: Federation) -> int:
    return sum(t.numel() for t in federation.method.weights.values())


def test_what_travels_is_phi_whatever_the_client_trains() -> None:
    result = nestling.run(small(HAFLGHN(**LITTLE), fleet=MIXED))
    visits = sum(len(row["clients"]) for row in result.metrics)
    generator = next(iter(result.federation.method.pieces.values())).reference.module.generator
    assert size_of(result.federation) == sum(p.numel() for p in generator.parameters())
    assert (
        result.summary["bytes_up"]
        == result.summary["bytes_down"]
        == 4 * visits * size_of(result.federation)
    )
    tuned = nestling.run(small(HAFLGHN(**LITTLE, fine_tune=1), fleet=MIXED))
    assert tuned.summary["bytes_up"] == result.summary["bytes_up"]


def test_equal_pieces_share_a_network_and_unequal_ones_share_phi() -> None:
    federation = assemble(small(HAFLGHN(**LITTLE)))[1]
    pieces = federation.method.pieces
    assert len({piece.reference.name for piece in pieces.values()}) == 3
    states = [piece.reference.initial for piece in pieces.values()]
    assert all(torch.equal(states[0][name], state[name]) for state in states for name in states[0])
    for tier, plan in federation.world.plans.items():
        made = weights_of(pieces[tier], federation.method.weights)
        own = plan.piece.reference.network(plan.piece.view).state_dict()
        assert {n: t.shape for n, t in made.items()} == {n: t.shape for n, t in own.items()}


def test_a_client_trains_phi_through_its_own_network() -> None:
    """The model a device uses is the plain network with the weights that φ makes: it says what the
    trained form says."""
    result = nestling.run(small(HAFLGHN(**LITTLE), fleet=MIXED))
    federation, x = result.federation, result.federation.bench.x_test[:20]
    for client in range(4):
        device = federation.world.device(client)
        model, piece = federation.method.model_for(device), federation.method.piece(device, 1)
        plain = model.reference.network(model.view, model.state).eval()
        made = piece.reference.network(piece.view, federation.method.weights).eval()
        assert not isinstance(plain, Generated) and isinstance(made, Generated)
        with torch.no_grad():
            assert torch.allclose(plain(x), made(x), atol=1e-4)


def test_networks_with_running_statistics_use_those_of_the_batch() -> None:
    tracked = Named("tinycnn", {"channels": [8, 16, 16], "norm": "tracked"})
    result = nestling.run(small(HAFLGHN(**LITTLE), model=tracked))
    model = result.federation.method.model_for(result.federation.world.device(0))
    assert isinstance(model.reference.module, Generated) and result.summary["refused"] == 0


def test_every_engine_gives_the_same() -> None:
    gentle = {
        "train": Train(epochs=1, batch=20, lr=0.01, momentum=0.0),
        "participants": 4,
        "rounds": 1,
    }
    for method in (HAFLGHN(**LITTLE), HAFLGHN(**LITTLE, fine_tune=1)):
        plain, stacked, pool = (
            nestling.run(small(method, **gentle, engine=EngineConfig(name, workers=1))).federation
            for name in ("inline", "cohort", "pool")
        )
        for name, tensor in plain.method.weights.items():
            assert torch.equal(tensor, pool.method.weights[name])
            assert torch.allclose(tensor, stacked.method.weights[name], atol=1e-5, rtol=1e-3)
        for client in plain.world.store.clients():
            for name, tensor in plain.world.store.get(client).items():
                assert torch.allclose(tensor, stacked.world.store.get(client)[name], atol=1e-4)


def test_fine_tuned_networks_stay_with_their_clients() -> None:
    result = nestling.run(small(HAFLGHN(**LITTLE, fine_tune=2), participants=2, rounds=1))
    federation = result.federation
    asked = result.metrics[0]["clients"]
    assert federation.world.store.clients() == asked
    plain = nestling.run(small(HAFLGHN(**LITTLE), participants=2, rounds=1)).federation
    # φ does not see it
    assert all(
        torch.equal(t, federation.method.weights[n]) for n, t in plain.method.weights.items()
    )
    kept = federation.method.model_for(federation.world.device(asked[0])).state
    made = plain.method.model_for(plain.world.device(asked[0])).state
    assert any(not torch.equal(kept[name], made[name]) for name in made)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    method = Named(
        "nestling.methods.lowrank.haflghn:HAFLGHN",
        {**LITTLE, "max_shape": [16, 16, 5], "fine_tune": 1},
    )
    whole = nestling.run(small(method, rounds=3))
    nestling.run(small(method, rounds=2), out=tmp_path / "a")
    resumed = nestling.resume(tmp_path / "a", overrides=("rounds=3",))
    assert all(
        torch.equal(t, whole.federation.method.weights[n])
        for n, t in resumed.federation.method.weights.items()
    )
    assert resumed.summary["personal_score"]["last"] == whole.summary["personal_score"]["last"]


@pytest.mark.slow
def test_unlike_networks_learn_together() -> None:
    """Far above chance, but slowly: with so few rounds each would still do better alone, and the
    deepest one has hardly begun."""
    settings = {
        "rounds": 8,
        "participants": 0,
        "split": SplitConfig(kind="iid", size=100),
        "train": Train(epochs=2, batch=20, lr=0.05),
        "evaluate": Evaluation(every=8, clients=4),
        "engine": EngineConfig("cohort", workers=1),
    }
    method = HAFLGHN(max_shape=(16, 16, 5))
    found = [
        nestling.run(small(method, fleet=MIXED, seed=seed, **settings)).summary
        for seed in (0, 1, 2)
    ]
    assert sum(s["personal_score"]["last"] for s in found) / 3 > 0.3
    for tier in ("mlp", "tinycnn"):
        assert sum(s["by_tier"][tier]["personal_score"]["last"] for s in found) / 3 > 0.35


@pytest.mark.slow
def test_with_hardly_any_data_it_beats_training_alone() -> None:
    """Twenty rows a client and many rounds: the only kind of setting found in which φ is worth more
    than weights of one's own."""
    settings: dict[str, Any] = {
        "rounds": 24,
        "split": SplitConfig(kind="iid", size=20),
        "train": Train(epochs=2, batch=10, lr=0.05),
        "evaluate": Evaluation(every=24, clients=9),
    }
    found = learned(HAFLGHN(), "personal_score", **settings)
    assert mean(found) > alone("personal_score", **settings) + 0.02
    assert min(found) > 0.4


def test_devices_that_cannot_train_phi_get_what_it_makes() -> None:
    tiers = (
        Tier(name="tiny", device="lm3s6965", count=3),
        Tier(name="pi", device="raspberry-pi-zero-2w", count=3),
    )
    settings = {
        "fleet": FleetConfig(tiers=tiers),
        "model": Named("tinycnn", {}),
        "participants": 3,
        "rounds": 1,
    }
    result = nestling.run(small(HAFLGHN(), **settings))
    fleet, by_tier = result.federation.world.fleet, result.summary["by_tier"]
    assert [fleet.tier_of(c).name for c in result.metrics[0]["clients"]] == ["pi"] * 3
    assert by_tier["tiny"]["personal_score"]["last"] is not None
    with pytest.raises(InputError, match="too little ram"):
        nestling.run(small(HAFLGHN(leave_out=False), **settings))


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"hidden": 0}, "hidden"),
        ({"max_shape": (0, 1, 1)}, "max_shape"),
        ({"max_inputs": 0}, "max_inputs"),
        ({"fine_tune": -1}, "fine_tune"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=f"method.{field}"):
        HAFLGHN(**settings)

"""FedZKT: what travels, who moves which way on the server, what it is without either step, and that
it learns from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nestling
from nestling import Data, EngineConfig, FleetConfig, InputError, Named, SplitConfig, Tier, Train
from nestling.message import Message
from nestling.methods import Reply
from nestling.methods.baselines.local import Local
from nestling.methods.distill.fedzkt import FedZKT, gap
from nestling.methods.distill.generated import asked, learner, noise
from nestling.runs.assemble import assemble
from nestling.runs.federation import Federation
from nestling.training.distiller import Student, whole
from nestling.training.optimisers import Optim
from tests.methods.learning import SEEDS, experiment, mean
from tests.methods.mixed import SETTING, clearly_above
from tests.small import small

UNLIKE = FleetConfig(
    tiers=(
        Tier(name="mlp", model="mlp", model_options={"hidden": [16]}, count=2),
        Tier(name="part", ratio=0.5, count=1),
        Tier(name="whole", ratio=1.0, count=1),
    )
)
QUICK: dict[str, Any] = {
    "iterations": 2,
    "student_steps": 2,
    "back": 2,
    "batch": 8,
    "channels": 4,
    "nz": 10,
}


def quick(**changes: Any) -> FedZKT:
    return FedZKT(**{**QUICK, **changes})


def federation_of(method: FedZKT, **changes: Any) -> Federation:
    return assemble(small(method, **{"fleet": UNLIKE, **changes}))[1]


def replies_of(federation: Federation, clients: list[int]) -> list[Reply]:
    """Replies of clients that trained nothing, but moved every number they got."""
    replies = []
    for client in clients:
        device = federation.world.device(client)
        piece = federation.method.piece(device, 1)
        sent = federation.method.send(device, piece, 1)
        torch.manual_seed(client)
        moved = {name: t + 0.3 * torch.randn_like(t) for name, t in sent["weights"].items()}
        replies.append(Reply(device, piece, sent, Message({"weights": moved}, {"samples": 10})))
    return replies


def apart(federation: Federation, replies: list[Reply], seed: int = 5) -> float:
    """How far F is from the replies on what the generator makes now."""
    method, main = federation.method, federation.world.main
    torch.manual_seed(seed)
    with torch.no_grad():
        world = federation.world
        x = learner(world, method.network, method.generator, Optim())(noise(64, method.nz, world))
        student = Student(method.weights, main.parameters, whole(main.network(main.full)), Optim())
        return float(
            gap(
                method.loss,
                torch.stack([teacher(x) for teacher in asked(world, replies)]),
                student(x),
            )
        )


# -- what travels ----------------------------------------------------------------------------------


def test_each_device_sends_and_gets_the_parameters_of_its_own_network() -> None:
    result = nestling.run(small(quick(), fleet=UNLIKE))
    world = result.federation.world
    visits = [client for row in result.metrics for client in row["clients"]]
    sizes = [world.cost(world.plans[world.device(client).tier].piece).params for client in visits]
    assert result.summary["bytes_up"] == result.summary["bytes_down"] == 4 * sum(sizes)
    assert len(set(sizes)) == 3 and result.summary["refused"] == 0


def test_the_server_keeps_a_model_of_every_device_that_took_part_and_of_no_other() -> None:
    result = nestling.run(small(quick(), fleet=UNLIKE, participants=2, rounds=1))
    federation, seen = result.federation, result.metrics[0]["clients"]
    method = federation.method
    for client in range(4):
        device = federation.world.device(client)
        known, piece = method.records.get(client), method.piece(device, 2)
        assert bool(known) == (client in seen)
        expected = known or piece.view.extract(piece.reference.initial)
        sent, used = method.send(device, piece, 2)["weights"], method.model_for(device).state
        assert all(
            torch.equal(sent[name], t) and torch.equal(used[name], t)
            for name, t in expected.items()
        )
    # devices keep nothing: their model comes with the message
    assert federation.world.store.clients() == []


def test_devices_of_one_tier_end_up_with_models_of_their_own() -> None:
    federation = nestling.run(small(quick(), fleet=UNLIKE, participants=4, rounds=1)).federation
    equals = [device for device in map(federation.world.device, range(4)) if device.tier == "mlp"]
    one, other = (federation.method.model_for(device).state for device in equals)
    assert one.keys() == other.keys() and any(
        not torch.equal(one[name], other[name]) for name in one
    )


# -- the losses ------------------------------------------------------------------------------------


def test_the_three_gaps_by_hand() -> None:
    """Two teachers that are sure of different classes, a student that is sure of the first: sums
    over classes, means over inputs."""
    teachers = torch.tensor([[[40.0, 0.0, 0.0]], [[0.0, 40.0, 0.0]]])
    student = torch.tensor([[40.0, 0.0, 0.0]])
    assert torch.isclose(gap("sl", teachers, student), torch.tensor(1.0))  # |.5 − 1| + |.5 − 0|
    # |20 − 40| + |20 − 0|
    assert torch.isclose(gap("logit-l1", teachers, student), torch.tensor(40.0))
    # .5·log(.5/1) + .5·log(.5/e⁻⁴⁰)
    assert torch.isclose(
        gap("kl", teachers, student), torch.tensor(20.0).add(torch.tensor(0.5).log())
    )
    both = torch.cat([teachers, teachers], dim=1), torch.cat([student, student])
    assert torch.isclose(gap("sl", *both), torch.tensor(1.0))  # twice the inputs, the same mean


def test_the_ensemble_is_the_mean_of_probabilities_and_not_of_logits() -> None:
    teachers = torch.tensor([[[9.0, 0.0]], [[0.0, 1.0]]])
    student = torch.log(torch.softmax(teachers, -1).mean(0))
    for kind in ("sl", "kl"):
        assert gap(kind, teachers, student) < 1e-6 < gap(kind, teachers, teachers.mean(0))
    assert gap("logit-l1", teachers, teachers.mean(0)) == 0


@pytest.mark.parametrize("loss", ["sl", "kl", "logit-l1"])
def test_the_generator_looks_for_disagreement_and_f_for_agreement(loss: str) -> None:
    settings = {"loss": loss, "iterations": 15, "back": 0, "batch": 32, "momentum": 0.0}
    alone = federation_of(quick(**settings, student_steps=0, generator_lr=3e-3))
    replies = replies_of(alone, [0, 2, 3])
    before, f = apart(alone, replies), dict(alone.method.weights)
    alone.method.merge(replies, 1)
    assert apart(alone, replies) > before
    assert all(torch.equal(t, f[name]) for name, t in alone.method.weights.items())
    taught = federation_of(quick(**settings, student_steps=3, generator_lr=1e-12, lr=3e-3))
    taught.method.merge(replies, 1)
    assert apart(taught, replies) < before


def test_f_teaches_the_participants_and_only_them() -> None:
    settings = {"iterations": 1, "batch": 32, "momentum": 0.0, "generator_lr": 1e-12}
    idle, taught = (federation_of(quick(**settings, back=back)) for back in (0, 20))
    for federation in (idle, taught):
        federation.method.merge(replies_of(federation, [0, 3]), 1)
    # F does not move with it
    assert all(torch.equal(t, taught.method.weights[n]) for n, t in idle.method.weights.items())
    torch.manual_seed(7)
    method, main = taught.method, taught.world.main
    x = learner(taught.world, method.network, method.generator, Optim())(
        noise(64, method.nz, taught.world)
    ).detach()
    with torch.no_grad():
        said = main.network(main.full, method.weights).eval()(x)[None]
        for client in (0, 3):
            models = [f.method.model_for(f.world.device(client)) for f in (idle, taught)]
            far, near = (
                gap("sl", said, m.reference.network(m.view, m.state).eval()(x)) for m in models
            )
            assert near < far
    assert not taught.method.records.get(1) and not taught.method.records.get(2)


def test_without_teaching_back_every_device_is_alone() -> None:
    """What the server keeps is then what the device sent, so that personal models are those of
    Local, bit for bit."""
    zkt, local = (
        nestling.run(small(method, fleet=UNLIKE, rounds=3))
        for method in (quick(back=0), Local(everybody=False))
    )
    for client in range(4):
        ours, theirs = (
            r.federation.method.model_for(r.federation.world.device(client)).state
            for r in (zkt, local)
        )
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert zkt.summary["personal_score"] == local.summary["personal_score"]


def test_the_pull_keeps_a_client_near_what_it_received() -> None:
    moved = {}
    for mu in (0.0, 5.0):
        settings = {
            "fleet": UNLIKE,
            "participants": 4,
            "rounds": 1,
            "train": Train(epochs=10, batch=20, lr=0.02),
        }
        federation = nestling.run(small(quick(back=0, mu=mu), **settings)).federation
        model = federation.method.model_for(federation.world.device(0))
        start = model.view.extract(model.reference.initial)
        moved[mu] = sum(float((t - start[name]).square().sum()) for name, t in model.state.items())
    assert moved[5.0] < 0.5 * moved[0.0]


# -- state, engines, bad replies -------------------------------------------------------------------


def test_the_generator_goes_on_where_it_was() -> None:
    found = []
    for again in (False, True):
        federation = federation_of(quick())
        method, first = federation.method, dict(federation.method.generator)
        replies = replies_of(federation, [0, 2])
        method.merge(replies, 1)
        assert any(not torch.equal(t, first[name]) for name, t in method.generator.items())
        if again:
            method.restore({**method.state(), "generator": first})
        method.merge(replies, 2)
        found.append(dict(method.weights))
    assert any(not torch.equal(t, found[1][name]) for name, t in found[0].items())


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    method = Named("nestling.methods.distill.fedzkt:FedZKT", QUICK)
    whole_run = nestling.run(small(method, fleet=UNLIKE, rounds=3))
    nestling.run(small(method, fleet=UNLIKE, rounds=2), out=tmp_path / "a")
    resumed = nestling.resume(tmp_path / "a", overrides=("rounds=3",))
    ours, theirs = resumed.federation.method, whole_run.federation.method
    for part, state in theirs.state().items():
        assert all(torch.equal(t, ours.state()[part][name]) for name, t in state.items())
    for client in range(4):
        one, other = (m.model_for(m.world.device(client)).state for m in (ours, theirs))
        assert all(torch.equal(one[name], t) for name, t in other.items())


def test_a_stack_of_clients_gives_the_same() -> None:
    gentle = {
        "train": Train(epochs=1, batch=20, lr=0.01, momentum=0.0),
        "fleet": UNLIKE,
        "participants": 4,
    }
    plain, stacked = (
        nestling.run(
            small(quick(mu=0.1), **gentle, engine=EngineConfig(name, workers=1))
        ).federation.method
        for name in ("inline", "cohort")
    )
    for part, state in plain.state().items():
        assert all(
            torch.allclose(t, stacked.state()[part][name], atol=1e-4) for name, t in state.items()
        )
    for client in range(4):
        one, other = (m.model_for(m.world.device(client)).state for m in (plain, stacked))
        assert all(torch.allclose(one[name], t, atol=1e-4) for name, t in other.items())


def test_a_round_without_replies_changes_nothing_and_a_broken_one_leaves_no_trace() -> None:
    federation = federation_of(quick())
    method, before = (
        federation.method,
        {part: dict(state) for part, state in federation.method.state().items()},
    )
    method.merge([], 1)
    assert all(
        method.state()[part][name] is t
        for part, state in before.items()
        for name, t in state.items()
    )
    replies = replies_of(federation, [0, 3])
    bad = {name: t * float("nan") for name, t in replies[0].message["weights"].items()}
    federation.world.store.begin(1)
    method.merge(
        [
            Reply(
                replies[0].device,
                replies[0].piece,
                replies[0].sent,
                Message({"weights": bad}, {"samples": 1}),
            )
        ],
        1,
    )
    federation.roll_back(1, before)
    assert not method.records.get(0)
    assert all(
        torch.equal(method.state()[part][name], t)
        for part, state in before.items()
        for name, t in state.items()
    )


def test_networks_with_running_statistics_take_part() -> None:
    tracked = Named("tinycnn", {"channels": [8, 16, 16], "norm": "tracked"})
    result = nestling.run(small(quick(), fleet=UNLIKE, model=tracked, rounds=1, participants=4))
    method, world = result.federation.method, result.federation.world
    kept = [method.records.get(client) for client in range(4) if world.device(client).tier != "mlp"]
    assert result.summary["refused"] == 0 and all(
        model.keys() == method.weights.keys() for model in kept
    )
    assert all(bool(t.isfinite().all()) for t in method.weights.values())


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"loss": "l2"}, "method.loss"),
        ({"iterations": -1}, "method.iterations"),
        ({"back": -1}, "method.back"),
        ({"mu": -0.1}, "method.mu"),
        ({"lr": 0.0}, "method.lr"),
        ({"momentum": 1.0}, "method.momentum"),
        ({"generator_lr": 0.0}, "method.generator_lr"),
        ({"batch": 1}, "method.batch"),
        ({"nz": 0}, "method.nz"),
        ({"channels": 0}, "method.channels"),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as error:
        FedZKT(**options)
    assert error.value.field == field


@pytest.mark.parametrize(("shape", "model"), [((6, 20), "cnn1d"), ((9,), "mlp")])
def test_sequences_and_vectors_can_be_made_too(
    tmp_path: Path, shape: tuple[int, ...], model: str
) -> None:
    chance = np.random.default_rng(0)
    np.savez(
        tmp_path / "own.npz",
        x=chance.normal(size=(200, *shape)).astype(np.float32),
        y=np.arange(200) % 3,
    )
    tiers = (
        Tier(name="own", model="mlp", model_options={"hidden": [8]}, count=2),
        Tier(name="main", ratio=1.0, count=2),
    )
    result = nestling.run(
        small(
            quick(),
            data=Data("npz", path=str(tmp_path / "own.npz"), layout="lc" if shape[1:] else "f"),
            model=Named(model),
            fleet=FleetConfig(tiers=tiers),
            split=SplitConfig(kind="iid"),
            train=Train(augment="none"),
        )
    )
    assert result.summary["refused"] == 0
    assert all(bool(t.isfinite().all()) for t in result.federation.method.weights.values())


# -- learning --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_f_learns_without_data_and_nobody_is_worse_for_it() -> None:
    """F never sees a digit. It ends far above chance, and above what the devices' models reach
    alone on all classes by more than the seeds' spread; on their own classes devices stay as good
    as alone (a point above, of which a rounding may take some)."""
    method, settings = FedZKT(), {**SETTING, "rounds": 5}
    ours, local = (
        [nestling.run(experiment(m, seed, **settings)).summary for seed in SEEDS]
        for m in (method, "local")
    )
    found = {
        kind: [[run[kind]["last"] for run in runs] for runs in (ours, local)]
        for kind in ("global_score", "personal_score")
    }
    together, alone = found["global_score"]
    assert min(together) > 0.3  # chance is 0.1
    assert clearly_above(together, alone), found
    together, alone = found["personal_score"]
    assert mean(together) > mean(alone) - 0.01, found

"""FedKD: factors and what they hold, the adaptive loss by hand, where it is simpler methods,
refusals, and learning."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import nestling
from nestling import FleetConfig, InputError, Named, SplitConfig, Tier, Train
from nestling.message import Message, faults
from nestling.methods.baselines.fedavg import FedAvg
from nestling.methods.baselines.local import Local
from nestling.methods.distill.factors import LEFT, RIGHT, factored, whole
from nestling.methods.distill.fedkd import Bridged, FedKD, _mutual
from nestling.methods.distill.fml import FML
from nestling.methods.distill.pair import MEME
from nestling.models import build
from nestling.models.taps import find_taps
from nestling.training.objectives import Batch, Net
from nestling.views import State
from tests.methods.by_class import (
    MIXED,
    SHOTS,
    few_shots_alone,
    one_round,
    resumes,
    same_on_every_engine,
)
from tests.methods.learning import mean
from tests.methods.mixed import unlike
from tests.small import small

NAME = "nestling.methods.distill.fedkd:FedKD"
OWN = FleetConfig(tiers=(Tier(name="mlp", model="mlp", model_options={"hidden": [16]}, count=4),))
RUN: dict[str, Any] = {
    "participants": 4,
    "rounds": 3,
    "split": SplitConfig(kind="quantity", alpha=2.0, min_size=20),
}
WHOLE: dict[str, Any] = {"energy": 1.0, "energy_end": 1.0}


def kept(federation: Any, client: int) -> State:
    """A client's own network, by its own names."""
    memory = federation.world.store.get(client).items()
    return {
        name.removeprefix("weights/").removeprefix("own."): t
        for name, t in memory
        if "bridge" not in name
    }


def test_without_teaching_it_is_training_alone_beside_fedavg() -> None:
    """Bit for bit, where nothing is left out of what travels."""
    ours = nestling.run(
        small(FedKD(soft=0.0, hidden=0.0, ratio=1.0, **WHOLE), fleet=OWN, **RUN)
    ).federation
    local = nestling.run(small(Local(), fleet=OWN, **RUN)).federation
    averaged = nestling.run(
        small(FedAvg(), fleet=FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=4),)), **RUN)
    ).federation
    for client in range(4):
        one, other = kept(ours, client), kept(local, client)
        assert one.keys() == other.keys() and all(
            torch.equal(t, other[name]) for name, t in one.items()
        )
    assert all(
        torch.equal(t, averaged.method.weights[name]) for name, t in ours.method.weights.items()
    )


def test_without_its_extras_it_is_mutual_learning_at_twice_the_rate() -> None:
    """Cross-entropy + KL is twice FML's half of each."""
    train = Train(epochs=1, batch=20, lr=0.02)
    plain = FedKD(hidden=0.0, adaptive=False, **WHOLE)
    ours = nestling.run(small(plain, fleet=OWN, train=train, **RUN)).federation
    mutual = nestling.run(small(FML(), fleet=OWN, train=replace(train, lr=0.04), **RUN)).federation
    pairs = [
        (ours.method.weights, mutual.method.weights),
        *((kept(ours, c), kept(mutual, c)) for c in range(4)),
    ]
    for one, other in pairs:
        assert one.keys() == other.keys() and all(
            torch.allclose(t, other[name], atol=1e-5) for name, t in one.items()
        )


@pytest.mark.parametrize("energy", [0.5, 0.9, 0.99])
def test_factors_are_the_fewest_that_hold_the_energy(energy: float) -> None:
    torch.manual_seed(0)
    low = torch.randn(12, 3) @ torch.randn(3, 40) + 0.05 * torch.randn(12, 40)
    state = {
        "conv.weight": low.reshape(12, 10, 2, 2),
        "conv.bias": torch.randn(12),
        "square": torch.randn(4, 4),
        "none": torch.zeros(9, 9),
    }
    message = factored(state, energy, {"samples": 3})
    assert message.facts["samples"] == 3 and len(message.facts["ranks"]) == 4
    rank = dict(zip(sorted(state), message.facts["ranks"], strict=True))["conv.weight"]
    values = torch.linalg.svdvals(low.double()).square()
    assert values[:rank].sum() >= energy * values.sum() > values[: rank - 1].sum()
    assert message[LEFT]["conv.weight"].shape == (12, rank) and message[RIGHT][
        "conv.weight"
    ].shape == (rank, 40)
    made = whole(message, state)
    assert made.keys() == state.keys() and torch.equal(made["conv.bias"], state["conv.bias"])
    left_out = (made["conv.weight"] - state["conv.weight"]).square().sum() / low.square().sum()
    assert left_out <= 1 - energy + 1e-5 and torch.equal(made["none"], state["none"])


def test_with_all_the_energy_everything_travels_as_it_is() -> None:
    state = {"a": torch.randn(9, 9), "b": torch.randn(3)}
    message = factored(state, 1.0, {})
    assert message.facts["ranks"] == [0, 0] and set(message.parts) == {MEME}
    assert all(torch.equal(t, state[name]) for name, t in whole(message, state).items())


def test_the_loss_by_hand() -> None:
    own, meme = (
        build(n, shape=(1, 28, 28), classes=10, **o)
        for n, o in (("mlp", {"hidden": [16]}), ("tinycnn", {}))
    )
    taps, meme_taps = (find_taps(m, (1, 28, 28)) for m in (own, meme))
    module = Bridged(own, taps, meme, meme_taps).train()
    x, y = torch.randn(6, 1, 28, 28), torch.randint(0, 10, (6,))
    seen: dict[str, torch.Tensor] = {}
    for name, part, head in (("own", own, taps.head), ("meme", meme, meme_taps.head)):
        part.get_submodule(head).register_forward_pre_hook(
            lambda _, inputs, name=name: seen.__setitem__(name, inputs[0])
        )
    a, b = own(x), meme(x)
    f, g = seen["own"], seen["meme"] @ module.bridge.weight.T
    p, q = a.softmax(-1), b.softmax(-1)
    wrong = [F.cross_entropy(logits, y) for logits in (a, b)]
    total = float(sum(wrong).detach())
    mine = (
        wrong[0]
        + (2 * (q.detach() * (q.detach() / p).log()).sum(-1).mean() + 3 * F.mse_loss(f, g.detach()))
        / total
    )
    common = (
        wrong[1]
        + (2 * (p.detach() * (p.detach() / q).log()).sum(-1).mean() + 3 * F.mse_loss(g, f.detach()))
        / total
    )
    options = {
        "floor": 0.1,
        "hidden": 3.0,
        "soft": 2.0,
        "head": f"own.{taps.head}",
        "meme_head": module.meme_head,
    }
    loss = partial(_mutual, Net(module, dict(module.named_parameters())), given={}, **options)
    found = loss(batch=Batch(x, y, torch.arange(6)))
    assert torch.allclose(found, mine + common, rtol=1e-5)
    for params, alone in (
        (own.parameters(), mine),
        ([*meme.parameters(), module.bridge.weight], common),
    ):
        own_params = list(params)
        ours, theirs = (
            torch.autograd.grad(v, own_params, retain_graph=True) for v in (found, alone)
        )
        assert all(torch.allclose(s, t, atol=1e-6) for s, t in zip(ours, theirs, strict=True))
    mask = torch.arange(6) < 4
    filled = Batch(torch.where(mask[:, None, None, None], x, 3.0), y, torch.arange(6), mask=mask)
    assert torch.allclose(
        loss(batch=filled), loss(batch=Batch(x[:4], y[:4], torch.arange(4))), rtol=1e-5
    )


def test_the_energy_rises_with_the_rounds() -> None:
    method = FedKD(energy=0.9, energy_end=0.98, ramp=4)
    assert [method.share(r) for r in (1, 3, 5, 9)] == pytest.approx([0.9, 0.94, 0.98, 0.98])


def test_the_server_averages_what_factors_make_and_fewer_bytes_travel() -> None:
    federation, replies, _ = one_round(FedKD(energy=0.8, energy_end=0.8))
    method, before = federation.method, dict(federation.method.weights)
    method.merge([], 1)
    assert all(torch.equal(t, before[name]) for name, t in method.weights.items())
    method.merge(replies, 2)
    for name, tensor in method.weights.items():
        made = [whole(r.message, before)[name].double() * r.samples for r in replies]
        assert torch.allclose(
            tensor.double(), sum(made) / sum(r.samples for r in replies), atol=1e-6
        )
    size = 4 * sum(t.numel() for t in method.weights.values())
    assert any(r.message.facts["ranks"] != [0] * len(before) for r in replies)
    assert all(r.message.nbytes < size and r.sent.nbytes < size for r in replies)


def test_own_networks_and_bridges_stay() -> None:
    federation = nestling.run(small(FedKD(), fleet=MIXED, participants=4)).federation
    for client in range(4):
        names = federation.world.store.get(client)
        assert "weights/bridge.weight" in names and not any(
            name.startswith("weights/meme.") for name in names
        )


def test_ranks_that_cannot_be_are_refused() -> None:
    federation, replies, _ = one_round(FedKD(energy=0.8, energy_end=0.8), clients=[0])
    method, reply = federation.method, replies[0]
    good = reply.message.facts["ranks"]
    for wrong in (
        None,
        "abc",
        good[1:],
        [True, *good[1:]],
        [-1, *good[1:]],
        [10**6] * len(good),
        [1.0] * len(good),
    ):
        with pytest.raises(InputError, match="ranks"):
            method.returned(reply.piece, reply.sent, {"samples": 1, "ranks": wrong})
    assert faults(reply.message, method.expects(reply.piece, reply.sent)) is None
    other = method.returned(reply.piece, reply.sent, {"ranks": [0] * len(good)})
    assert faults(reply.message, method.expects(other, reply.sent)) is not None
    assert (
        faults(Message({}, reply.message.facts), method.expects(reply.piece, reply.sent))
        is not None
    )


def test_every_engine_gives_the_same() -> None:
    same_on_every_engine(FedKD(), engines=("cohort", "pool"))


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    resumes(Named(NAME), tmp_path)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"energy": 0.0}, "energy"),
        ({"energy_end": 1.5}, "energy_end"),
        ({"ramp": 0}, "ramp"),
        ({"floor": 0.0}, "floor"),
        ({"hidden": -1.0}, "hidden"),
        ({"soft": -1.0}, "soft"),
        ({"ratio": -1.0}, "ratio"),
    ],
)
def test_bad_settings_are_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(InputError, match=f"method.{field}"):
        small(Named(NAME, options)).make_method()


@pytest.mark.slow
def test_a_shared_network_helps_unlike_networks_learn() -> None:
    """With three classes and twenty rows a client the mean of the seeds is above the same networks
    alone (not every seed is)."""
    ours, local = unlike(FedKD(), **SHOTS), few_shots_alone()
    assert mean(ours) > mean(local) + 0.005

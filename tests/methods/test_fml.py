"""FML: two networks a client, where it is training alone and FedAvg at once, the loss by hand,
traps, and learning."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import nestling
from nestling import FleetConfig, InputError, Named, SplitConfig, Tier
from nestling.message import Message, faults
from nestling.methods.baselines.fedavg import FedAvg
from nestling.methods.baselines.local import Local
from nestling.methods.distill.fml import FML, _mutual
from nestling.methods.distill.pair import MEME, Pair
from nestling.models import build
from nestling.models.taps import find_taps
from nestling.runs.assemble import assemble
from nestling.training.objectives import Batch, Net
from nestling.views import Reference
from nestling.world import Piece
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

NAME = "nestling.methods.distill.fml:FML"
OWN = FleetConfig(tiers=(Tier(name="mlp", model="mlp", model_options={"hidden": [16]}, count=4),))
UNEVEN = SplitConfig(kind="quantity", alpha=2.0, min_size=20)
RUN: dict[str, Any] = {"participants": 4, "rounds": 3, "split": UNEVEN}


def pair() -> Pair:
    own, meme = (
        build(name, shape=(1, 28, 28), classes=10, **options)
        for name, options in (("mlp", {"hidden": [16]}), ("tinycnn", {}))
    )
    return Pair(own, find_taps(own, (1, 28, 28)), meme, find_taps(meme, (1, 28, 28)).head)


def test_without_teaching_it_is_training_alone_beside_fedavg() -> None:
    """α = β = 1: own networks are Local's and the meme network FedAvg's, both bit for bit."""
    ours = nestling.run(small(FML(alpha=1.0, beta=1.0, ratio=1.0), fleet=OWN, **RUN)).federation
    local = nestling.run(small(Local(), fleet=OWN, **RUN)).federation
    whole = FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=4),))
    averaged = nestling.run(small(FedAvg(), fleet=whole, **RUN)).federation
    for client in range(4):
        kept = {name.replace("/own.", "/"): t for name, t in ours.world.store.get(client).items()}
        alone = local.world.store.get(client)
        assert kept.keys() == alone.keys() and all(
            torch.equal(t, alone[name]) for name, t in kept.items()
        )
    assert ours.method.weights.keys() == averaged.method.weights.keys()
    assert all(
        torch.equal(t, averaged.method.weights[name]) for name, t in ours.method.weights.items()
    )


def test_teaching_changes_both() -> None:
    taught, plain = (
        nestling.run(small(FML(alpha=a, beta=a), fleet=OWN, **RUN)).federation for a in (0.5, 1.0)
    )
    assert not torch.equal(
        taught.method.weights["head.weight"], plain.method.weights["head.weight"]
    )
    one, other = (f.world.store.get(0) for f in (taught, plain))
    assert one.keys() == other.keys() and not all(
        torch.equal(t, other[name]) for name, t in one.items()
    )


def test_the_loss_by_hand_and_teachers_held_still() -> None:
    module = pair().train()
    x, y = torch.randn(6, 1, 28, 28), torch.randint(0, 10, (6,))
    loss = partial(
        _mutual, Net(module, dict(module.named_parameters())), given={}, alpha=0.3, beta=0.8
    )
    own, meme = module.own(x), module.meme(x)
    p, q = own.softmax(-1), meme.softmax(-1)
    mine = (
        0.3 * F.cross_entropy(own, y) + 0.7 * (q.detach() * (q.detach() / p).log()).sum(-1).mean()
    )
    common = (
        0.8 * F.cross_entropy(meme, y) + 0.2 * (p.detach() * (p.detach() / q).log()).sum(-1).mean()
    )
    found = loss(batch=Batch(x, y, torch.arange(6)))
    assert torch.allclose(found, mine + common, rtol=1e-5)
    for part, alone in ((module.own, mine), (module.meme, common)):
        ours, theirs = (
            torch.autograd.grad(v, list(part.parameters()), retain_graph=True)
            for v in (found, alone)
        )
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))
    mask = torch.arange(6) < 4
    filled = Batch(torch.where(mask[:, None, None, None], x, 3.0), y, torch.arange(6), mask=mask)
    assert torch.allclose(
        loss(batch=filled), loss(batch=Batch(x[:4], y[:4], torch.arange(4))), rtol=1e-5
    )


def test_in_training_a_pair_says_both_and_else_its_own() -> None:
    module, x = pair(), torch.randn(3, 1, 28, 28)
    both, own = module.train()(x), module.eval()(x)
    assert (
        both.shape == (2, 3, 10)
        and torch.equal(own, module.own(x))
        and torch.equal(both[1], module.meme.train()(x))
    )


def test_a_device_has_room_for_both() -> None:
    """The meme network is at most half of the smallest tier's, and tiers of the main network shrink
    their own."""
    federation = assemble(small(FML(), model=Named("tinycnn", {"channels": [32, 64, 64]})))[1]
    method, world = federation.method, federation.world
    least = min(plan.cost.params for plan in world.plans.values())
    size = sum(p.numel() for p in method.shared.module.parameters())
    assert 0 < size <= least / 2
    for tier, piece in method.pieces.items():
        cost = world.cost(piece)
        own = Reference("own", piece.reference.module.own, world.main.shape)
        assert (
            cost.params
            == world.cost(Piece(own, own.full)).params + size
            <= world.plans[tier].cost.params
        )
        assert (
            cost.macs
            == world.cost(Piece(own, own.full)).macs
            + world.cost(Piece(method.shared, method.shared.full)).macs
        )


def test_only_the_meme_network_travels_and_is_not_kept() -> None:
    result = nestling.run(small(FML(), fleet=MIXED, participants=4))
    method, store = result.federation.method, result.federation.world.store
    size = 4 * sum(t.numel() for t in method.weights.values())
    assert all(row["bytes_up"] == row["bytes_down"] == 4 * size for row in result.metrics)
    assert store.clients() == [0, 1, 2, 3]
    assert all(name.startswith("weights/own.") for c in range(4) for name in store.get(c))


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_merge_is_the_mean_and_a_round_without_replies_changes_nothing(weighting: str) -> None:
    federation, replies, _ = one_round(FML(weighting=weighting), split=UNEVEN)
    method, before = federation.method, dict(federation.method.weights)
    method.merge([], 1)
    assert all(torch.equal(t, before[name]) for name, t in method.weights.items())
    method.merge(replies, 2)
    shares = [r.samples if weighting == "samples" else 1 for r in replies]
    for name, tensor in method.weights.items():
        expected = sum(
            r.message[MEME][name].double() * s for r, s in zip(replies, shares, strict=True)
        ) / sum(shares)
        assert torch.allclose(tensor.double(), expected, atol=1e-7)


def test_what_is_tested_is_the_own_network_and_the_meme_beside_it() -> None:
    federation = nestling.run(small(FML(), fleet=MIXED, participants=2, rounds=1)).federation
    method, world, x = federation.method, federation.world, federation.bench.x_test[:20]
    assert len(world.store.clients()) == 2
    for client in range(4):
        model = method.model_for(world.device(client))
        network = model.reference.network(model.view, model.state).eval()
        kept = {n.removeprefix("weights/own."): t for n, t in world.store.get(client).items()}
        own = network.own
        if kept:
            assert all(torch.equal(t, kept[name]) for name, t in own.state_dict().items())
        with torch.no_grad():
            assert torch.equal(network(x), own(x))
    assert method.global_model().reference is method.shared


def test_a_client_that_answers_in_another_shape_is_refused() -> None:
    federation, replies, _ = one_round(FML(), clients=[0])
    reply, method = replies[0], federation.method
    assert faults(reply.message, method.expects(reply.piece, reply.sent)) is None
    flat = {name: t.reshape(-1) for name, t in reply.message[MEME].items()}
    for wrong in (Message({}, reply.message.facts), Message({MEME: flat}, reply.message.facts)):
        assert faults(wrong, method.expects(reply.piece, reply.sent)) is not None


def test_every_engine_gives_the_same() -> None:
    same_on_every_engine(FML(), engines=("cohort", "pool"))


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    resumes(Named(NAME), tmp_path)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"alpha": 1.5}, "alpha"),
        ({"beta": -0.1}, "beta"),
        ({"ratio": 2.0}, "ratio"),
        ({"weighting": "x"}, "weighting"),
    ],
)
def test_bad_settings_are_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(InputError, match=f"method.{field}"):
        small(Named(NAME, options)).make_method()


@pytest.mark.slow
def test_a_shared_network_helps_unlike_networks_learn() -> None:
    """With three classes and twenty rows a client the mean of the seeds is above the same networks
    alone (not every seed is)."""
    ours, local = unlike(FML(), **SHOTS), few_shots_alone()
    assert mean(ours) > mean(local) + 0.01

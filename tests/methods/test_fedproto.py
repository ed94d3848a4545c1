"""FedProto: prototypes, their means, what the loss does with them, and prediction by the
nearest."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import nestling
from nestling import InputError, Named, SplitConfig
from nestling.message import faults
from nestling.methods.personal import own_weights
from nestling.methods.representation.class_means import class_means
from nestling.methods.representation.class_table import STATISTICS
from nestling.methods.representation.fedproto import FedProto, _near_prototypes
from nestling.models import build
from nestling.training.objectives import Batch, Net, forward_with_features
from tests.methods.by_class import (
    MIXED,
    SHOTS,
    everything,
    few_shots_alone,
    held,
    holders,
    known_after,
    one_round,
    resumes,
    same_on_every_engine,
)
from tests.methods.learning import mean
from tests.methods.mixed import unlike
from tests.small import small

NAME = "nestling.methods.representation.fedproto:FedProto"
THREE = SplitConfig(kind="classes", classes=3, size=60)


def test_a_prototype_is_the_mean_of_its_class_in_evaluation_mode() -> None:
    _, replies, clients = one_round(FedProto(size=8), split=THREE)
    for reply, client in zip(replies, clients, strict=True):
        network = client.reference.network(client.view, client.weights).eval()
        with torch.no_grad():
            _, features = forward_with_features(
                Net(network, {}), client.x, client.reference.taps.head
            )
        told = reply.message.facts["classes"]
        assert told == sorted({int(c) for c in client.y}) and len(told) == 3
        for row, label in enumerate(told):
            mean = features[client.y == label].double().mean(0)
            assert torch.allclose(
                reply.message[STATISTICS]["features"][row].double(), mean, atol=1e-6
            )
            assert int(reply.message["counts"]["rows"][row]) == int((client.y == label).sum())


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_means_are_over_those_who_hold_a_class(weighting: str) -> None:
    """A class on one client alone is that client's prototype, bit for bit; one that nobody holds is
    not there."""
    federation, replies, _ = one_round(
        FedProto(size=8, weighting=weighting),
        split=SplitConfig(kind="dirichlet", alpha=0.2, size=60),
    )
    federation.method.merge(replies, 1)
    table, seen = federation.method.table, set()
    for label in range(10):
        told = [(r.message[STATISTICS]["features"][k], r, k) for r, k in holders(replies, label)]
        assert bool(table.known[label]) == bool(told)
        seen.add(min(len(told), 2))
        if not told:
            assert not bool(table.rows["features"][label].any())
        elif len(told) == 1:
            assert torch.equal(table.rows["features"][label], told[0][0])
        else:
            shares = [
                float(r.message["counts"]["rows"][k]) if weighting == "samples" else 1.0
                for _, r, k in told
            ]
            mean = sum(p.double() * s for (p, _, _), s in zip(told, shares, strict=True)) / sum(
                shares
            )
            assert torch.allclose(table.rows["features"][label].double(), mean, atol=1e-7)
    assert {1, 2} <= seen


def test_classes_nobody_tells_of_keep_their_prototype() -> None:
    federation, replies, _ = one_round(FedProto(size=8), split=THREE)
    method = federation.method
    method.merge(replies, 1)
    before = method.table
    method.merge(replies[:1], 2)
    told = replies[0].message.facts["classes"]
    others = [c for c in range(10) if c not in told]
    assert torch.equal(method.table.rows["features"][others], before.rows["features"][others])
    assert torch.equal(
        method.table.rows["features"][told], replies[0].message[STATISTICS]["features"]
    )
    after = method.table
    method.merge([], 3)
    assert torch.equal(method.table.rows["features"], after.rows["features"]) and torch.equal(
        method.table.known, after.known
    )


def test_the_term_is_the_mean_square_over_known_classes() -> None:
    _, _, clients = one_round(FedProto(size=8), clients=[0], split=THREE)
    client = clients[0]
    network = client.reference.network(client.view, client.weights)
    batch = Batch(client.x[:12], client.y[:12], torch.arange(12))
    known = torch.zeros(10)
    known[int(client.y[0])] = 1.0
    given = {"features": torch.randn(10, 8), "known": known}
    logits, features = forward_with_features(Net(network, {}), batch.x, client.reference.taps.head)
    counts = batch.y == client.y[0]
    square = ((features - given["features"][batch.y]) ** 2)[counts].sum() / (8 * 12)
    loss = partial(_near_prototypes, head=client.reference.taps.head)
    plain, nothing = F.cross_entropy(logits, batch.y), {**given, "known": torch.zeros(10)}
    assert torch.allclose(
        loss(Net(network, {}), batch, given, lam=3.0), plain + 3 * square, rtol=1e-5
    )
    assert torch.allclose(loss(Net(network, {}), batch, nothing, lam=3.0), plain, rtol=1e-6)


def test_round_one_is_training_alone_and_later_ones_are_not() -> None:
    """Nothing is known in round 1; from then on the prototypes move the networks."""
    alone, pulled = (
        [
            nestling.run(
                small(FedProto(size=8, lam=lam), fleet=MIXED, participants=4, rounds=r)
            ).federation
            for r in (1, 2)
        ]
        for lam in (0.0, 5.0)
    )
    same = [
        [torch.equal(t, everything(b)[name]) for name, t in everything(a).items()]
        for a, b in zip(alone, pulled, strict=True)
    ]
    assert all(same[0]) and not all(same[1])


def test_features_of_unlike_networks_come_together() -> None:
    """After some rounds, clients' own prototypes of a class lie nearer to one another with the term
    than without."""

    def spread(lam: float) -> float:
        federation = nestling.run(
            small(
                FedProto(size=8, lam=lam),
                fleet=MIXED,
                participants=4,
                rounds=4,
                split=SplitConfig(kind="iid", size=80),
            )
        ).federation
        own = []
        for number in range(4):
            model = federation.method.model_for(federation.world.device(number))
            network = model.reference.network(model.view, model.state).eval()
            with torch.no_grad():
                _, features = forward_with_features(
                    Net(network, {}), federation.bench.x_test[:500], model.reference.taps.head
                )
            own.append(class_means(features, federation.bench.y_test[:500], 10))
        stack = torch.stack(own)
        return float(stack.var(0).mean())

    assert spread(3.0) < 0.6 * spread(0.0)


def test_bytes_are_those_of_the_classes_that_are_told() -> None:
    """4·(d + 1) up for every class a client holds (d with weighting "uniform"), 4·d down for every
    class the server knows."""
    for weighting, extra in (("samples", 1), ("uniform", 0)):
        result = nestling.run(
            small(FedProto(size=8, weighting=weighting), fleet=MIXED, participants=4, split=THREE)
        )
        f = result.federation
        first, second = result.metrics
        told = sum(held(f, c) for c in range(4))
        assert first["bytes_up"] == second["bytes_up"] == 4 * (8 + extra) * told
        assert first["bytes_down"] == 0
        assert second["bytes_down"] == 4 * 4 * 8 * known_after(f, range(4)) <= 4 * 4 * 8 * 10


def test_the_nearest_prototype_decides_among_a_clients_own_classes() -> None:
    method = FedProto(size=8, predict="prototype")
    federation = nestling.run(
        small(method, fleet=MIXED, participants=2, rounds=1, split=THREE)
    ).federation
    own, x = federation.method, federation.bench.x_test[:200]
    asked = set(federation.world.store.clients())
    assert len(asked) == 2
    for client in range(4):
        device = federation.world.device(client)
        held_now = torch.from_numpy(federation.world.split.counts(client) > 0) & own.table.known
        model = own.model_for(device)
        network = model.reference.network(model.view, model.state).eval()
        with torch.no_grad():
            said, features = forward_with_features(Net(network, {}), x, model.reference.taps.head)
        if not bool(held_now.any()):
            assert client not in asked and bool(torch.isfinite(said).all())
            continue
        far = torch.cdist(features.double(), own.table.rows["features"].double())
        far[:, ~held_now] = torch.inf
        assert torch.equal(said.argmax(1), far.argmin(1))


def test_a_client_that_tells_nonsense_is_refused() -> None:
    federation, replies, _ = one_round(FedProto(size=8), clients=[0], split=THREE)
    method, reply = federation.method, replies[0]
    for wrong in (None, "abc", [3, 1], [1, 1], [10], [-1], [True], [1.0]):
        with pytest.raises(InputError, match="classes"):
            method.returned(reply.piece, reply.sent, {"samples": 1, "classes": wrong})
    assert faults(reply.message, method.expects(reply.piece, reply.sent)) is None
    fewer = method.returned(
        reply.piece, reply.sent, {"classes": reply.message.facts["classes"][:1]}
    )
    assert "expected" in str(faults(reply.message, method.expects(fewer, reply.sent)))


def test_every_engine_gives_the_same() -> None:
    same_on_every_engine(FedProto(size=8), engines=("cohort", "pool"))


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    resumes(Named(NAME, {"size": 8, "predict": "prototype"}), tmp_path)


def test_views_of_one_network_have_their_features_pooled() -> None:
    """On tiers that are widths of one network, networks have the features of the narrowest and no
    more parameters than before."""
    federation = nestling.run(small(FedProto())).federation
    pieces = federation.method.pieces
    assert pieces["small"] is federation.world.plans["small"].piece
    wide = {
        tier: p.reference.taps.cut(p.reference.network(p.view)).features
        for tier, p in pieces.items()
    }
    assert set(wide.values()) == {federation.method.wide}
    for tier, piece in pieces.items():
        assert federation.world.cost(piece).params <= federation.world.plans[tier].cost.params
    client = federation.world.store.clients()[0]
    assert bool(own_weights(federation.world.store.get(client)))


def test_both_ways_to_decide_are_reported() -> None:
    run = {"fleet": MIXED, "participants": 4, "split": THREE}
    by_prototype, by_head = (
        nestling.run(small(FedProto(predict=way), **run)).summary for way in ("prototype", "head")
    )
    assert list(by_prototype["others"]) == ["by head"] and list(by_head["others"]) == [
        "by prototype"
    ]
    for kind in ("global_score", "personal_score"):
        assert by_prototype["others"]["by head"][kind] == by_head[kind]["last"]
        assert by_head["others"]["by prototype"][kind] == by_prototype[kind]["last"]


def test_a_network_that_names_its_head_keeps_naming_it() -> None:
    network = build("tinycnn", shape=(1, 28, 28), classes=10, channels=[8, 16, 16])
    network.taps = {"head": "head"}  # type: ignore[assignment]
    result = nestling.run(small(FedProto(size=3), model=network, rounds=1))
    assert {piece.reference.taps.head for piece in result.federation.method.pieces.values()} == {
        "head.out"
    }


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"lam": -1.0}, "lam"),
        ({"size": -1}, "size"),
        ({"weighting": "rows"}, "weighting"),
        ({"predict": "luck"}, "predict"),
    ],
)
def test_bad_settings_are_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(InputError, match=f"method.{field}"):
        small(Named(NAME, options)).make_method()


def test_means_of_classes_are_those_of_a_loop() -> None:
    values, y = torch.randn(30, 2, 3), torch.randint(0, 4, (30,))
    found = class_means(values, y, 6)
    for label in range(6):
        rows = values[y == label]
        assert torch.allclose(
            found[label], rows.mean(0) if len(rows) else torch.zeros(2, 3), atol=1e-6
        )


@pytest.mark.slow
@pytest.mark.parametrize("predict", ["prototype", "head"])
def test_prototypes_help_unlike_networks_learn(predict: str) -> None:
    """With three classes and twenty rows a client, as in the paper's tables: every seed is above
    the same networks alone."""
    ours, local = unlike(FedProto(predict=predict), **SHOTS), few_shots_alone()
    assert all(a > b for a, b in zip(ours, local, strict=True)) and mean(ours) > mean(local) + 0.01

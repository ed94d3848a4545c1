"""FD: mean logits by class, everybody's teacher without itself, the loss by hand, traps, and
learning."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import nestling
from nestling import FleetConfig, InputError, Named, SplitConfig, Tier
from nestling.message import faults
from nestling.methods.baselines.local import Local
from nestling.methods.distill.fd import FD, LOGITS, _taught
from nestling.methods.representation.class_table import STATISTICS
from nestling.training.objectives import Batch, Net
from tests.methods.by_class import MIXED, held, holders, one_round, resumes, same_on_every_engine
from tests.methods.exchange import reached, reached_alone
from tests.methods.learning import mean
from tests.small import small

NAME = "nestling.methods.distill.fd:FD"
THREE = SplitConfig(kind="classes", classes=3, size=60)
SKEWED = SplitConfig(kind="dirichlet", alpha=0.2, size=60)


def test_what_is_told_is_the_mean_of_a_classs_logits_in_evaluation_mode() -> None:
    _, replies, clients = one_round(FD(), split=THREE)
    for reply, client in zip(replies, clients, strict=True):
        network = client.reference.network(client.view, client.weights).eval()
        with torch.no_grad():
            logits = network(client.x)
        told = reply.message.facts["classes"]
        assert told == sorted({int(c) for c in client.y}) and len(told) == 3
        for row, label in enumerate(told):
            wanted = logits[client.y == label].double().mean(0)
            assert torch.allclose(
                reply.message[STATISTICS][LOGITS][row].double(), wanted, atol=1e-5
            )


@pytest.mark.parametrize("others", [True, False])
def test_a_teacher_is_the_mean_of_the_others(others: bool) -> None:
    """Of a class on one client alone that client hears nothing, and the others hear its logits."""
    federation, replies, _ = one_round(FD(others=others), split=SKEWED)
    method, world, seen = federation.method, federation.world, set()
    method.merge(replies, 1)
    for client in range(4):
        device = world.device(client)
        sent = method.send(device, method.piece(device, 2), 2)
        for label in range(10):
            told = [
                r.message[STATISTICS][LOGITS][k]
                for r, k in holders(replies, label)
                if not others or r.device.id != client
            ]
            assert (label in sent.facts["classes"]) == bool(told)
            seen.add(min(len(told), 2))
            if told:
                row = sent[STATISTICS][LOGITS][sent.facts["classes"].index(label)]
                assert torch.allclose(row.double(), torch.stack(told).double().mean(0), atol=1e-6)
    assert seen == ({0, 1, 2} if others else {1, 2})


def test_of_an_absent_client_its_last_word_counts_and_once_only() -> None:
    federation, replies, _ = one_round(FD(), split=SKEWED)
    method, world = federation.method, federation.world
    method.merge(replies, 1)
    total, tellers = method.total, method.tellers
    method.merge(replies[:2], 2)  # the same words again
    method.merge([], 3)
    assert torch.equal(tellers, method.tellers)
    assert torch.allclose(total, method.total, atol=1e-12)
    assert method.send(world.device(3), method.piece(world.device(3), 4), 4).facts["classes"]


def test_one_client_has_no_teacher() -> None:
    fleet = FleetConfig(
        tiers=(Tier(name="one", model="mlp", model_options={"hidden": [16]}, count=1),)
    )
    run = {"fleet": fleet, "participants": 1, "rounds": 3}
    ours, local = (nestling.run(small(m, **run)) for m in (FD(), Local()))
    a, b = (r.federation.world.store.get(0) for r in (ours, local))
    assert a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())
    assert ours.summary["bytes_down"] == 0


@pytest.mark.parametrize("options", [{"distance": "kl"}, {"distance": "mse"}])
def test_without_its_weight_it_is_training_alone(options: dict[str, str]) -> None:
    """Bit for bit, and with it is not: networks are as they are, whatever their features."""
    run = {"fleet": MIXED, "participants": 4, "rounds": 3}
    ours, pulled, local = (
        nestling.run(small(m, **run)).federation
        for m in (FD(gamma=0.0, **options), FD(**options), Local())
    )
    for client in range(4):
        a, b, c = (f.world.store.get(client) for f in (ours, local, pulled))
        assert a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())
        assert not all(torch.equal(t, b[name]) for name, t in c.items())


@pytest.mark.parametrize("distance", ["kl", "mse"])
def test_the_loss_by_hand(distance: str) -> None:
    _, _, clients = one_round(FD(), clients=[0], split=THREE)
    client = clients[0]
    network = client.reference.network(client.view, client.weights)
    batch = Batch(client.x[:12], client.y[:12], torch.arange(12))
    known = torch.zeros(10)
    known[int(client.y[0])] = 1.0
    given = {LOGITS: torch.randn(10, 10), "known": known}
    loss = partial(_taught, net=Net(network, {}), gamma=3.0, distance=distance, temperature=2.0)
    logits = network(batch.x)
    far = torch.zeros(())
    for said, label in zip(logits, batch.y, strict=True):
        if label == client.y[0]:
            p, q = (given[LOGITS][label] / 2).softmax(-1), (said / 2).softmax(-1)
            far = far + (
                4 * (p * (p / q).log()).sum()
                if distance == "kl"
                else ((said - given[LOGITS][label]) ** 2).mean()
            )
    plain = F.cross_entropy(logits, batch.y)
    assert torch.allclose(loss(batch=batch, given=given), plain + 3 * far / 12, rtol=1e-5)
    assert torch.allclose(
        loss(batch=batch, given={**given, "known": torch.zeros(10)}), plain, rtol=1e-6
    )
    mask = torch.arange(12) < 7
    short = Batch(client.x[:7], client.y[:7], torch.arange(7))
    filled = Batch(
        torch.where(mask[:, None, None, None], batch.x, 3.0), batch.y, batch.rows, mask=mask
    )
    assert torch.allclose(
        loss(batch=filled, given=given), loss(batch=short, given=given), rtol=1e-5
    )


def test_bytes_are_those_of_the_classes_that_are_told() -> None:
    result = nestling.run(small(FD(), fleet=MIXED, participants=4, split=THREE))
    federation, (first, second) = result.federation, result.metrics
    assert (
        first["bytes_up"]
        == second["bytes_up"]
        == 4 * 10 * sum(held(federation, c) for c in range(4))
    )
    counts = [federation.world.split.counts(c) > 0 for c in range(4)]
    heard = [
        sum(any(counts[o][label] for o in range(4) if o != c) for label in range(10))
        for c in range(4)
    ]
    assert first["bytes_down"] == 0 and second["bytes_down"] == 4 * 10 * sum(heard)


def test_a_client_that_tells_nonsense_is_refused() -> None:
    federation, replies, _ = one_round(FD(), clients=[0], split=THREE)
    method, reply = federation.method, replies[0]
    for wrong in (None, [3, 1], [10], [True]):
        with pytest.raises(InputError, match="classes"):
            method.returned(reply.piece, reply.sent, {"samples": 1, "classes": wrong})
    assert faults(reply.message, method.expects(reply.piece, reply.sent)) is None
    fewer = method.returned(
        reply.piece, reply.sent, {"classes": reply.message.facts["classes"][:1]}
    )
    assert "expected" in str(faults(reply.message, method.expects(fewer, reply.sent)))


def test_every_engine_gives_the_same() -> None:
    same_on_every_engine(FD(), engines=("cohort", "pool"))


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """With clients that vanish, and others that are absent for a round."""
    fleet = FleetConfig(
        tiers=(Tier(name="mlp", model="mlp", model_options={"hidden": [16]}, count=4, dropout=0.3),)
    )
    resumes(Named(NAME), tmp_path, fleet=fleet, participants=3)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"gamma": -1.0}, "gamma"),
        ({"temperature": 0.0}, "temperature"),
        ({"distance": "x"}, "distance"),
    ],
)
def test_bad_settings_are_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(InputError, match=f"method.{field}"):
        small(Named(NAME, options)).make_method()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"distance": "mse", "gamma": 0.1}])
def test_what_others_say_of_a_class_helps_unlike_networks_learn(options: dict[str, object]) -> None:
    """With few rows of every class a client, every seed is above the same networks alone."""
    ours, local = reached(Named(NAME, options)), reached_alone()
    assert all(a > b for a, b in zip(ours, local, strict=True)) and mean(ours) > mean(local) + 0.01

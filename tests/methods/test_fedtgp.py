"""FedTGP: the server's loss and margin against a few lines of their own, its steps against plain
torch, traps, and learning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import nestling
from nestling import FleetConfig, InputError, Named, SplitConfig, Tier
from nestling.message import faults
from nestling.methods.baselines.local import Local
from nestling.methods.representation.class_table import STATISTICS
from nestling.methods.representation.fedproto import FedProto
from nestling.methods.representation.fedtgp import FedTGP, contrast, margin
from nestling.models.prototypes import Prototypes
from nestling.training.distiller import rows_of
from tests.methods.by_class import (
    MIXED,
    SHOTS,
    few_shots_alone,
    held,
    known_after,
    one_round,
    resumes,
    same_on_every_engine,
)
from tests.methods.learning import mean
from tests.methods.mixed import unlike
from tests.small import small

NAME = "nestling.methods.representation.fedtgp:FedTGP"
THREE = SplitConfig(kind="classes", classes=3, size=60)


def by_hand(x: Tensor, y: Tensor, prototypes: Tensor, delta: float) -> Tensor:
    """−log of the share of a row's own prototype, whose distance counts δ more."""
    total = torch.zeros(())
    for p, label in zip(x, y, strict=True):
        far = [torch.linalg.norm(p - g) for g in prototypes]
        wanted = torch.exp(-(far[label] + delta))
        rest = sum(torch.exp(-d) for k, d in enumerate(far) if k != int(label))
        total = total - torch.log(wanted / (wanted + rest))
    return total / len(x)


def test_the_servers_loss_by_hand() -> None:
    torch.manual_seed(0)
    x, y, g = torch.randn(6, 4), torch.tensor([0, 1, 1, 2, 4, 0]), torch.randn(5, 4)
    for delta in (0.0, 0.7, 3.0):
        assert torch.allclose(
            contrast(x, y, g, torch.tensor(delta)).mean(), by_hand(x, y, g, delta), rtol=1e-5
        )


def test_the_margin_by_hand() -> None:
    """Of three classes on a line at 0, 1 and 5 the loneliest is 4 from its neighbour; one that
    nobody told of does not count."""
    centres, known = (
        torch.tensor([[0.0, 0], [9.0, 9], [1.0, 0], [5.0, 0]]),
        torch.tensor([True, False, True, True]),
    )
    assert margin(centres, known, 100.0) == 4.0 and margin(centres, known, 2.5) == 2.5
    assert margin(centres, torch.tensor([True, False, False, False]), 100.0) == 100.0


def test_a_prototype_that_is_met_exactly_has_a_finite_gradient() -> None:
    g = torch.randn(3, 4, requires_grad=True)
    contrast(g.detach()[:1], torch.tensor([0]), g, torch.tensor(1.0)).sum().backward()
    assert g.grad is not None and bool(torch.isfinite(g.grad).all())


@pytest.mark.parametrize("batch", [5, 100])
def test_the_prototypes_are_what_plain_torch_makes_of_the_clients(batch: int) -> None:
    federation, replies, _ = one_round(
        FedTGP(size=8, epochs=10, server_lr=0.05, server_batch=batch, threshold=1.0), split=THREE
    )
    method, x = federation.method, torch.cat([r.message[STATISTICS]["features"] for r in replies])
    y = torch.tensor([label for r in replies for label in r.message.facts["classes"]])
    network = Prototypes(10, 8, 8)
    network.load_state_dict(method.trained)
    centres = {c: x[y == c].mean(0) for c in set(y.tolist())}
    delta = min(
        1.0,
        max(
            min(float((a - b).norm()) for k, b in centres.items() if k != c)
            for c, a in centres.items()
        ),
    )
    assert delta > 0
    optimiser, steps = torch.optim.SGD(network.parameters(), lr=0.05), 10 * -(-len(x) // batch)
    for _, rows in zip(
        range(steps), rows_of(len(x), batch, federation.world.seed, "fedtgp", 1), strict=False
    ):
        optimiser.zero_grad()
        by_hand(x[rows], y[rows], network(), delta).backward()
        optimiser.step()
    method.merge(replies, 1)
    for name, tensor in network.state_dict().items():
        assert torch.allclose(method.trained[name], tensor, atol=1e-4), name
    told = sorted(set(y.tolist()))
    assert method.table.known.nonzero().flatten().tolist() == told
    assert torch.allclose(method.table.rows["features"][told], network().detach()[told], atol=1e-4)


def test_training_puts_classes_further_apart_than_their_means_are() -> None:
    federation, replies, _ = one_round(FedTGP(size=8, epochs=300, server_lr=0.05), split=THREE)
    method = federation.method
    method.merge(replies, 1)
    x = torch.cat([r.message[STATISTICS]["features"] for r in replies])
    y = torch.tensor([label for r in replies for label in r.message.facts["classes"]])
    means, known = torch.stack([x[y == c].mean(0) for c in y.unique()]), y.unique()
    trained = method.table.rows["features"][known]
    assert torch.pdist(trained).min() > torch.pdist(means).min()


def test_classes_nobody_told_of_stay_unknown_and_known_ones_stay_known() -> None:
    federation, replies, _ = one_round(FedTGP(size=8, epochs=3), split=THREE)
    method, world = federation.method, federation.world
    method.merge(replies, 1)
    before = method.table
    known = before.known.nonzero().flatten().tolist()
    assert (
        known == sorted({c for r in replies for c in r.message.facts["classes"]})
        and len(known) < 10
    )
    assert not bool(before.rows["features"][~before.known].any())
    assert (
        method.send(world.device(0), method.piece(world.device(0), 2), 2).facts["classes"] == known
    )
    method.merge(replies[:1], 2)
    assert torch.equal(method.table.known, before.known)
    after = method.table
    method.merge([], 3)
    assert method.table is after


def test_without_its_pull_it_is_training_alone() -> None:
    """Bit for bit, whatever the server trains."""
    deep = Tier(name="deep", model="mlp", model_options={"hidden": [24, 16]}, count=2)
    tiers = (deep, Tier(name="flat", model="mlp", model_options={"hidden": [16]}, count=2))
    run = {"fleet": FleetConfig(tiers=tiers), "participants": 4}
    ours, floor = (
        nestling.run(small(m, **run)).federation for m in (FedTGP(lam=0.0, epochs=2), Local())
    )
    for client in range(4):
        a, b = (f.world.store.get(client) for f in (ours, floor))
        assert a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())


def test_the_first_round_is_fedprotos_and_bytes_are() -> None:
    run = {"fleet": MIXED, "participants": 4, "split": THREE}
    ours, proto = (
        nestling.run(small(m, **run))
        for m in (FedTGP(size=8, epochs=2), FedProto(size=8, weighting="uniform"))
    )
    told, known = (
        sum(held(ours.federation, c) for c in range(4)),
        known_after(ours.federation, range(4)),
    )
    for row, other in zip(ours.metrics, proto.metrics, strict=True):
        assert (row["bytes_up"], row["bytes_down"]) == (other["bytes_up"], other["bytes_down"])
    assert (
        ours.metrics[1]["bytes_up"] == 4 * 8 * told
        and ours.metrics[1]["bytes_down"] == 4 * 4 * 8 * known
    )
    assert (
        ours.metrics[0]["loss"] == proto.metrics[0]["loss"]
        and ours.metrics[1]["loss"] != proto.metrics[1]["loss"]
    )


def test_one_client_with_one_class() -> None:
    fleet = FleetConfig(
        tiers=(Tier(name="one", model="mlp", model_options={"hidden": [16]}, count=1),)
    )
    split = SplitConfig(kind="classes", classes=1, size=30)
    federation = nestling.run(
        small(FedTGP(epochs=5), fleet=fleet, participants=1, split=split, rounds=3)
    ).federation
    assert int(federation.method.table.known.sum()) == 1
    assert all(bool(torch.isfinite(t).all()) for t in federation.method.trained.values())


def test_a_client_that_tells_nonsense_is_refused() -> None:
    federation, replies, _ = one_round(FedTGP(size=8), clients=[0], split=THREE)
    method, reply = federation.method, replies[0]
    with pytest.raises(InputError, match="classes"):
        method.returned(reply.piece, reply.sent, {"samples": 1, "classes": [3, 1]})
    assert faults(reply.message, method.expects(reply.piece, reply.sent)) is None
    fewer = method.returned(
        reply.piece, reply.sent, {"classes": reply.message.facts["classes"][:1]}
    )
    assert "expected" in str(faults(reply.message, method.expects(fewer, reply.sent)))


def test_every_engine_gives_the_same() -> None:
    same_on_every_engine(FedTGP(size=8, epochs=5), engines=("cohort", "pool"))


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    resumes(Named(NAME, {"size": 8, "epochs": 5}), tmp_path)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"lam": -1.0}, "lam"),
        ({"threshold": -1.0}, "threshold"),
        ({"epochs": -1}, "epochs"),
        ({"server_lr": 0.0}, "server_lr"),
        ({"server_batch": 0}, "server_batch"),
        ({"hidden": -1}, "hidden"),
        ({"weighting": "rows"}, "weighting"),
    ],
)
def test_bad_settings_are_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(InputError, match=f"method.{field}"):
        small(Named(NAME, options)).make_method()


@pytest.mark.slow
def test_trained_prototypes_help_unlike_networks_learn() -> None:
    """With three classes and twenty rows a client the mean of the seeds is above the same networks
    alone (not every seed is), and level with FedProto's."""
    ours, local = unlike(FedTGP(), **SHOTS), few_shots_alone()
    assert mean(ours) > mean(local) + 0.005

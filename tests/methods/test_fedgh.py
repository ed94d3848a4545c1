"""FedGH: the header against plain torch, what travels, traps, and learning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nestling
from nestling import FleetConfig, InputError, Named, SplitConfig, Tier
from nestling.message import faults
from nestling.methods.baselines.local import Local
from nestling.methods.heads import head_of
from nestling.methods.representation.class_table import STATISTICS
from nestling.methods.representation.common_head import HEAD
from nestling.methods.representation.fedgh import FedGH
from nestling.methods.representation.prototypes import gathered, passes
from nestling.training.distiller import rows_of
from tests.methods.by_class import (
    MIXED,
    SHOTS,
    few_shots_alone,
    held,
    one_round,
    resumes,
    same_on_every_engine,
)
from tests.methods.learning import mean
from tests.methods.mixed import unlike
from tests.small import small

NAME = "nestling.methods.representation.fedgh:FedGH"
THREE = SplitConfig(kind="classes", classes=3, size=60)


def by_torch(
    head: dict[str, Tensor], x: Tensor, y: Tensor, method: FedGH, round: int, seed: int
) -> nn.Linear:
    """The header as a loop over torch's own parts makes it."""
    layer = nn.Linear(x.shape[1], 10)
    layer.load_state_dict(head)
    optimiser = torch.optim.SGD(layer.parameters(), lr=method.server_lr)
    steps = method.epochs * -(-len(x) // method.server_batch)
    for _, rows in zip(
        range(steps), rows_of(len(x), method.server_batch, seed, "fedgh", round), strict=False
    ):
        optimiser.zero_grad()
        F.cross_entropy(layer(x[rows]), y[rows]).backward()
        optimiser.step()
    return layer


@pytest.mark.parametrize("batch", [5, 7, 100])
def test_the_header_is_what_plain_torch_makes_of_the_prototypes(batch: int) -> None:
    federation, replies, _ = one_round(
        FedGH(size=8, epochs=20, server_lr=0.1, server_batch=batch), split=THREE
    )
    method, before = federation.method, dict(federation.method.head)
    x = torch.cat([r.message[STATISTICS]["features"] for r in replies])
    y = torch.tensor([label for r in replies for label in r.message.facts["classes"]])
    assert x.shape == (12, 8)
    method.merge(replies, 3)
    layer = by_torch(before, x, y, method, 3, federation.world.seed)
    for name, tensor in layer.state_dict().items():
        assert torch.allclose(method.head[name], tensor, atol=1e-5) and not torch.equal(
            method.head[name], before[name]
        )
    first = by_torch(before, x, y, method, 4, federation.world.seed)
    # every round has an order of its own
    assert batch == 100 or not torch.equal(first.weight, layer.weight)


def test_passes_meet_every_row_once_and_fill_up_what_is_short() -> None:
    x, y = torch.arange(7.0)[:, None], torch.arange(7)
    found = list(passes(x, y, 2, 3, 0, "test"))
    assert len(found) == 6 and {len(rows) for rows, _, _ in found} == {3}
    for epoch in (found[:3], found[3:]):
        assert sorted(int(v) for rows, _, counts in epoch for v in rows[counts]) == list(range(7))
        assert all(torch.equal(rows[:, 0].long(), labels) for rows, labels, _ in epoch)
    assert list(passes(x, y, 0, 3, 0, "test")) == []


def test_the_header_learns_classes_that_a_client_does_not_hold() -> None:
    federation, replies, clients = one_round(FedGH(size=8, epochs=400, server_lr=0.5), split=THREE)
    x, y = gathered(replies, "features", torch.device("cpu"))
    strange = torch.tensor([int(label) not in {int(c) for c in clients[0].y} for label in y])
    assert len(y[strange].unique()) >= 3

    def right() -> float:
        head = federation.method.head
        said = F.linear(x[strange], head["weight"], head["bias"]).argmax(1)
        return float((said == y[strange]).float().mean())

    before = right()
    federation.method.merge(replies, 1)
    assert right() > before + 0.3


def test_without_server_training_the_classifier_stays() -> None:
    """... and a first round is training alone, where networks begin with the same classifier."""
    fleet = FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=4),))
    run = {"fleet": fleet, "participants": 4}
    still, local = (
        nestling.run(small(m, rounds=1, **run)).federation for m in (FedGH(epochs=0), Local())
    )
    for client in range(4):
        a, b = (f.world.store.get(client) for f in (still, local))
        assert a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())
    initial = head_of(still.world.main.initial, "head")
    assert all(torch.equal(t, initial[name]) for name, t in still.method.head.items())


def test_one_client_and_rounds_in_which_nobody_answers() -> None:
    federation, replies, _ = one_round(FedGH(size=8), clients=[0], split=THREE)
    method, before = federation.method, dict(federation.method.head)
    method.merge([], 1)
    assert all(torch.equal(t, before[name]) for name, t in method.head.items())
    method.merge(replies, 2)
    assert all(bool(torch.isfinite(t).all()) for t in method.head.values())
    moved = (method.head["bias"] - before["bias"]) > 0
    # nobody's classes are never asked for
    assert moved.nonzero().flatten().tolist() == replies[0].message.facts["classes"]


def test_bytes_are_prototypes_up_and_the_classifier_down() -> None:
    result = nestling.run(small(FedGH(size=8), fleet=MIXED, participants=4, split=THREE))
    told = sum(held(result.federation, c) for c in range(4))
    for row in result.metrics:
        assert row["bytes_up"] == 4 * 8 * told and row["bytes_down"] == 4 * 4 * 10 * (8 + 1)


def test_both_ways_to_decide_are_reported() -> None:
    run = {"fleet": MIXED, "participants": 2, "split": THREE}
    by_common, by_own = (
        nestling.run(small(FedGH(predict=way), **run)).summary for way in ("common", "own")
    )
    for kind in ("global_score", "personal_score"):
        assert by_common["others"]["by own head"][kind] == by_own[kind]["last"]
        assert by_own["others"]["by common head"][kind] == by_common[kind]["last"]


def test_a_client_that_tells_nonsense_is_refused() -> None:
    federation, replies, _ = one_round(FedGH(size=8), clients=[0], split=THREE)
    method, reply = federation.method, replies[0]
    with pytest.raises(InputError, match="classes"):
        method.returned(reply.piece, reply.sent, {"samples": 1, "classes": [10]})
    assert (
        set(reply.sent.parts) == {HEAD}
        and faults(reply.message, method.expects(reply.piece, reply.sent)) is None
    )
    fewer = method.returned(
        reply.piece, reply.sent, {"classes": reply.message.facts["classes"][:1]}
    )
    assert "expected" in str(faults(reply.message, method.expects(fewer, reply.sent)))


def test_every_engine_gives_the_same() -> None:
    same_on_every_engine(FedGH(size=8), engines=("cohort", "pool"))


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    resumes(Named(NAME, {"size": 8}), tmp_path)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"size": -1}, "size"),
        ({"epochs": -1}, "epochs"),
        ({"server_lr": 0.0}, "server_lr"),
        ({"server_batch": 0}, "server_batch"),
        ({"predict": "luck"}, "predict"),
    ],
)
def test_bad_settings_are_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(InputError, match=f"method.{field}"):
        small(Named(NAME, options)).make_method()


@pytest.mark.slow
def test_a_global_header_helps_unlike_networks_learn() -> None:
    """With three classes and twenty rows a client the mean of the seeds is above the same networks
    alone (not every seed is)."""
    ours, local = unlike(FedGH(), **SHOTS), few_shots_alone()
    assert mean(ours) > mean(local) + 0.005

"""LG-FedAvg: the common classifier, the bodies that stay, where it is FedAvg or training alone, and
learning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nestling
from nestling import FleetConfig, InputError, Named, SplitConfig, Tier
from nestling.message import Message, faults
from nestling.methods.baselines.fedavg import FedAvg
from nestling.methods.baselines.local import Local
from nestling.methods.heads import common_head, head_of
from nestling.methods.personal import own_weights
from nestling.methods.representation.common_head import HEAD
from nestling.methods.representation.lgfedavg import LGFedAvg
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
from tests.methods.exchange import reached
from tests.methods.learning import mean
from tests.methods.mixed import unlike
from tests.small import small

NAME = "nestling.methods.representation.lgfedavg:LGFedAvg"
EQUAL = FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=4),))
ALONE = FleetConfig(tiers=(Tier(name="one", model="mlp", model_options={"hidden": [16]}, count=1),))
UNEVEN = SplitConfig(kind="quantity", alpha=2.0, min_size=20)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_first_rounds_classifier_is_fedavgs(dropout: float) -> None:
    """Equal networks begin alike, so that after one round the classifier is FedAvg's bit for bit,
    unequal sizes and all."""
    fleet = FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=6, dropout=dropout),))
    run = {"fleet": fleet, "participants": 6, "rounds": 1, "split": UNEVEN}
    ours, whole = (
        nestling.run(small(method, **run)).federation for method in (LGFedAvg(), FedAvg())
    )
    assert (0 < len(ours.world.store.clients()) < 6) == bool(dropout)
    for name, tensor in head_of(whole.method.weights, "head").items():
        assert torch.equal(ours.method.head[name], tensor)


def test_one_client_is_training_alone() -> None:
    ours, local = (
        nestling.run(small(m, fleet=ALONE, participants=1, rounds=3)).federation
        for m in (LGFedAvg(), Local())
    )
    a, b = (f.world.store.get(0) for f in (ours, local))
    assert a.keys() == b.keys() and all(torch.equal(t, b[name]) for name, t in a.items())
    models = [f.method.model_for(f.world.device(0)).state for f in (ours, local)]
    assert all(torch.equal(t, models[1][name]) for name, t in models[0].items())


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_merge_is_the_mean_of_classifiers_and_bodies_stay(weighting: str) -> None:
    federation, replies, clients = one_round(LGFedAvg(weighting=weighting), split=UNEVEN)
    federation.method.merge(replies, 1)
    shares = [r.samples if weighting == "samples" else 1 for r in replies]
    assert len({r.samples for r in replies}) > 1
    for name, tensor in federation.method.head.items():
        expected = sum(
            r.message[HEAD][name].double() * s for r, s in zip(replies, shares, strict=True)
        ) / sum(shares)
        assert torch.allclose(tensor.double(), expected, atol=1e-7)
    for reply, client in zip(replies, clients, strict=True):
        assert set(reply.message.parts) == {HEAD}
        start = federation.method.start(client, Message({HEAD: federation.method.head}))
        head = client.reference.taps.head
        for name, tensor in start.items():
            common = (
                federation.method.head[name.removeprefix(f"{head}.")]
                if name.startswith(f"{head}.")
                else None
            )
            assert torch.equal(tensor, client.weights[name] if common is None else common)


def test_nobody_answers_and_nothing_changes() -> None:
    federation, _, _ = one_round(LGFedAvg(), clients=[])
    before = dict(federation.method.head)
    federation.method.merge([], 1)
    assert all(torch.equal(t, before[name]) for name, t in federation.method.head.items())


def test_bytes_are_those_of_classifiers() -> None:
    result = nestling.run(small(LGFedAvg(size=8), fleet=MIXED, participants=4))
    for row in result.metrics:
        assert row["bytes_up"] == row["bytes_down"] == 4 * 4 * 10 * (8 + 1)


def test_what_a_client_decides_with() -> None:
    """The common classifier as it is now, also for who has not been asked yet; its own, for who has
    one."""
    run = {"fleet": MIXED, "participants": 2, "rounds": 1}
    by_common, by_own = (
        nestling.run(small(LGFedAvg(predict=way), **run)) for way in ("common", "own")
    )
    for result, way in ((by_common, "common"), (by_own, "own")):
        federation = result.federation
        asked = federation.world.store.clients()
        assert len(asked) == 2
        for client in range(4):
            model = federation.method.model_for(federation.world.device(client))
            found = head_of(model.state, model.reference.taps.head)
            own = way == "own" and client in asked
            wanted = (
                head_of(own_weights(federation.world.store.get(client)), model.reference.taps.head)
                if own
                else federation.method.head
            )
            assert all(torch.equal(t, wanted[name]) for name, t in found.items())
    for kind in ("global_score", "personal_score"):
        assert by_common.summary["others"]["by own head"][kind] == by_own.summary[kind]["last"]


def test_classifiers_of_more_than_one_form_are_refused() -> None:
    with_bias, without = (
        Reference(
            name,
            torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10, bias=bias)),
            (1, 28, 28),
        )
        for name, bias in (("a", True), ("b", False))
    )
    with pytest.raises(InputError, match="more than one form"):
        common_head([Piece(with_bias, with_bias.full), Piece(without, without.full)])


def test_a_client_that_answers_in_another_shape_is_refused() -> None:
    federation, replies, _ = one_round(LGFedAvg(size=8), clients=[0])
    reply, method = replies[0], federation.method
    assert faults(reply.message, method.expects(reply.piece, reply.sent)) is None
    narrow = {name: t[..., :4] for name, t in reply.message[HEAD].items()}
    for wrong in (Message({}, reply.message.facts), Message({HEAD: narrow}, reply.message.facts)):
        assert faults(wrong, method.expects(reply.piece, reply.sent)) is not None


def test_every_engine_gives_the_same() -> None:
    same_on_every_engine(LGFedAvg(size=8), engines=("cohort", "pool"))


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    resumes(Named(NAME, {"size": 8}), tmp_path)


@pytest.mark.parametrize(
    ("options", "field"),
    [({"size": -1}, "size"), ({"weighting": "x"}, "weighting"), ({"predict": "x"}, "predict")],
)
def test_bad_settings_are_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(InputError, match=f"method.{field}"):
        small(Named(NAME, options)).make_method()


@pytest.mark.slow
def test_a_common_classifier_helps_unlike_networks_learn() -> None:
    """With three classes and twenty rows a client the mean of the seeds is above the same networks
    alone (not every seed is)."""
    ours, local = unlike(LGFedAvg(), **SHOTS), few_shots_alone()
    assert mean(ours) > mean(local) + 0.005


@pytest.mark.slow
def test_a_common_classifier_does_not_suit_bodies_of_every_kind() -> None:
    """An MLP, a CNN and a depth-wise CNN: the same networks alone, pooled to as many features, are
    better."""
    assert mean(reached(LGFedAvg())) < mean(reached(Local(size=16)))

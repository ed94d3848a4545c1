"""FedMD: what travels, in which order clients are asked and told, what they learn from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import nestling
from nestling import InputError, SplitConfig
from nestling.message import Message
from nestling.methods.distill.fedmd import FedMD
from nestling.methods.method import Reply
from nestling.training.client import train_client
from nestling.training.distiller import logits_of
from nestling.training.objectives import Batch, Net
from tests.methods.exchange import (
    CLASSES,
    client_at,
    federation_of,
    few,
    goes_on_where_it_stood,
    inputs_of,
    reached,
    reached_alone,
    same_in_a_cohort,
    same_models,
)
from tests.methods.mixed import clearly_above

PUBLIC = 100


def test_logits_travel_both_ways_and_labels_once() -> None:
    rows = nestling.run(few(FedMD(align=50, pretrain=1), rounds=3)).metrics
    assert [row["bytes_up"] for row in rows] == [5 * 50 * CLASSES * 4] * 3
    assert [row["bytes_down"] for row in rows] == [
        5 * PUBLIC,
        5 * 50 * CLASSES * 4,
        5 * 50 * CLASSES * 4,
    ]
    bare = nestling.run(few(FedMD(align=50, pretrain=0))).metrics
    assert [row["bytes_down"] for row in bare] == [0, 5 * 50 * CLASSES * 4]
    whole = nestling.run(few(FedMD(pretrain=0))).metrics
    assert whole[-1]["bytes_down"] == whole[-1]["bytes_up"] == 5 * PUBLIC * CLASSES * 4


def test_labels_travel_until_a_client_has_answered() -> None:
    federation = federation_of(FedMD(align=50))
    method, world = federation.method, federation.world
    for _ in range(2):  # nobody answered
        client, sent = client_at(federation, 0)
        assert "labels" in sent and len(method.phases(client, sent)) == 2
        method.merge([], 1)
    said = Message({"logits": {"logits": torch.zeros(50, CLASSES)}}, {"samples": 40})
    device = world.device(0)
    method.merge([Reply(device, method.piece(device, 2), sent, said)], 2)
    assert (
        "labels" not in client_at(federation, 0, 3)[1]
        and "labels" in client_at(federation, 1, 3)[1]
    )


def test_a_client_that_has_its_weights_does_not_start_again() -> None:
    """Its answer came too late, so that the server still sends labels."""
    federation = federation_of(FedMD(align=50))
    client, sent = client_at(federation, 0)
    client.weights = federation.method.start(client, sent)
    federation.method.reply(client, sent)
    assert client.memory and len(federation.method.phases(client, sent)) == 1


def test_the_consensus_is_the_mean_of_the_models_as_they_are() -> None:
    """On the rows that the next round is about, which are other rows than the last round's."""
    federation = nestling.run(few(FedMD(align=50, pretrain=1))).federation
    method, world = federation.method, federation.world
    sent = [client_at(federation, k, round=3)[1] for k in range(5)]
    assert all(message is sent[0] for message in sent)
    said = []
    for k in range(5):
        model = method.model_for(world.device(k))
        said.append(
            logits_of(
                model.reference.network(model.view, model.state),
                inputs_of(federation, sent[0].facts["rows"]),
            )
        )
    assert torch.allclose(sent[0]["consensus"]["logits"], torch.stack(said).mean(0), atol=1e-5)
    assert not torch.equal(
        inputs_of(federation, sent[0].facts["rows"]), inputs_of(federation, sent[0].facts["next"])
    )


def test_what_a_reply_is_about_is_what_the_next_message_is_about() -> None:
    federation = federation_of(FedMD(align=50, pretrain=0))
    first = client_at(federation, 0, 1)[1]
    device = federation.world.device(0)
    said = Message({"logits": {"logits": torch.ones(50, CLASSES)}}, {"samples": 40})
    federation.method.merge([Reply(device, federation.method.piece(device, 1), first, said)], 1)
    second = client_at(federation, 0, 2)[1]
    assert second.facts["rows"] == first.facts["next"] != second.facts["next"]
    federation.method.merge([], 2)  # nobody answers: what is known stays, with its rows
    third = client_at(federation, 0, 3)[1]
    assert third.facts["rows"] == second.facts["rows"] and torch.equal(
        third["consensus"]["logits"], second["consensus"]["logits"]
    )


def test_digest_is_the_absolute_error_of_raw_logits() -> None:
    federation = nestling.run(
        few(FedMD(align=50, pretrain=1, digest=20, digest_lr=0.01), rounds=1)
    ).federation
    client, sent = client_at(federation, 4, 2)
    client.weights = federation.method.start(client, sent)
    digest, revisit = federation.method.phases(client, sent)
    x, consensus = inputs_of(federation, sent.facts["rows"]), sent["consensus"]["logits"]

    def error() -> float:
        return float(
            (logits_of(client.reference.network(client.view, client.weights), x) - consensus)
            .abs()
            .mean()
        )

    module = client.reference.network(client.view, client.weights)
    batch = Batch(x[10:30], torch.zeros(20, dtype=torch.int64), torch.arange(10, 30))
    by_hand = (module(batch.x) - consensus[10:30]).abs().mean()
    assert torch.allclose(digest.objective(Net(module, {}), batch, digest.given), by_hand)
    before = error()
    train_client(client, digest, 0)
    assert error() < 0.7 * before
    assert revisit.source == "private" and digest.augment == "none" and digest.source == "public"


@pytest.mark.parametrize(("align", "batch", "epochs"), [(50, 256, 20), (50, 16, 5), (7, 2, 5)])
def test_digest_is_counted_in_steps_however_few_rows_there_are(
    align: int, batch: int, epochs: int
) -> None:
    federation = nestling.run(
        few(FedMD(align=align, pretrain=0, digest_batch=batch), rounds=1)
    ).federation
    client, sent = client_at(federation, 4, 2)
    client.weights = federation.method.start(client, sent)
    digest = federation.method.phases(client, sent)[0]
    assert digest.epochs == epochs and train_client(client, digest, 0).steps == 20


def test_the_start_is_supervised_by_the_public_labels() -> None:
    federation = federation_of(FedMD(align=50, pretrain=30))
    world = federation.world
    assert world.public is not None and world.public_labels is not None
    client, sent = client_at(federation, 4)
    client.weights = federation.method.start(client, sent)
    start = federation.method.phases(client, sent)[0]
    train_client(client, start, 0)
    said = logits_of(client.reference.network(client.view, client.weights), world.public)
    assert float((said.argmax(1) == world.public_labels).float().mean()) > 0.6
    assert F.cross_entropy(said, world.public_labels) < 1.5


def test_who_never_took_part_has_its_first_network() -> None:
    federation = nestling.run(few(FedMD(align=20, pretrain=1), participants=1, rounds=1)).federation
    fresh = [k for k in range(5) if not federation.world.store.get(k)]
    assert len(fresh) == 4
    for k in fresh:
        model = federation.method.model_for(federation.world.device(k))
        first = model.view.extract(model.reference.initial)
        assert all(torch.equal(model.state[name], t) for name, t in first.items())


def test_it_says_what_it_needs() -> None:
    with pytest.raises(InputError, match="public") as caught:
        federation_of(FedMD(), split=SplitConfig(size=40, public=0.0))
    assert caught.value.field == "split.public"
    for field, value in {
        "align": 0,
        "pretrain": -1,
        "digest": -1,
        "digest_batch": 0,
        "digest_lr": 0.0,
    }.items():
        with pytest.raises(InputError) as caught:
            FedMD(**{field: value})
        assert caught.value.field == f"method.{field}"


def test_without_labels_and_consensus_it_is_training_alone() -> None:
    ours, local = (
        nestling.run(few(m, rounds=3)).federation for m in (FedMD(pretrain=0, digest=0), "local")
    )
    same_models(ours, local, 0.0)


def test_a_run_goes_on_where_it_stood(tmp_path: Path) -> None:
    goes_on_where_it_stood(FedMD(align=30, pretrain=1), tmp_path)


def test_a_stack_gives_the_same() -> None:
    same_in_a_cohort(FedMD(align=50, pretrain=1))


@pytest.mark.slow
def test_it_learns_more_than_clients_alone() -> None:
    """By the public labels for the most part: the consensus of nine small models adds little in so
    few rounds."""
    assert clearly_above(reached(FedMD(pretrain=10, digest_batch=32)), reached_alone())

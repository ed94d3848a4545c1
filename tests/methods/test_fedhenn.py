"""FedHeNN: the alignment of kernels, where it is taken, and what travels."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fedhenn_alignment import alignment, experiment

import nestling
from nestling import InputError, Named, SplitConfig
from nestling.message import Message
from nestling.methods.method import Reply
from nestling.methods.representation.fedhenn import FedHeNN, cka, linear_kernel
from nestling.models.taps import logits_and_features
from nestling.training.client import train_client
from nestling.training.objectives import Batch, Net
from tests.methods.exchange import (
    client_at,
    federation_of,
    few,
    goes_on_where_it_stood,
    inputs_of,
    same_in_a_cohort,
)

RAD = 40


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_kernel_is_aligned_with_itself() -> None:
    kernel = linear_kernel(drawn(30, 7))
    assert float(cka(kernel, kernel)) == pytest.approx(1.0)
    assert float(cka(kernel, linear_kernel(drawn(30, 7, seed=1)))) < 0.6


def test_alignment_does_not_see_rotation_scale_or_shift_of_features() -> None:
    a, b = drawn(30, 7), drawn(30, 12, seed=1)
    turn = torch.linalg.qr(drawn(7, 7, seed=2))[0]
    plain = float(cka(linear_kernel(a), linear_kernel(b)))
    assert 0 < plain < 1
    for changed in (a @ turn, 3.7 * a, a + drawn(1, 7, seed=3)):
        assert float(cka(linear_kernel(changed), linear_kernel(b))) == pytest.approx(plain)
    stretched = a @ torch.diag(torch.arange(1.0, 8.0, dtype=torch.float64))
    assert float(cka(linear_kernel(stretched), linear_kernel(b))) != pytest.approx(plain, rel=1e-3)


def test_alignment_is_that_of_the_definition() -> None:
    one, other = linear_kernel(drawn(20, 5)), linear_kernel(drawn(20, 3, seed=1))
    centre = torch.eye(20, dtype=torch.float64) - 1 / 20
    k, m = centre @ one @ centre, centre @ other @ centre
    assert float(cka(one, other)) == pytest.approx(float((k * m).sum() / (k.norm() * m.norm())))


def test_features_that_say_nothing_have_a_gradient_without_nan() -> None:
    a = torch.zeros(10, 4, requires_grad=True)
    found = cka(linear_kernel(torch.randn(10, 3)), linear_kernel(a))
    assert float(found.detach()) == 0 and torch.isfinite(torch.autograd.grad(found, a)[0]).all()


def test_kernels_travel_both_ways() -> None:
    rows = nestling.run(few(FedHeNN(align=RAD), rounds=3)).metrics
    assert [row["bytes_up"] for row in rows] == [5 * RAD * RAD * 4] * 3
    assert [row["bytes_down"] for row in rows] == [0, 5 * RAD * RAD * 4, 5 * RAD * RAD * 4]


def test_the_mean_kernel_is_of_the_models_as_they_are_on_the_next_rounds_inputs() -> None:
    federation = nestling.run(few(FedHeNN(align=RAD))).federation
    sent = [client_at(federation, k, 3)[1] for k in range(5)]
    assert all(message is sent[0] for message in sent)
    x, kernels = inputs_of(federation, sent[0].facts["rows"]), []
    for k in range(5):
        model = federation.method.model_for(federation.world.device(k))
        module = model.reference.network(model.view, model.state).eval()
        kernels.append(
            linear_kernel(logits_and_features(module, model.reference.taps.head, x)[1]).detach()
        )
    assert torch.allclose(
        sent[0]["kernel"]["kernel"], torch.stack(kernels).mean(0), rtol=1e-4, atol=1e-4
    )
    assert not torch.equal(x, inputs_of(federation, sent[0].facts["next"]))


def test_the_loss_and_its_weight() -> None:
    """Cross-entropy + η₀·√t·(1 − CKA), in which the received kernel has no gradient."""
    federation = nestling.run(few(FedHeNN(align=RAD, eta=0.5), rounds=1)).federation
    client, sent = client_at(federation, 4, 3)
    client.weights = federation.method.start(client, sent)
    (phase,) = federation.method.phases(client, sent)
    module = client.reference.network(client.view, client.weights)
    seen = logits_and_features(
        module, client.reference.taps.head, inputs_of(federation, sent.facts["rows"])
    )[1]
    apart = 1 - cka(sent["kernel"]["kernel"], linear_kernel(seen))
    x, y = client.x[:20], client.y[:20]
    by_hand = F.cross_entropy(module(x), y) + 0.5 * math.sqrt(3) * apart
    got = phase.objective(Net(module, {}), Batch(x, y, torch.arange(20)), phase.given)
    assert 0 < float(apart) < 1 and torch.allclose(got, by_hand, rtol=1e-5)
    assert not any(t.requires_grad for t in phase.given.values())


def test_training_brings_kernels_nearer() -> None:
    federation = nestling.run(few(FedHeNN(align=RAD), rounds=1)).federation
    found = {}
    for eta in (0.0, 5.0):
        federation.method.eta = eta
        client, sent = client_at(federation, 4, 2)
        client.weights = federation.method.start(client, sent)
        for phase in federation.method.phases(client, sent):
            train_client(client, phase, 0)
        module = client.reference.network(client.view, client.weights).eval()
        seen = logits_and_features(
            module, client.reference.taps.head, inputs_of(federation, sent.facts["rows"])
        )[1]
        found[eta] = float(cka(sent["kernel"]["kernel"], linear_kernel(seen)))
    assert found[5.0] > found[0.0] + 0.02


def test_without_weight_it_is_local_training() -> None:
    one, other = (
        nestling.run(few(method, rounds=3)).federation
        for method in (FedHeNN(align=RAD, eta=0.0), "local")
    )
    for client in range(5):
        a, b = (f.method.model_for(f.world.device(client)).state for f in (one, other))
        assert all(torch.allclose(a[name], b[name], atol=1e-6) for name in b)


def test_running_statistics_do_not_see_the_public_inputs() -> None:
    model = Named("tinycnn", {"channels": [8, 16, 16], "norm": "tracked"})
    federation = nestling.run(few(FedHeNN(align=RAD), rounds=1, model=model)).federation
    client, sent = client_at(federation, 4, 2)
    (phase,) = federation.method.phases(client, sent)
    x, y = client.x[:20], client.y[:20]

    def statistics_after(public: torch.Tensor) -> list[torch.Tensor]:
        module = client.reference.network(
            client.view, federation.method.start(client, sent)
        ).train()
        phase.objective(
            Net(module, {}), Batch(x, y, torch.arange(20)), {**phase.given, "public": public}
        )
        assert module.training
        return [t.clone() for t in module.buffers()]

    assert client.public is not None
    one, other = statistics_after(client.public), statistics_after(client.public + 5)
    assert one and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_nobody_answers() -> None:
    federation = federation_of(FedHeNN(align=RAD))
    federation.method.merge([], 1)
    client, sent = client_at(federation, 0, 2)
    assert not sent.parts and len(federation.method.phases(client, sent)) == 1
    device = federation.world.device(0)
    said = Message({"kernel": {"kernel": torch.eye(RAD)}}, {"samples": 40})
    federation.method.merge([Reply(device, federation.method.piece(device, 2), sent, said)], 2)
    known = client_at(federation, 0, 3)[1]
    federation.method.merge([], 3)
    later = client_at(federation, 0, 4)[1]
    assert (
        torch.equal(known["kernel"]["kernel"], torch.eye(RAD))
        and known.facts["rows"] == later.facts["rows"] == sent.facts["next"]
    )


def test_it_says_what_it_needs() -> None:
    with pytest.raises(InputError, match="public") as caught:
        federation_of(FedHeNN(), split=SplitConfig(size=40, public=0.0))
    assert caught.value.field == "split.public"
    for field, value in {"align": 1, "eta": -1.0}.items():
        with pytest.raises(InputError) as caught:
            FedHeNN(**{field: value})
        assert caught.value.field == f"method.{field}"


def test_a_run_goes_on_where_it_stood(tmp_path: Path) -> None:
    goes_on_where_it_stood(FedHeNN(align=30), tmp_path)


def test_a_stack_gives_the_same() -> None:
    same_in_a_cohort(FedHeNN(align=RAD, eta=1.0))


@pytest.mark.slow
def test_clients_come_to_see_the_same_likenesses_and_learn() -> None:
    """What it is for: kernels of unlike networks become alike. More accuracy than that of clients
    alone is not claimed."""
    pulled, free = (nestling.run(experiment(eta, 0)) for eta in (1.0, 0.0))
    assert alignment(pulled) > alignment(free) + 0.1
    assert pulled.summary["personal_score"]["last"] > 0.4

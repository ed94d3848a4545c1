"""Fed-ET: consensus and dissent, the common head, the server's network, bytes, and learning."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import nestling
from nestling import (
    EngineConfig,
    Evaluation,
    FleetConfig,
    InputError,
    Named,
    SplitConfig,
    Tier,
    Train,
)
from nestling.devices.fit import exceeded
from nestling.methods.distill.fedet import FedET, consensus, server_loss
from nestling.runs.assemble import assemble
from nestling.training.distiller import logits_of
from nestling.views import Contribution, merge
from tests.methods.learning import SEEDS, experiment, mean
from tests.methods.mixed import SETTING, clearly_above, goes_on_where_it_stood, same_in_a_stack
from tests.methods.test_methods import MIXED, equal, one_round
from tests.small import small

NAME = "nestling.methods.distill.fedet:FedET"


def quick(**options: Any) -> Named:
    return Named(NAME, {"steps": 8, **options})


TEACHERS = torch.tensor(
    [
        [[3.0, 0.0, 0.0], [2.0, 0.0, 0.0]],
        [[0.0, 2.0, 0.0], [3.0, 0.0, 0.0]],
        [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]],
    ]
)
"""Three teachers of two inputs: about the first they disagree, about the second they do not."""


def test_sure_teachers_decide_and_dissenters_are_weighted_among_themselves() -> None:
    label, others, dissent = consensus(TEACHERS, [1, 1, 1])
    # The variances of the first input's logits are 3, 4/3 and 1/3.
    assert label.tolist() == [0, 0] and dissent.tolist() == [True, False]
    assert torch.allclose(others[0], torch.tensor([0.0, 0.8 * 2, 0.2 * 1]), atol=1e-6)
    # One that is sure wins against two that are not, who would win a vote.
    lone = torch.tensor([[[6.0, 0.0]], [[0.0, 1.0]], [[0.0, 1.0]]])
    assert consensus(lone, [1, 1, 1])[0].tolist() == [0]


def test_an_input_without_dissenters_adds_nothing_to_the_divergence() -> None:
    targets = consensus(TEACHERS, [1, 1, 1])
    said = torch.tensor([[0.5, -0.2, 0.1], [-1.0, 2.0, 0.3]])

    def gradient(diversity: float) -> Tensor:
        leaf = said.clone().requires_grad_()
        return torch.autograd.grad(server_loss(leaf, targets, diversity), leaf)[0]

    assert torch.equal(gradient(0.0)[1], gradient(5.0)[1]) and not torch.equal(
        gradient(0.0)[0], gradient(5.0)[0]
    )
    plain = F.cross_entropy(said, torch.tensor([0, 0]))
    kl = F.kl_div(said[:1].log_softmax(-1), targets[1][:1].softmax(-1), reduction="sum") / 2
    assert float(server_loss(said, targets, 0.05)) == pytest.approx(
        float(plain + 0.05 * kl), rel=1e-6
    )


def test_nobody_dissents_or_nobody_says_anything_and_all_stays_finite() -> None:
    for teachers in (TEACHERS[:, 1:], torch.zeros(3, 2, 4)):
        targets = consensus(teachers, [1, 1, 1])
        leaf = torch.randn(teachers.shape[1:]).requires_grad_()
        loss = server_loss(leaf, targets, 0.05)
        assert torch.equal(loss, F.cross_entropy(leaf, targets[0]))
        assert bool(torch.autograd.grad(loss, leaf)[0].isfinite().all())


def heads_of(method: Any) -> dict[str, list[Tensor]]:
    return {
        n: [method.weights[n][f"{r.taps.head}.{p}"] for p in ("weight", "bias")]
        for n, r in method.references.items()
    }


def test_all_networks_have_the_servers_head_before_and_after_a_round() -> None:
    federation, replies = one_round(small(quick(), fleet=MIXED), [0, 1, 2, 3])
    method = federation.method
    assert isinstance(method, FedET)
    for _ in range(2):
        found = heads_of(method)
        server = found[method.server.name]
        assert len(found) == 4 and server[0].shape == (10, method.wide) == (10, 16)
        assert all(
            torch.equal(a, b) for own in found.values() for a, b in zip(own, server, strict=True)
        )
        before, last = server, method.weights
        method.merge(replies, 1)
        assert (
            not torch.equal(heads_of(method)[method.server.name][0], before[0])
            and method.weights is not last
        )


def test_without_steps_it_is_the_average_of_every_architecture_with_the_mean_of_all_heads() -> None:
    federation, replies = one_round(small(quick(steps=0), fleet=MIXED), [0, 1, 2, 3])
    method = federation.method
    assert isinstance(method, FedET)
    start = dict(method.weights[method.server.name])
    method.merge(replies, 1)
    sent = [
        [r.message["weights"][f"{r.piece.reference.taps.head}.{p}"] for r in replies]
        for p in ("weight", "bias")
    ]
    mean = [torch.stack(tensors).double().mean(0).float() for tensors in sent]
    for name, reference in method.references.items():
        own = [
            Contribution(r.piece.view, r.message["weights"])
            for r in replies
            if r.piece.reference is reference
        ]
        expected = dict(merge(reference.initial, own))
        at = reference.taps.head
        for part, tensor in zip(("weight", "bias"), mean, strict=True):
            assert torch.equal(method.weights[name].pop(f"{at}.{part}"), tensor)
            expected.pop(f"{at}.{part}")
        assert equal(dict(method.weights[name]), expected)
    assert all(
        torch.equal(t, start[name]) for name, t in method.weights[method.server.name].items()
    )


def test_means_count_clients_or_their_samples() -> None:
    """The same replies, one of which says that it is of more samples."""
    states = []
    for weighting in ("uniform", "samples"):
        federation, replies = one_round(small(quick(steps=0, weighting=weighting)), [0, 1])
        replies[0].message.facts["samples"] = 3 * replies[1].samples  # type: ignore[index]
        federation.method.merge(replies, 1)
        states.append(federation.method.global_model().state)  # type: ignore[union-attr]
    heads = [r.message["weights"]["head.out.weight"] for r in replies]
    assert torch.allclose(states[0]["head.out.weight"], (heads[0] + heads[1]) / 2)
    assert torch.allclose(states[1]["head.out.weight"], (3 * heads[0] + heads[1]) / 4)


def test_the_server_learns_what_the_clients_agree_on() -> None:
    federation, replies = one_round(
        small(FedET(lr=0.02), split=SplitConfig(kind="iid", size=200)), [0, 1, 2, 3]
    )
    method, public = federation.method, federation.world.public
    assert isinstance(method, FedET) and public is not None
    said = [
        logits_of(r.piece.reference.network(r.piece.view, r.message["weights"]), public)
        for r in replies
    ]
    label = consensus(torch.stack(said), [1] * 4)[0]

    def agreement() -> float:
        model = method.global_model()
        return float(
            (logits_of(method.server.network(model.view, model.state), public).argmax(-1) == label)
            .float()
            .mean()
        )

    before = agreement()
    method.merge([], 1)
    assert agreement() == before
    method.merge(replies, 1)
    assert agreement() > max(0.5, before + 0.2)


def test_tiers_of_one_width_are_one_architecture_and_own_networks_are_not() -> None:
    tiers = (
        Tier(name="a", ratio=0.5, count=1),
        Tier(name="b", ratio=0.5, count=1),
        Tier(name="c", model="mlp", model_options={"hidden": [16]}, count=1),
        Tier(name="d", model="mlp", model_options={"hidden": [16]}, count=1),
    )
    _, federation = assemble(small(quick(), fleet=FleetConfig(tiers=tiers)))
    method = federation.method
    assert (
        isinstance(method, FedET)
        and method.pieces["a"] is method.pieces["b"]
        and method.pieces["c"] is not method.pieces["d"]
    )
    assert len(method.references) == 4


def test_a_device_gets_what_fits_it_with_a_larger_head() -> None:
    """On the small board the body must be narrower with a head of many features than without, and
    the whole still fits."""
    board = FleetConfig(tiers=(Tier(name="board", device="stm32l475", count=3),))
    _, federation = assemble(small(quick(features=500), fleet=board, model=Named("tinycnn")))
    method, world = federation.method, federation.world
    assert isinstance(method, FedET)
    plan, own = world.plans["board"], method.pieces["board"].reference.initial
    assert not exceeded(plan.profile, world.cost(method.pieces["board"]), plan.budget)
    assert (
        own["stages.2.conv.weight"].numel()
        < plan.piece.view.extract(world.main.initial)["stages.2.conv.weight"].numel()
    )


def test_without_public_data_it_says_what_it_needs() -> None:
    with pytest.raises(InputError, match=r"split\.public.*above 0"):
        nestling.run(small(quick(), split=SplitConfig(size=60, public=0.0)))


@pytest.mark.parametrize(
    "options",
    [
        {"steps": -1},
        {"batch": 0},
        {"lr": 0.0},
        {"momentum": 1.0},
        {"diversity": -0.1},
        {"features": -1},
        {"weighting": "variance"},
    ],
)
def test_bad_settings_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"method.{next(iter(options))}"):
        FedET(**options)


def test_what_travels_are_the_small_networks() -> None:
    result = nestling.run(small(quick(), fleet=MIXED))
    method, world, size = result.federation.method, result.federation.world, 0
    assert isinstance(method, FedET)
    for row in result.metrics:
        for client in row["clients"]:
            size += 4 * sum(
                t.numel()
                for t in method.piece(world.device(client), 1)
                .reference.module.state_dict()
                .values()
            )
    assert result.summary["bytes_up"] == result.summary["bytes_down"] == size
    assert result.model is not None and result.model(torch.zeros(2, *world.main.shape)).shape == (
        2,
        10,
    )


def test_it_goes_on_where_it_stood(tmp_path: Path) -> None:
    goes_on_where_it_stood(partial(small, quick(), fleet=MIXED), tmp_path)


def test_stacks_of_clients_give_the_same() -> None:
    same_in_a_stack(partial(small, quick(), fleet=MIXED))


LEARNING: dict[str, Any] = {
    **SETTING,
    "split": SplitConfig(kind="iid", size=40, public=0.03),
    "rounds": 15,
    "train": Train(epochs=4, batch=20, optimizer="adam", lr=0.006, decay=1.0),
    "evaluate": Evaluation(every=15, clients=9),
    "engine": EngineConfig("cohort", 1),
}


@pytest.mark.slow
def test_it_beats_training_alone_and_the_server_learns_from_what_clients_say() -> None:
    """No client ever trains the server's network: what it knows it knows from them."""

    def learned(method: Any) -> list[dict[str, Any]]:
        return [nestling.run(experiment(method, seed, **LEARNING)).summary for seed in SEEDS]

    ours, alone = learned(Named(NAME, {"steps": 24, "features": 64})), learned("local")
    personal = [[s["personal_score"]["last"] for s in found] for found in (ours, alone)]
    assert clearly_above(*personal), personal
    # Without steps the server's network has the clients' head on a body that never saw anything.
    never = [
        nestling.run(
            experiment(Named(NAME, {"steps": 0}), SEEDS[0], **{**LEARNING, "rounds": 2})
        ).summary
    ]
    told, untold = ([s["global_score"]["last"] for s in found] for found in (ours, never))
    assert mean(told) > mean(untold) + 0.4 and mean(told) > mean(
        [s["global_score"]["last"] for s in alone]
    ), (told, untold)

"""FedHKD: hyper-knowledge, what clipping and noise promise, the server's means, weights beside it,
and the code's way."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import nestling
from nestling import FleetConfig, InputError, Named, SplitConfig, Tier
from nestling.methods.distill import gaussian
from nestling.methods.distill.fedhkd import FedHKD
from nestling.methods.distill.hyper_knowledge import clipped, taught
from nestling.methods.representation.class_means import class_means, outputs_of
from nestling.methods.representation.class_table import STATISTICS
from nestling.runs.assemble import assemble
from nestling.training.client import Client
from nestling.training.objectives import Batch, Net, forward_with_features
from nestling.views import Contribution, merge
from tests.methods.by_class import (
    MIXED,
    SHOTS,
    few_shots_alone,
    held,
    holders,
    known_after,
    one_round,
    resumes,
    same_on_every_engine,
)
from tests.methods.learning import alone, learned, mean
from tests.methods.mixed import unlike
from tests.small import TIERS, small

NAME = "nestling.methods.distill.fedhkd:FedHKD"
THREE = SplitConfig(kind="classes", classes=3, size=60)
SKEWED = SplitConfig(kind="dirichlet", alpha=0.2, size=60)
QUIET = {"size": 8, "epsilon": 0.0}


# -- privacy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.1, 1e-5), (1.0, 1e-5), (8.0, 1e-6), (50.0, 1e-3)]
)
def test_noise_is_just_enough_for_the_budget(epsilon: float, delta: float) -> None:
    sigma = gaussian.multiplier(epsilon, delta)
    assert gaussian.leaks(1 / sigma, epsilon) == pytest.approx(delta, rel=1e-6)
    assert gaussian.leaks(1 / (0.99 * sigma), epsilon) > delta
    assert gaussian.spent(sigma, delta) == pytest.approx(epsilon, rel=1e-6)
    if epsilon <= 1:  # where the classic bound holds it asks for more
        assert sigma < math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def test_the_mechanism_agrees_with_integration() -> None:
    """δ(ε) is the largest gap P(A) − e^ε·Q(A) between N(μ, 1) and N(0, 1), summed here on a
    grid."""
    x = torch.linspace(-30, 30, 600_001, dtype=torch.float64)
    for mu, epsilon in ((0.3, 0.5), (1.0, 1.0), (2.0, 6.0)):
        p, q = (torch.exp(-((x - m) ** 2) / 2) / math.sqrt(2 * math.pi) for m in (mu, 0.0))
        assert float((p - math.exp(epsilon) * q).clamp(min=0).sum()) * 1e-4 == pytest.approx(
            gaussian.leaks(mu, epsilon), rel=1e-4
        )


def test_what_rounds_spend_adds_up() -> None:
    method = FedHKD(epsilon=1.0, delta=1e-5)
    spent = [method.spent(rounds) for rounds in (0, 1, 4, 100)]
    assert spent[0] == 0 and spent[1] == pytest.approx(1.0, rel=1e-6)
    assert 2 < spent[2] < 4 and spent[2] < spent[3] < 100  # more than √k at a fixed δ, less than k
    assert FedHKD(epsilon=1.0, protect="both").spent(1) == pytest.approx(1.0, rel=1e-6)
    assert FedHKD(epsilon=1.0, protect="both").sigma == pytest.approx(math.sqrt(2) * method.sigma)
    assert FedHKD(epsilon=0.0).spent(1) == FedHKD(compat="code").spent(3) == math.inf


def test_one_input_moves_a_mean_by_no_more_than_its_sensitivity() -> None:
    """Whatever it is replaced by; the opposite of a long vector moves it by all of 2ζ/n_c."""
    features, y = (
        10 * torch.randn(40, 8, generator=torch.Generator().manual_seed(1)),
        torch.arange(40) % 3,
    )
    before = class_means(clipped(features, 1.5), y, 3)
    rows, most = int((y == 0).sum()), 0.0
    for other in (torch.zeros(8), torch.full((8,), 1e6), -features[0], torch.full((8,), -1e-9)):
        changed = features.clone()
        changed[0] = other
        moved = (class_means(clipped(changed, 1.5), y, 3) - before).norm(dim=1)
        assert float(moved[0]) <= 2 * 1.5 / rows + 1e-6 and not bool(moved[1:].any())
        most = max(most, float(moved[0]))
    assert most == pytest.approx(2 * 1.5 / rows, rel=1e-5)
    assert float(clipped(features, 1.5).norm(dim=1).max()) <= 1.5 + 1e-6
    assert torch.equal(clipped(features, 1e3), features)


def told(method: FedHKD, client: Client, round: int) -> dict[str, torch.Tensor]:
    client.round = round
    return method.statistics(client)


def test_noise_has_its_size_and_is_each_classs_own() -> None:
    _, _, clients = one_round(FedHKD(**QUIET), clients=[0], split=THREE)
    client = clients[0]
    loud, quiet = FedHKD(size=8, epsilon=2.0, clip=1.5), FedHKD(**QUIET, clip=1.5)
    plain, counts = quiet.statistics(client), torch.bincount(client.y, minlength=10)
    features, _, y = outputs_of(client)
    assert torch.allclose(plain["features"], class_means(clipped(features, 1.5), y, 10))
    draws = torch.stack([told(loud, client, r)["features"] - plain["features"] for r in range(400)])
    own = [int(c) for c in counts.nonzero().flatten()]
    for label in own:
        wanted = loud.sigma * 2 * 1.5 / int(counts[label])
        assert float(draws[:, label].std()) == pytest.approx(wanted, rel=0.06)
    flat = draws[:, own].transpose(0, 1).reshape(len(own), -1)
    assert float((torch.corrcoef(flat) - torch.eye(len(own))).abs().max()) < 0.07
    assert torch.equal(told(loud, client, 3)["features"], told(loud, client, 3)["features"])
    # as published: no noise on predictions
    assert torch.equal(told(loud, client, 3)["soft"], plain["soft"])
    both = told(FedHKD(size=8, epsilon=2.0, protect="both"), client, 3)["soft"]
    assert not torch.allclose(both[own], plain["soft"][own], atol=1e-3)
    assert torch.allclose(both.sum(1), torch.ones(10)) and float(both.min()) > 0


def test_the_codes_noise_is_one_vector_for_all_classes() -> None:
    _, _, clients = one_round(FedHKD(**QUIET), clients=[0], split=THREE)
    features, _, y = outputs_of(clients[0])
    noise = FedHKD(size=8, compat="code").statistics(clients[0])["features"] - class_means(
        features, y, 10
    )
    assert float(noise.std()) > 0.5 and torch.allclose(noise, noise[:1].expand_as(noise), atol=1e-5)


# -- hyper-knowledge -------------------------------------------------------------------------------


def test_means_are_over_those_who_hold_a_class() -> None:
    """A class on one client alone is that client's hyper-knowledge, bit for bit; one that nobody
    tells of is not there."""
    federation, replies, clients = one_round(FedHKD(size=8, least=3), split=SKEWED)
    federation.method.merge(replies, 1)
    table, seen = federation.method.table, set()
    for label in range(10):
        own = [
            (r.message[STATISTICS], k, float(r.message["counts"]["rows"][k]))
            for r, k in holders(replies, label)
        ]
        # under-represented classes are not told
        assert len(own) == sum(int((c.y == label).sum()) >= 3 for c in clients)
        assert bool(table.known[label]) == bool(own)
        seen.add(min(len(own), 2))
        for name in ("features", "soft"):
            if len(own) == 1:
                assert torch.equal(table.rows[name][label], own[0][0][name][own[0][1]])
            elif own:
                mean = sum(s[name][k].double() * n for s, k, n in own) / sum(n for _, _, n in own)
                assert torch.allclose(table.rows[name][label].double(), mean, atol=1e-6)
    assert {1, 2} <= seen
    before = federation.method.table.rows["features"]
    federation.method.merge([], 2)
    assert torch.equal(federation.method.table.rows["features"], before)


def test_in_the_code_the_last_client_wins() -> None:
    federation, replies, _ = one_round(FedHKD(size=8, compat="code", least=1), split=SKEWED)
    federation.method.merge(replies, 1)
    shared = 0
    for label in range(10):
        own = holders(replies, label)
        shared += len(own) > 1
        if own:
            last, row = own[-1]
            assert torch.equal(
                federation.method.table.rows["features"][label],
                last.message[STATISTICS]["features"][row],
            )
    assert shared


def test_soft_predictions_are_means_of_probabilities() -> None:
    _, replies, clients = one_round(FedHKD(**QUIET, temperature=2.0), clients=[0], split=THREE)
    _, logits, y = outputs_of(clients[0])
    for row, label in enumerate(replies[0].message.facts["classes"]):
        wanted = torch.softmax(logits[y == label] / 2.0, 1).mean(0)
        assert torch.allclose(replies[0].message[STATISTICS]["soft"][row], wanted, atol=1e-6)


@pytest.mark.parametrize("code", [False, True])
def test_the_loss_is_that_of_the_formula(code: bool) -> None:
    _, _, clients = one_round(FedHKD(**QUIET), clients=[0], split=SplitConfig(kind="iid", size=60))
    client, generator = clients[0], torch.Generator().manual_seed(0)
    head = client.reference.taps.head
    network = client.reference.network(client.view, client.weights)
    batch = Batch(client.x[:10], torch.arange(10) % 5, torch.arange(10))
    known = torch.tensor([1.0, 1, 1, 0, 1, 1, 0, 0, 0, 0])
    soft = torch.softmax(torch.randn(10, 10, generator=generator), 1) * known[:, None]
    given = {
        "features": torch.rand(10, 8, generator=generator) * known[:, None],
        "soft": soft,
        "known": known,
    }
    logits, features = forward_with_features(Net(network, {}), batch.x, head)
    said = network.get_submodule(head)(given["features"]) / 0.5
    wrong, far = [], torch.zeros(())
    for label in known.nonzero().flatten():
        if code:
            # V7: the mean over entries
            wrong.append(F.kl_div(F.log_softmax(said[label], 0), soft[label], reduction="sum") / 10)
        else:
            wrong.append((torch.softmax(said[label], 0) - soft[label]).norm())
    for z, label in zip(features, batch.y, strict=True):
        if known[label]:
            gap = z - given["features"][label]
            far = far + (gap.square().mean() if code else gap.norm()) / 10
    wanted = F.cross_entropy(logits, batch.y) + 0.3 * torch.stack(wrong).mean() + 0.7 * far
    loss = partial(taught, lam=0.3, gamma=0.7, temperature=0.5, code=code, head=head)
    assert torch.allclose(loss(Net(network, {}), batch, given), wanted, rtol=1e-5)


def test_bytes_are_those_of_the_classes_that_are_told() -> None:
    """4·(d + C + 1) up for every class a client holds enough of, 4·(d + C) down for every class the
    server knows."""
    result = nestling.run(small(FedHKD(size=8, least=2), fleet=MIXED, participants=4, split=SKEWED))
    f, (first, second) = result.federation, result.metrics
    assert (
        first["bytes_up"]
        == second["bytes_up"]
        == 4 * (8 + 10 + 1) * sum(held(f, c, 2) for c in range(4))
    )
    assert first["bytes_down"] == 0
    assert (
        second["bytes_down"]
        == 4 * 4 * (8 + 10) * known_after(f, range(4), 2)
        <= 4 * 4 * (8 + 10) * 10
    )


def test_a_client_with_nothing_to_tell_does_no_harm() -> None:
    result = nestling.run(small(FedHKD(size=8, least=1000), fleet=MIXED, participants=4))
    assert (
        result.summary["refused"] == 0
        and result.summary["bytes_up"] == 0
        and result.summary["bytes_down"] == 0
    )


# -- with weights ----------------------------------------------------------------------------------


def test_with_weights_and_no_hyper_knowledge_it_is_fedavg() -> None:
    """On devices that all hold the whole network with its embedding, bit for bit."""
    fleet = FleetConfig(tiers=(Tier(name="all", device="gpu-box", count=4),))
    ours = nestling.run(
        small(FedHKD(variant="weights", size=8, lam=0.0, gamma=0.0), fleet=fleet)
    ).federation
    start = assemble(small(FedHKD(variant="weights", size=8), fleet=fleet))[1]
    network = start.method._ladder.pieces[-1].reference.module
    plain = nestling.run(small("fedavg", fleet=fleet, model=network)).federation
    a, b = ours.method.global_model(), plain.method.global_model()
    assert a is not None and b is not None and a.state.keys() == b.state.keys()
    assert all(torch.allclose(t, b.state[name], atol=1e-6) for name, t in a.state.items())


def test_weights_are_merged_over_views_whose_embedding_is_whole() -> None:
    federation, replies, _ = one_round(
        FedHKD(variant="weights", size=8), fleet=FleetConfig(tiers=TIERS)
    )
    method, before = federation.method, dict(federation.method.weights)
    widths = {r.device.tier: r.piece.view.shape("stages.1.conv.weight") for r in replies}
    assert len(set(widths.values())) == 3
    assert {r.piece.view.shape("head.embed.weight")[0] for r in replies} == {8}
    method.merge(replies, 1)
    own = [Contribution(r.piece.view, r.message["weights"], float(r.samples)) for r in replies]
    assert all(torch.equal(t, method.weights[name]) for name, t in merge(before, own).items())
    assert method.as_set.global_model and not method.as_set.personal and method.as_set.group == "E"
    assert FedHKD().as_set is FedHKD.info and FedHKD.info.group == "F"


def test_bytes_with_weights() -> None:
    result = nestling.run(
        small(
            FedHKD(variant="weights", size=8),
            fleet=FleetConfig(tiers=TIERS),
            participants=4,
            rounds=1,
        )
    )
    f = result.federation
    sizes = [
        sum(t.numel() for t in f.method.model_for(f.world.device(c)).state.values())
        for c in range(4)
    ]
    assert result.summary["bytes_down"] == 4 * sum(sizes)
    assert result.summary["bytes_up"] == 4 * sum(sizes) + 4 * (8 + 10 + 1) * sum(
        held(f, c, 5) for c in range(4)
    )


def test_with_weights_unlike_networks_are_refused() -> None:
    with pytest.raises(InputError, match=r"fleet.tiers\[0\].model"):
        nestling.run(small(FedHKD(variant="weights"), fleet=MIXED))


# -- engines, resume, settings ---------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["hyper", "weights"])
def test_every_engine_gives_the_same(variant: str) -> None:
    same_on_every_engine(
        FedHKD(size=8, variant=variant),
        fleet=MIXED if variant == "hyper" else FleetConfig(tiers=TIERS),
    )


@pytest.mark.parametrize("variant", ["hyper", "weights"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, variant: str) -> None:
    fleet = MIXED if variant == "hyper" else FleetConfig(tiers=TIERS)
    resumes(Named(NAME, {"size": 8, "variant": variant}), tmp_path, fleet=fleet)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"clip": 0.0}, "clip"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"variant": "both"}, "variant"),
    ],
)
def test_bad_settings_are_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(InputError, match=f"method.{field}"):
        small(Named(NAME, options)).make_method()


# -- learning --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hyper_knowledge_helps_unlike_networks_learn() -> None:
    """With noise, with three classes and twenty rows a client: every seed is above the same
    networks alone."""
    ours, local = unlike(FedHKD(), **SHOTS), few_shots_alone()
    assert all(a > b for a, b in zip(ours, local, strict=True)) and mean(ours) > mean(local) + 0.01


@pytest.mark.slow
def test_with_weights_the_global_model_learns_what_no_client_could_alone() -> None:
    found = learned(FedHKD(variant="weights"))
    assert mean(found) > alone() + 0.05

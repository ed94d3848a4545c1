"""Fed-CMA: moments by class of bounded features, their moving average, the classifiers' consensus,
and the loss they make."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import nestling
from nestling import InputError, Named, SplitConfig
from nestling.message import faults
from nestling.methods.representation.class_table import STATISTICS
from nestling.methods.representation.fedcma import HEAD, FedCMA, _aligned
from nestling.training.objectives import Batch, Net, forward_with_features
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
from tests.methods.learning import mean
from tests.methods.mixed import unlike
from tests.small import small

NAME = "nestling.methods.representation.fedcma:FedCMA"
THREE = SplitConfig(kind="classes", classes=3, size=60)
SKEWED = SplitConfig(kind="dirichlet", alpha=0.2, size=60)


def test_moments_are_those_of_all_rows_of_a_class() -> None:
    """The mean and the central moments, of features between 0 and 1, over every row the client has
    and not the first batch only."""
    _, replies, clients = one_round(FedCMA(size=8, moments=3, bound="sigmoid"), split=THREE)
    for reply, client in zip(replies, clients, strict=True):
        network = client.reference.network(client.view, client.weights).eval()
        with torch.no_grad():
            _, z = forward_with_features(Net(network, {}), client.x, client.reference.taps.head)
        assert 0 <= float(z.min()) < float(z.max()) <= 1
        for row, label in enumerate(reply.message.facts["classes"]):
            own = z[client.y == label].double()
            assert len(own) > 10
            wanted = torch.stack(
                [own.mean(0), *(((own - own.mean(0)) ** q).mean(0) for q in (2, 3))]
            )
            assert torch.allclose(
                reply.message[STATISTICS]["moments"][row].double(), wanted, atol=1e-6
            )


def test_the_codes_moments_are_those_of_the_first_batch() -> None:
    _, replies, clients = one_round(FedCMA(size=8, compat="code"), clients=[0], split=THREE)
    client, told = clients[0], replies[0].message
    network = client.reference.network(client.view, client.weights).eval()
    with torch.no_grad():
        _, z = forward_with_features(Net(network, {}), client.x[:20], client.reference.taps.head)
    label = int(client.y[0])
    row = told.facts["classes"].index(label)
    assert torch.allclose(
        told[STATISTICS]["moments"][row, 0], z[client.y[:20] == label].mean(0), atol=1e-6
    )


def test_means_are_over_those_who_hold_a_class() -> None:
    """A class on one client alone has that client's moments, bit for bit; one that nobody holds is
    not there."""
    federation, replies, _ = one_round(FedCMA(size=8, moments=2), split=SKEWED)
    federation.method.merge(replies, 1)
    table, seen = federation.method.table, set()
    for label in range(10):
        told = [
            (r.message[STATISTICS]["moments"][k], float(r.message["counts"]["rows"][k]))
            for r, k in holders(replies, label)
        ]
        assert bool(table.known[label]) == bool(told)
        seen.add(min(len(told), 2))
        if len(told) == 1:
            assert torch.equal(table.rows["moments"][label], told[0][0])
        elif told:
            mean = sum(m.double() * n for m, n in told) / sum(n for _, n in told)
            assert torch.allclose(table.rows["moments"][label].double(), mean, atol=1e-7)
    assert {1, 2} <= seen


@pytest.mark.parametrize(
    ("options", "kept"),
    [({"rate": 0.25}, (0.75, 0.75)), ({"compat": "code", "lam_c": 0.2}, (0.55, 0.82))],
)
def test_the_server_moves_by_its_rate_after_the_first_time(
    options: dict[str, float], kept: tuple[float, float]
) -> None:
    """The code's rates are 0.9·λ; a class that nobody tells of does not move."""
    federation, replies, _ = one_round(FedCMA(size=8, **options), split=SKEWED)  # type: ignore[arg-type]
    method = federation.method
    method.merge(replies[:1], 1)
    first, head = method.table, dict(method.head)
    assert torch.equal(head["weight"], replies[0].message[HEAD]["weight"])
    method.merge(replies[1:2], 2)
    before, now = set(replies[0].message.facts["classes"]), replies[1].message.facts["classes"]
    assert before & set(now)
    for label in before | set(now):
        old, found = first.rows["moments"][label], method.table.rows["moments"][label]
        if label not in now:
            assert torch.equal(found, old)
        else:
            own = replies[1].message[STATISTICS]["moments"][now.index(label)]
            wanted = kept[0] * old + (1 - kept[0]) * own if label in before else own
            assert torch.allclose(found, wanted, atol=1e-6)
    wanted = kept[1] * head["weight"] + (1 - kept[1]) * replies[1].message[HEAD]["weight"]
    assert torch.allclose(method.head["weight"], wanted, atol=1e-6)
    after = {**method.table.rows, **method.head}
    method.merge([], 3)
    assert all(
        torch.equal(t, {**method.table.rows, **method.head}[name]) for name, t in after.items()
    )


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_is_that_of_the_formula(masked: bool) -> None:
    """Class by class in a loop; a filled-up row, a class that the server does not know and one with
    a single row count as they must."""
    _, _, clients = one_round(FedCMA(size=8), clients=[0], split=SplitConfig(kind="iid", size=60))
    client, generator = clients[0], torch.Generator().manual_seed(0)
    head = client.reference.taps.head
    network = client.reference.network(client.view, client.weights)
    y = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 5, 5])
    mask = torch.arange(10) < 8 if masked else None
    batch = Batch(client.x[:10], y, torch.arange(10), 0, mask)
    known = torch.tensor([1.0, 1, 1, 0, 1, 1, 0, 0, 0, 0])
    given = {
        "moments": torch.rand(10, 3, 8, generator=generator) * known[:, None, None],
        "known": known,
    }
    given |= {
        f"{HEAD}/{n}": torch.rand(s, generator=generator)
        for n, s in (("weight", (10, 8)), ("bias", (10,)))
    }
    net = Net(network, dict(network.named_parameters()))
    logits, z = forward_with_features(net, batch.x, head)
    rows = 8 if masked else 10
    wanted = F.cross_entropy(logits[:rows], y[:rows])
    for label in {int(c) for c in y[:rows]}:
        own, common = z[:rows][y[:rows] == label], given["moments"][label]
        if not known[label]:
            continue
        wanted = wanted + 0.7 * F.mse_loss(own, common[0].expand_as(own))
        for q in (2, 3):
            if len(own) > 1:
                wanted = wanted + 0.7 * F.mse_loss(
                    ((own - own.mean(0)) ** q).mean(0), common[q - 1]
                )
    for name in ("weight", "bias"):
        wanted = (
            wanted + 0.3 * ((net.params[f"{head}.{name}"] - given[f"{HEAD}/{name}"]) ** 2).sum()
        )
    loss = partial(_aligned, lam=0.7, lam_c=0.3, moments=3, head=head)
    assert float(loss(net, batch, given).detach()) == pytest.approx(
        float(wanted.detach()), rel=1e-5
    )


def test_classifiers_come_together() -> None:
    def apart(lam_c: float) -> float:
        method = FedCMA(size=8, lam_c=lam_c)
        federation = nestling.run(small(method, fleet=MIXED, participants=4, rounds=4)).federation
        own = [federation.method.model_for(federation.world.device(c)) for c in range(4)]
        return float(
            torch.stack([m.state[f"{m.reference.taps.head}.weight"] for m in own]).var(0).mean()
        )

    assert apart(0.5) < 0.7 * apart(0.0)


def test_bytes_are_the_moments_of_held_classes_and_the_classifier() -> None:
    """4·(Q·d + 1) up for every class a client holds, 4·Q·d down for every class the server knows,
    and 4·C·(d + 1) both ways."""
    result = nestling.run(
        small(FedCMA(size=8, moments=2), fleet=MIXED, participants=4, split=THREE)
    )
    f, (first, second) = result.federation, result.metrics
    head = 4 * 10 * (8 + 1)
    assert (
        first["bytes_up"]
        == second["bytes_up"]
        == 4 * (2 * 8 + 1) * sum(held(f, c) for c in range(4)) + 4 * head
    )
    assert first["bytes_down"] == 0
    assert (
        second["bytes_down"]
        == 4 * (4 * 2 * 8 * known_after(f, range(4)) + head)
        <= 4 * (4 * 2 * 8 * 10 + head)
    )


def test_a_classifier_of_another_form_is_refused() -> None:
    federation, replies, _ = one_round(FedCMA(size=8), clients=[0], split=THREE)
    like = federation.method.expects(replies[0].piece, replies[0].sent)
    assert faults(replies[0].message, like) is None
    other = one_round(FedCMA(size=9), clients=[0], split=THREE)[1][0].message
    assert "expected" in str(faults(other, like))


def test_every_engine_gives_the_same() -> None:
    same_on_every_engine(FedCMA(size=8, moments=2))


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    resumes(Named(NAME, {"size": 8, "moments": 2}), tmp_path)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"lam": -1.0}, "lam"),
        ({"moments": 0}, "moments"),
        ({"rate": 0.0}, "rate"),
        ({"compat": "other"}, "compat"),
    ],
)
def test_bad_settings_are_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(InputError, match=f"method.{field}"):
        small(Named(NAME, options)).make_method()


@pytest.mark.slow
def test_unlike_networks_learn() -> None:
    """With three classes and twenty rows a client, more than the same networks alone."""
    assert mean(unlike(FedCMA(), **SHOTS)) > mean(few_shots_alone()) + 0.003

"""FedGen: the generator's loss and its known traps, the client's terms by hand, both ways to share,
bytes, resume, learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import nestling
from nestling import EngineConfig, FleetConfig, InputError, Named, Tier
from nestling.message import payload
from nestling.methods import Reply
from nestling.methods.distill.fedgen import FedGen
from nestling.methods.distill.label_counts import shares
from nestling.methods.distill.latent import Classifier, drawn, weighted
from nestling.methods.heads import columns_of
from nestling.models.latent_generator import LatentGenerator, generated
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.seeds import torch_seeded
from nestling.training.client import Client, Errand, client_of, work
from nestling.training.noise import uniform
from nestling.training.objectives import Batch, Net
from nestling.training.phase import Phase
from tests.methods.learning import alone, learned, mean
from tests.methods.mixed import SETTING, unlike
from tests.small import small

NAME = "nestling.methods.distill.fedgen:FedGen"
QUICK: dict[str, Any] = {"iterations": 5, "hidden": 16, "noise": 4, "batch": 8, "latent": 8}
UNLIKE = FleetConfig(
    tiers=(
        Tier(name="mlp", model="mlp", model_options={"hidden": [16]}, count=2),
        Tier(name="narrow", ratio=0.5, count=1),
        Tier(name="cnn", ratio=1.0, count=2),
    )
)


def made(mixed: bool = False, **options: Any) -> Federation:
    changes: dict[str, Any] = {"fleet": UNLIKE} if mixed else {}
    return assemble(small(FedGen(**{**QUICK, **options}), **changes))[1]


def task_of(federation: Federation, client: int, round: int) -> Errand:
    world, method = federation.world, federation.method
    device = world.device(client)
    piece = method.piece(device, round)
    return Errand(
        client,
        round,
        piece.reference.name,
        piece.spec(),
        method.send(device, piece, round),
        world.store.get(client),
    )


def play(federation: Federation, clients: list[int], round: int) -> list[Reply]:
    world, method, replies = federation.world, federation.method, []
    for client in clients:
        errand = task_of(federation, client, round)
        device = world.device(client)
        done = work(method, errand, site_of(federation))
        world.store.put(client, done.memory, round)
        replies.append(Reply(device, method.piece(device, round), errand.message, done.reply))
    method.merge(replies, round)
    return replies


def second_round(federation: Federation, client: int) -> tuple[Client, Phase]:
    play(federation, [0, 1, 2, 3], 1)
    errand = task_of(federation, client, 2)
    found = client_of(errand, site_of(federation))
    found.weights = federation.method.start(found, errand.message)
    return found, next(iter(federation.method.phases(found, errand.message)))


# -- the generator ---------------------------------------------------------------------------------


def test_every_sample_counts_by_its_class() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 3), torch.tensor([0, 0, 1, 1, 2, 2])
    share = torch.tensor([0.9, 0.1, 0.0])[labels]
    each = F.cross_entropy(logits, labels, reduction="none")
    assert torch.allclose(weighted(logits, labels, share), (each * share).sum() / 6)
    lost = weighted(logits, labels, share, "code")
    # what a product of (B,) and (B, 1) comes to
    assert torch.allclose(lost, (each[None] * share[:, None]).mean())
    assert not torch.allclose(weighted(logits, labels, share), lost)


def test_counts_start_at_one_only_in_the_code() -> None:
    counts = torch.tensor([[3, 0, 0], [1, 2, 0]], dtype=torch.int32)
    assert torch.allclose(shares(counts), torch.tensor([[0.75, 0.0, 0.0], [0.25, 1.0, 0.0]]))
    assert torch.allclose(
        shares(counts, "code"), torch.tensor([[4 / 6, 1 / 4, 0.5], [2 / 6, 3 / 4, 0.5]])
    )


def test_a_client_without_a_class_does_not_teach_it() -> None:
    """The features of a class are those that its only holder knows, whatever the other says of
    it."""
    federation = made(iterations=200, generator_lr=0.02, weight_decay=0.0, hidden=32)
    method = federation.method
    features, classes = federation.world.main.taps.features, 10
    with torch_seeded(0, "test"):
        one, other = (
            Classifier({"weight": torch.randn(classes, features) / 8, "bias": torch.zeros(classes)})
            for _ in range(2)
        )
    counts = torch.zeros(2, classes, dtype=torch.int32)
    counts[0, :5], counts[1, 5:] = 10, 10
    method.seen = torch.ones(classes, dtype=torch.bool)
    before = method.generator
    with torch_seeded(0, "test"):
        method._teach([one, other], shares(counts))
    labels = torch.arange(classes).repeat(20)
    z = generated(method.generator, torch.rand(len(labels), method.noise), labels, classes)
    right = [(c(z).argmax(-1) == labels).float() for c in (one, other)]
    low = labels < 5
    assert right[0][low].mean() > 0.9 and right[1][~low].mean() > 0.9
    assert right[0][~low].mean() < 0.6 and right[1][low].mean() < 0.6
    # The state that was there is not written to, and the statistics moved with the weights.
    assert method.generator is not before and not torch.equal(
        method.generator["hidden.1.running_mean"], before["hidden.1.running_mean"]
    )
    assert torch.equal(before["hidden.1.running_mean"], torch.zeros(32))


def test_the_generator_as_a_function_is_the_network() -> None:
    with torch_seeded(0, "test"):
        module = LatentGenerator(4, 3, 16, 5)
        noise, labels = torch.rand(7, 4), torch.tensor([0, 1, 2, 2, 1, 0, 0])
        module(noise, labels)
        expected = module.eval()(noise, labels)
    assert torch.allclose(generated(module.state_dict(), noise, labels, 3), expected, atol=1e-6)


def test_labels_are_drawn_evenly_from_the_classes_that_exist() -> None:
    seen = torch.tensor([False, True, True, False, True])
    labels = drawn(seen, uniform(torch.tensor(5), 0, (3000,)))
    counts = torch.bincount(labels, minlength=5)
    assert counts[0] == counts[3] == 0 and counts[seen].min() > 900
    assert drawn(seen, torch.tensor([0.9999999])).item() == 4


# -- the client ------------------------------------------------------------------------------------


def test_the_loss_by_hand() -> None:
    federation = made(alpha=3.0, beta=2.0, decay=0.5)
    client, phase = second_round(federation, 0)
    assert phase.given["strength"].tolist() == [1.5, 1.0]
    module = client.reference.network(client.view, client.weights).train()
    batch = Batch(client.x[:6], client.y[:6], torch.arange(6), 4)
    loss = phase.objective(Net(module, dict(module.named_parameters())), batch, phase.given)
    method, key, head = federation.method, phase.given["key"], module.head
    columns = columns_of(client.reference, client.view, "head")
    keep = slice(None) if columns is None else columns

    def taught(noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return head(generated(method.generator, noise, labels, 10)[:, keep])

    logits = module(batch.x)
    p = taught(uniform(key, 12, (6, 4)), batch.y).softmax(-1)
    kl = (p * (p.log() - logits.log_softmax(-1))).sum(-1).mean()
    labels = drawn(method.seen, uniform(key, 13, (8,)))
    others = F.cross_entropy(taught(uniform(key, 14, (8, 4)), labels), labels)
    assert torch.allclose(
        loss, F.cross_entropy(logits, batch.y) + 1.0 * kl + 8 / 6 * 1.5 * others, rtol=1e-5
    )


def test_the_teacher_is_held_still() -> None:
    federation = made(alpha=0.0, beta=5.0)
    client, phase = second_round(federation, 0)
    module = client.reference.network(client.view, client.weights).train()
    module.head.bias.data += torch.randn(10)
    net, batch = (
        Net(module, dict(module.named_parameters())),
        Batch(client.x[:6], client.y[:6], torch.arange(6)),
    )
    (grad,) = torch.autograd.grad(phase.objective(net, batch, phase.given), [module.head.bias])
    logits = module(batch.x)
    z = generated(federation.method.generator, uniform(phase.given["key"], 0, (6, 4)), batch.y, 10)
    columns = columns_of(client.reference, client.view, "head")
    teacher = module.head(z if columns is None else z[:, columns]).softmax(-1)
    by_hand = (logits.softmax(-1) - F.one_hot(batch.y, 10)) / 6 + 5.0 * 0.98 * (
        logits.softmax(-1) - teacher
    ) / 6
    assert torch.allclose(grad, by_hand.sum(0), rtol=1e-3, atol=1e-5)


def test_a_filled_up_batch_gives_the_loss_of_the_batch() -> None:
    federation = made(mixed=True)
    client, phase = second_round(federation, 0)
    module = client.reference.network(client.view, client.weights).train()
    net, x, y = Net(module, dict(module.named_parameters())), client.x[:6], client.y[:6]
    short = phase.objective(net, Batch(x[:4], y[:4], torch.arange(4)), phase.given)
    mask = torch.tensor([True] * 4 + [False] * 2)
    assert (
        torch.allclose(
            phase.objective(net, Batch(x * 2 - 1, y, torch.arange(6), 0, mask), phase.given), short
        )
        is False
    )
    filled = torch.cat([x[:4], x[4:] * 3])
    assert torch.allclose(
        phase.objective(net, Batch(filled, y, torch.arange(6), 0, mask), phase.given),
        short,
        rtol=1e-5,
    )


def test_the_first_round_is_plain() -> None:
    federation = made()
    errand = task_of(federation, 0, 1)
    assert set(errand.message.parts) == {"weights"}
    phases = list(federation.method.phases(client_of(errand, site_of(federation)), errand.message))
    assert len(phases) == 1 and not phases[0].given


# -- what travels ----------------------------------------------------------------------------------


def test_narrow_classifiers_read_their_part_of_the_features() -> None:
    federation = made()
    world = federation.world
    full = world.main.taps.features
    for client in range(4):
        piece = world.device(client).piece
        columns = columns_of(piece.reference, piece.view, "head")
        kept = piece.view.extract(world.main.initial)["head.weight"]
        every = world.main.initial["head.weight"]
        assert torch.equal(every if columns is None else every[:, columns], kept)
        assert (columns is None) == (kept.shape[1] == full)


def test_what_it_is_follows_from_what_travels() -> None:
    """With unlike networks there is no global model, and what stands in its column is the mean of
    the clients' models."""
    alike, unlike = (
        nestling.run(small(FedGen(iterations=2), rounds=1, participants=0, **c))
        for c in ({}, {"fleet": UNLIKE})
    )
    assert (
        alike.summary["global_model"]
        and alike.model is not None
        and not alike.federation.method.as_set.personal
    )
    assert (
        not unlike.summary["global_model"]
        and unlike.model is None
        and unlike.federation.method.as_set.personal
    )
    tested = [row["global_score"] for row in unlike.metrics[-1]["by_tier"].values()]
    assert min(tested) <= unlike.metrics[-1]["global_score"] <= max(tested)
    assert FedGen().as_set is FedGen.info
    assert (
        not FedGen(share="full").as_set.own_networks
        and not FedGen(share="head").as_set.global_model
    )
    assert FedGen(share="full").as_set.group == "E" and FedGen(share="head").as_set.group == "F"
    assert (
        alike.federation.method.as_set.group == "E" and unlike.federation.method.as_set.group == "F"
    )


def test_unlike_networks_share_their_classifier_only() -> None:
    federation = made(mixed=True)
    method, world = federation.method, federation.world
    assert not method.full and method.global_model() is None
    assert not method.as_set.global_model and method.as_set.personal
    replies = play(federation, [0, 1, 2, 3, 4], 1)
    assert {tuple(r.message["head"]["weight"].shape) for r in replies} == {(10, 8)}
    total = sum(r.samples for r in replies)
    by_hand = sum(r.message["head"]["weight"].double() * r.samples / total for r in replies)
    assert torch.allclose(method.weights["weight"].double(), by_hand, atol=1e-6)
    errand = task_of(federation, 0, 2)
    client = client_of(errand, site_of(federation))
    start = method.start(client, errand.message)
    head = client.reference.taps.head
    assert torch.equal(start[f"{head}.weight"], method.weights["weight"])
    own = method.model_for(world.device(0)).state
    assert all(torch.equal(start[n], own[n]) for n in own if not n.startswith(f"{head}."))


def test_who_never_took_part_has_the_common_classifier() -> None:
    federation = made(mixed=True)
    play(federation, [0, 1], 1)
    model = federation.method.model_for(federation.world.device(4))
    assert torch.equal(
        model.state[f"{model.reference.taps.head}.weight"], federation.method.weights["weight"]
    )


@pytest.mark.parametrize("mixed", [False, True])
def test_bytes(mixed: bool) -> None:
    changes: dict[str, Any] = {"fleet": UNLIKE, "participants": 5} if mixed else {"participants": 4}
    result = nestling.run(small(Named(NAME, QUICK), rounds=3, **changes))
    method, world = result.federation.method, result.federation.world
    clients = range(5 if mixed else 4)
    if mixed:
        own = len(clients) * 4 * (8 * 10 + 10)
    else:
        own = sum(4 * world.cost(world.device(c).piece).params for c in clients)
    generator = sum(payload(t) for t in method.generator.values()) + 2  # and ten flags
    assert [row["bytes_up"] for row in result.metrics] == [own + len(clients) * 40] * 3
    assert [row["bytes_down"] for row in result.metrics] == [
        own,
        *[own + len(clients) * generator] * 2,
    ]


def test_own_networks_cannot_share_everything() -> None:
    with pytest.raises(InputError, match="merges views of one network"):
        made(mixed=True, share="full")


def test_equal_networks_may_share_classifiers_only() -> None:
    federation = made(share="head")
    assert not federation.method.full and "head" in task_of(federation, 0, 1).message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("share", "some"),
        ("compat", "no"),
        ("alpha", -1.0),
        ("decay", 0.0),
        ("batch", 1),
        ("noise", 0),
        ("generator_lr", 0.0),
    ],
)
def test_settings_are_checked(field: str, value: Any) -> None:
    with pytest.raises(InputError) as error:
        FedGen(**{field: value})
    assert error.value.field == f"method.{field}"


def test_no_replies_change_nothing() -> None:
    federation = made()
    before = federation.method.state()
    federation.method.merge([], 1)
    after = federation.method.state()
    assert all(
        torch.equal(t, after[kind][n]) for kind, part in before.items() for n, t in part.items()
    )


# -- runs ------------------------------------------------------------------------------------------


def same_state(one: Federation, other: Federation, tolerance: float) -> None:
    for kind, part in one.method.state().items():
        for name, tensor in part.items():
            apart = (tensor.double() - other.method.state()[kind][name].double()).norm()
            assert float(apart) <= tolerance * float(tensor.double().norm()) + tolerance, (
                kind,
                name,
            )


@pytest.mark.parametrize("mixed", [False, True])
def test_the_run_goes_on_where_it_stood(tmp_path: Path, mixed: bool) -> None:
    changes: dict[str, Any] = {"fleet": UNLIKE} if mixed else {}
    nestling.run(small(Named(NAME, QUICK), rounds=2, **changes), out=tmp_path / "parts")
    parts = nestling.resume(tmp_path / "parts", overrides=("rounds=4",))
    whole = nestling.run(small(Named(NAME, QUICK), rounds=4, **changes), out=tmp_path / "whole")
    same_state(parts.federation, whole.federation, 0.0)
    assert parts.metrics[-1]["personal_score"] == whole.metrics[-1]["personal_score"]


@pytest.mark.parametrize("mixed", [False, True])
def test_a_cohort_plays_the_same(mixed: bool) -> None:
    changes: dict[str, Any] = {"fleet": UNLIKE, "participants": 5} if mixed else {"participants": 4}
    runs = [
        nestling.run(small(Named(NAME, QUICK), **changes, engine=EngineConfig(e, 1)))
        for e in ("inline", "cohort")
    ]
    same_state(runs[0].federation, runs[1].federation, 1e-4)


@pytest.mark.slow
def test_it_learns_more_than_everybody_alone() -> None:
    found = learned(Named(NAME), engine=EngineConfig("cohort", 1))
    assert mean(found) > alone(engine=EngineConfig("cohort", 1)) + 0.05 and mean(found) > 0.5


@pytest.mark.slow
def test_unlike_networks_learn_with_a_common_classifier() -> None:
    """No more is claimed: a classifier that is replaced every round costs more than it teaches in
    so few rounds of skewed data."""
    found = unlike(Named(NAME), engine=EngineConfig("cohort", 1))
    assert (
        mean(found) > 0.5
        and mean(found)
        > alone("personal_score", **{**SETTING, "engine": EngineConfig("cohort", 1)}) - 0.12
    )

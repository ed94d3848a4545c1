"""FedFTG: what it is without fine-tuning, its class weights and coefficients by hand, bytes, state,
and that fine-tuning helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import nestling
from nestling import EngineConfig, FleetConfig, InputError, Named, SplitConfig, Tier, Train
from nestling.message import Message
from nestling.methods import Reply
from nestling.methods.distill.fedftg import FedFTG, hardness
from nestling.methods.distill.generated import asked, learner, noise
from nestling.models.generators import codes
from nestling.runs.assemble import assemble
from nestling.runs.federation import Federation
from nestling.seeds import torch_seeded
from nestling.training.optimisers import Optim
from nestling.views import State
from tests.methods.learning import learned, mean
from tests.small import small

EQUAL = FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=4),))
QUICK: dict[str, Any] = {"iterations": 2, "student_steps": 2, "batch": 8, "channels": 4, "nz": 10}


def quick(**changes: Any) -> FedFTG:
    return FedFTG(**{**QUICK, **changes})


def weights_after(method: Any, **changes: Any) -> State:
    return dict(nestling.run(small(method, **changes)).federation.method.weights)


def equal(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], t) for name, t in b.items())


def federation_of(method: FedFTG, **changes: Any) -> Federation:
    return assemble(small(method, **changes))[1]


def replies_of(
    federation: Federation, counts: dict[int, list[int]], broken: int = -1
) -> list[Reply]:
    """Replies of clients that trained nothing, but moved every number they got; `broken` moved it
    far."""
    replies = []
    for client, classes in counts.items():
        device = federation.world.device(client)
        piece = federation.method.piece(device, 1)
        sent = federation.method.send(device, piece, 1)
        torch.manual_seed(client)
        moved = {
            name: t + (5.0 if client == broken else 0.1) * torch.randn_like(t)
            for name, t in sent["weights"].items()
        }
        parts = {"weights": moved, "counts": {"classes": torch.tensor(classes, dtype=torch.int32)}}
        replies.append(Reply(device, piece, sent, Message(parts, {"samples": 10})))
    return replies


# -- without fine-tuning ---------------------------------------------------------------------------


def test_without_iterations_it_is_shared_average_bit_for_bit() -> None:
    assert equal(weights_after(quick(iterations=0)), weights_after("shared-average"))
    assert not equal(weights_after(quick()), weights_after("shared-average"))


def test_without_iterations_equal_clients_are_fedavg_bit_for_bit() -> None:
    assert equal(
        weights_after(quick(iterations=0), fleet=EQUAL), weights_after("fedavg", fleet=EQUAL)
    )


def test_counts_that_say_nothing_leave_the_average() -> None:
    federation, none = federation_of(quick()), [0] * 10
    federation.method.merge(replies_of(federation, {0: none, 3: [-5] * 10}), 1)
    plain = federation_of(quick(iterations=0))
    plain.method.merge(replies_of(plain, {0: none, 3: none}), 1)
    assert equal(federation.method.weights, plain.method.weights)
    before = federation.method.weights
    federation.method.merge([], 2)
    assert equal(federation.method.weights, before)


def test_networks_that_share_nothing_are_refused() -> None:
    tiers = (Tier(name="mlp", model="mlp", count=1), Tier(name="main", ratio=1.0, count=1))
    with pytest.raises(InputError, match="FedFTG"):
        assemble(small(quick(), fleet=FleetConfig(tiers=tiers), participants=0))


# -- what travels ----------------------------------------------------------------------------------


def test_the_part_travels_and_the_counts_go_up() -> None:
    result = nestling.run(small(quick()))
    world = result.federation.world
    visits = [client for row in result.metrics for client in row["clients"]]
    parts = 4 * sum(world.cost(world.device(client).piece).params for client in visits)
    assert result.summary["bytes_down"] == parts
    assert result.summary["bytes_up"] == parts + 4 * world.classes * len(visits)
    assert result.summary["refused"] == 0


# -- the losses ------------------------------------------------------------------------------------


def test_class_weights_count_sample_by_sample_in_the_paper_and_on_average_in_the_code() -> None:
    """Two inputs; the client holds only the first one's class, which its model gets right. The
    second, which it gets wrong, must not count: the product of means makes it count half."""
    teacher = student = torch.tensor([[20.0, 0.0], [20.0, 0.0]])
    labels, weight = torch.tensor([0, 1]), torch.tensor([1.0, 0.0])
    assert abs(float(hardness("paper", teacher, student, labels, weight))) < 1e-6
    assert torch.isclose(
        hardness("code", teacher, student, labels, weight), torch.tensor(0.5 * 10.0)
    )


def test_hard_inputs_by_hand() -> None:
    """A sure teacher, a student without a clue: KL = log 2 a sample (no mean over classes), ℓ1 of
    logits 30/2 (a mean over them)."""
    teacher, student = torch.tensor([[30.0, 0.0]]), torch.zeros(1, 2)
    labels, weight = torch.tensor([0]), torch.tensor([0.5])
    assert torch.isclose(
        hardness("paper", teacher, student, labels, weight), -0.5 * torch.tensor(2.0).log()
    )
    assert torch.isclose(
        hardness("code", teacher, student, labels, weight), torch.tensor(-0.5 * 15.0)
    )


def test_in_the_code_the_distance_is_no_way_to_move_the_teacher() -> None:
    teacher, student = torch.zeros(1, 2, requires_grad=True), torch.tensor([[3.0, 0.0]])
    labels, weight = torch.tensor([0]), torch.tensor([1.0])
    plain = torch.autograd.grad(F.cross_entropy(teacher, labels), teacher)[0]
    found = {
        c: torch.autograd.grad(hardness(c, teacher, student, labels, weight), teacher)[0]
        for c in ("code", "paper")
    }
    assert torch.equal(found["code"], plain)
    assert not torch.allclose(found["paper"], plain)


def test_the_students_step_by_hand() -> None:
    """One batch, one step: lr 0.1 on the mean over inputs and classes of −Σ_k a_k,y·softmax t_k ·
    log softmax s."""
    counts = {0: [9, 0, 3, *[0] * 7], 1: [1, 4, 1, *[0] * 7]}
    federation = federation_of(quick(iterations=1, student_steps=1, batch=16), fleet=EQUAL)
    method, world = federation.method, federation.world
    replies = replies_of(federation, counts)
    plain = federation_of(quick(iterations=0), fleet=EQUAL)
    plain.method.merge(replies_of(plain, counts), 1)
    method.merge(replies, 1)
    share = torch.zeros(2, 10)
    share[0, :3], share[1, :3] = torch.tensor([0.9, 0.0, 0.75]), torch.tensor([0.1, 1.0, 0.25])
    with torch_seeded(world.seed, "fedftg", 1):
        labels = torch.multinomial(
            torch.tensor([10.0, 4.0, 4.0, *[0.0] * 7], dtype=torch.float64), 16, replacement=True
        )
        z = noise(16, method.nz, world)
    assert int(labels.max()) <= 2  # of classes that nobody holds, nothing is made
    with torch.no_grad():
        x = learner(world, method.network, method.generator, Optim())(codes(z, labels, 10))
        said = [F.softmax(teacher(x), dim=-1) for teacher in asked(world, replies)]
        target = sum(
            share[k][labels][:, None] * probabilities for k, probabilities in enumerate(said)
        )
    leaves = {name: t.clone().requires_grad_() for name, t in plain.method.weights.items()}
    said = torch.func.functional_call(world.main.network(world.main.full).train(), leaves, (x,))
    grads = torch.autograd.grad(
        (-F.log_softmax(said, dim=-1) * target).mean(), list(leaves.values())
    )
    for (name, start), grad in zip(plain.method.weights.items(), grads, strict=True):
        assert torch.allclose(method.weights[name], start - 0.1 * grad, atol=1e-6)
        assert torch.allclose(method.weights[name] - start, -0.1 * grad, atol=2e-7, rtol=1e-2)


def test_who_holds_nothing_has_no_say() -> None:
    """A client without samples of any class that is made counts for nothing, whatever its model
    says."""
    found = []
    for broken in (-1, 1):
        federation = federation_of(quick(), fleet=EQUAL)
        replies = replies_of(federation, {0: [3] * 10, 1: [0] * 10}, broken)
        method = federation.method
        with torch_seeded(0, "test"):
            method._tune(
                replies,
                torch.stack([r.message["counts"]["classes"] for r in replies]).double(),
                1.0,
            )
        found.append(dict(method.weights))
    assert equal(*found)


def test_both_learning_rates_fall() -> None:
    moved = {}
    for round in (1, 2):
        federation = federation_of(quick(decay=1e-6), fleet=EQUAL)
        method, first, plain = (
            federation.method,
            dict(federation.method.generator),
            federation_of(quick(iterations=0), fleet=EQUAL),
        )
        for f in (federation, plain):
            f.method.merge(replies_of(f, {0: [3] * 10, 1: [1] * 10}), round)
        student = max(
            float((t - plain.method.weights[n]).abs().max()) for n, t in method.weights.items()
        )
        moved[round] = (
            student,
            max(float((t - first[n]).abs().max()) for n, t in method.generator.items()),
        )
    assert all(late < 1e-4 * early for early, late in zip(moved[1], moved[2], strict=True))


# -- parts of one network --------------------------------------------------------------------------


def test_parts_stay_nested_when_the_server_fine_tunes() -> None:
    """What a small part may not read is zero after it as before, and every part takes its turn."""
    federation = nestling.run(small(quick(), participants=4)).federation
    method = federation.method
    assert method.masks and all(
        bool((method.weights[name][~mask] == 0).all()) for name, mask in method.masks.items()
    )
    plain = nestling.run(small(quick(iterations=0), participants=4)).federation
    part = federation.world.device(0).piece.view
    small_one, averaged = (part.extract(f.method.weights) for f in (federation, plain))
    assert any(not torch.equal(small_one[name], averaged[name]) for name in averaged)


def test_running_statistics_are_those_of_the_clients() -> None:
    """What is made is no data: the statistics that the global model is tested with must not see
    it."""
    tracked = {"model": Named("tinycnn", {"channels": [8, 16, 16], "norm": "tracked"}), "rounds": 1}
    tuned, plain = (weights_after(quick(iterations=n), **tracked) for n in (2, 0))
    buffers = [name for name in plain if "running" in name]
    assert buffers and equal(*({name: state[name] for name in buffers} for state in (tuned, plain)))
    assert not equal(tuned, plain)


# -- state, engines --------------------------------------------------------------------------------


def test_the_generator_goes_on_where_it_was() -> None:
    found = []
    for again in (False, True):
        federation = federation_of(quick())
        method, first = federation.method, dict(federation.method.generator)
        replies = replies_of(federation, {0: [3] * 10, 3: [2] * 10})
        method.merge(replies, 1)
        assert not equal(method.generator, first)
        if again:
            method.restore({**method.state(), "generator": first})
        method.merge(replies, 2)
        found.append(dict(method.weights))
    assert not equal(*found)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    method = Named("nestling.methods.distill.fedftg:FedFTG", {**QUICK, "compat": "code"})
    whole = nestling.run(small(method, rounds=3)).federation.method.state()
    nestling.run(small(method, rounds=2), out=tmp_path / "a")
    resumed = nestling.resume(tmp_path / "a", overrides=("rounds=3",)).federation.method.state()
    assert whole.keys() == resumed.keys() == {"weights", "generator"}
    assert all(equal(resumed[part], state) for part, state in whole.items())


def test_a_stack_of_clients_gives_the_same() -> None:
    gentle = {"train": Train(epochs=1, batch=20, lr=0.01, momentum=0.0), "participants": 4}
    plain, stacked = (
        nestling.run(
            small(quick(), **gentle, engine=EngineConfig(name, workers=1))
        ).federation.method.state()
        for name in ("inline", "cohort")
    )
    for part, state in plain.items():
        assert all(torch.allclose(t, stacked[part][name], atol=1e-4) for name, t in state.items())


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"compat": "both"}, "method.compat"),
        ({"iterations": -1}, "method.iterations"),
        ({"student_steps": -1}, "method.student_steps"),
        ({"lr": 0.0}, "method.lr"),
        ({"decay": 0.0}, "method.decay"),
        ({"generator_lr": 0.0}, "method.generator_lr"),
        ({"batch": 1}, "method.batch"),
        ({"nz": 0}, "method.nz"),
        ({"channels": 0}, "method.channels"),
        ({"inner": -1.0}, "method.inner"),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as error:
        FedFTG(**options)
    assert error.value.field == field


# -- learning --------------------------------------------------------------------------------------


UNEVEN = SplitConfig(kind="dirichlet", alpha=0.1, size=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fleet", "baseline", "rounds"), [("equal", "fedavg", 6), ("parts", "shared-average", 4)]
)
def test_fine_tuning_helps_where_clients_have_few_classes(
    fleet: str, baseline: str, rounds: int
) -> None:
    """Equal clients, as in the paper, and parts of one network: better than the mean alone with
    every seed."""
    tiers = (
        {"fleet": FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=9),))}
        if fleet == "equal"
        else {}
    )
    tuned, plain = (learned(m, split=UNEVEN, rounds=rounds, **tiers) for m in (FedFTG(), baseline))
    assert all(ours > theirs for ours, theirs in zip(tuned, plain, strict=True))
    assert mean(tuned) > mean(plain) + 0.04

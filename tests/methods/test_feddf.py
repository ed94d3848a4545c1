"""FedDF: what it is without distillation, what students are fitted to, the validation set, bytes,
and learning."""

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
    Experiment,
    FleetConfig,
    InputError,
    Named,
    SplitConfig,
    Tier,
    Train,
)
from nestling.methods import Reply
from nestling.methods.distill.feddf import FedDF
from nestling.runs.assemble import assemble
from nestling.runs.federation import Federation
from nestling.training.distiller import logits_of
from nestling.views import Contribution, State, merge
from tests.methods.learning import SEEDS, experiment, mean
from tests.methods.mixed import SETTING, clearly_above, goes_on_where_it_stood, same_in_a_stack
from tests.methods.test_methods import MIXED, equal, one_round
from tests.small import small

NAME = "nestling.methods.distill.feddf:FedDF"
QUICK = {"steps": 12, "every": 4, "patience": 8}


def quick(**options: Any) -> Named:
    return Named(NAME, {**QUICK, **options})


def merged(replies: list[Reply], federation: Federation) -> dict[str, State]:
    """The plain average of every architecture, by hand."""
    found = {}
    for name, reference in federation.world.references.items():
        own = [r for r in replies if r.piece.reference is reference]
        given = [Contribution(r.piece.view, r.message["weights"], float(r.samples)) for r in own]
        found[name] = merge(reference.initial, given)
    return found


def test_without_steps_it_is_the_average_of_every_architecture_bit_for_bit() -> None:
    federation, replies = one_round(small(FedDF(steps=0), fleet=MIXED), [0, 1, 2, 3])
    expected = merged(replies, federation)
    federation.method.merge(replies, 1)
    for name, state in federation.method.weights.items():
        assert equal(dict(state), dict(expected[name])) and not equal(
            dict(state), dict(federation.world.references[name].initial)
        )


def test_without_steps_on_one_network_it_is_fedavg() -> None:
    alike = FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=4),))
    ours, theirs = (
        nestling.run(small(m, fleet=alike)).federation.method.global_model()
        for m in (quick(steps=0), "fedavg")
    )
    assert ours is not None and theirs is not None and equal(ours.state, theirs.state)


def test_an_architecture_that_nobody_sent_is_taught_by_the_others() -> None:
    federation, _ = one_round(small(quick(), fleet=MIXED), [])
    others = [c for c in range(4) if federation.world.fleet.tier_of(c).name != "small"]
    federation, replies = one_round(small(quick(), fleet=MIXED), others)
    before = dict(federation.method.weights["small"])
    federation.method.merge([], 1)
    assert equal(before, federation.method.weights["small"])
    federation.method.merge(replies, 1)
    assert not equal(before, federation.method.weights["small"])


TEACHERS = torch.tensor([[[4.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]])


def test_the_mean_of_logits_is_not_the_mean_of_losses() -> None:
    paper, code = FedDF().targets(TEACHERS, [1, 1]), FedDF(compat="code").targets(TEACHERS, [1, 1])
    assert torch.allclose(paper, torch.tensor([[2.0, 0.5, 0.0]]))
    assert torch.allclose(paper.softmax(-1), torch.tensor([[0.7361, 0.1643, 0.0996]]), atol=1e-4)
    assert torch.allclose(code.softmax(-1), torch.tensor([[0.5883, 0.2969, 0.1148]]), atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("weighting", ["uniform", "samples", "variance"])
def test_the_code_variant_has_the_gradient_of_the_average_of_losses(
    temperature: float, weighting: str
) -> None:
    torch.manual_seed(0)
    teachers, samples = 5 * torch.randn(4, 8, 5), [1, 2, 3, 4]
    weights = {
        "uniform": torch.ones(4, 1),
        "samples": torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
        "variance": teachers.var(-1),
    }
    share = weights[weighting] / weights[weighting].sum(0)

    def gradient(loss: Any) -> Tensor:
        student = torch.linspace(-2, 2, 40).reshape(8, 5).requires_grad_()
        return torch.autograd.grad(loss((student / temperature).log_softmax(-1)), student)[0]

    def each(log_q: Tensor) -> Tensor:
        losses = torch.stack(
            [
                F.kl_div(log_q, (t / temperature).softmax(-1), reduction="none").sum(-1)
                for t in teachers
            ]
        )
        return (share * losses).sum(0).mean()

    targets = FedDF(compat="code", temperature=temperature, weighting=weighting).targets(
        teachers, samples
    )
    at_once = gradient(
        lambda log_q: F.kl_div(log_q, (targets / temperature).softmax(-1), reduction="batchmean")
    )
    assert torch.allclose(gradient(each), at_once, atol=1e-6)


def test_targets_stay_finite_where_a_teacher_is_quite_sure_or_says_nothing() -> None:
    extreme = torch.tensor([[[1000.0, -1000.0]], [[1000.0, -1000.0]]])
    assert bool(FedDF(compat="code").targets(extreme, [1, 1]).isfinite().all())
    silent = FedDF(weighting="variance").targets(torch.zeros(3, 2, 4), [1, 1, 1])
    assert torch.equal(silent, torch.zeros(2, 4))


def test_a_step_is_one_of_adam_down_the_gap_to_all_received_models() -> None:
    """One whole batch, one network, no early stop: the student's change follows from the loss
    alone."""
    alike = FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=4),))
    federation, replies = one_round(
        small(FedDF(steps=1, batch=10_000, validation=0.0, clip=5.0), fleet=alike), [0, 1, 2]
    )
    world = federation.world
    assert world.public is not None
    start = merged(replies, federation)["main"]
    teacher = torch.stack(
        [
            logits_of(world.main.network(world.main.full, r.message["weights"]), world.public)
            for r in replies
        ]
    ).mean(0)
    leaves = {name: t.clone().requires_grad_() for name, t in start.items()}
    said = torch.func.functional_call(world.main.network(world.main.full), leaves, (world.public,))
    F.kl_div(said.log_softmax(-1), teacher.softmax(-1), reduction="batchmean").backward()
    torch.nn.utils.clip_grad_norm_(list(leaves.values()), 5.0)
    torch.optim.Adam(leaves.values(), lr=1e-3).step()
    federation.method.merge(replies, 1)
    moved = 0.0
    for name, t in federation.method.weights["main"].items():
        # Adam's first step is a sign: where a gradient is all but nothing, rounding decides.
        sure = leaves[name].grad.abs() > 1e-6  # type: ignore[union-attr]
        assert torch.allclose(t[sure], leaves[name].detach()[sure], atol=2e-5)
        moved = max(moved, float((t - start[name]).abs().max()))
    assert moved > 5e-4


def test_the_validation_rows_are_labelled_and_no_input_of_the_distillation() -> None:
    _, federation = assemble(small(quick(validation=0.25)))
    method, world = federation.method, federation.world
    assert (
        isinstance(method, FedDF)
        and method.judged is not None
        and method.inputs is not None
        and world.public is not None
    )
    x, y = method.judged
    assert len(x) == len(y) == 25 and len(method.inputs) == 75 and len(world.public) == 100
    rows = {
        t.numpy().tobytes(): int(label)
        for t, label in zip(world.public, world.public_labels, strict=True)
    }  # type: ignore[arg-type]
    assert all(rows[t.numpy().tobytes()] == int(label) for t, label in zip(x, y, strict=True))
    assert not {t.numpy().tobytes() for t in x} & {t.numpy().tobytes() for t in method.inputs}


def test_a_distillation_that_spoils_the_mean_is_not_kept() -> None:
    federation, replies = one_round(
        small(FedDF(steps=6, every=2, lr=5.0, validation=0.5), fleet=MIXED), [0, 1, 2, 3]
    )
    expected = merged(replies, federation)
    federation.method._accuracy = lambda reference, view, state: (
        -float(sum(t.float().norm() for t in state.values()))
    )
    federation.method.merge(replies, 1)
    for name, state in federation.method.weights.items():
        assert equal(dict(state), dict(expected[name]))


def test_the_best_student_on_the_validation_set_is_kept_and_patience_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alike = FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=4),))
    settings = FedDF(steps=60, every=1, patience=5, lr=0.05, validation=0.5)
    federation, replies = one_round(
        small(settings, fleet=alike, split=SplitConfig(kind="iid", size=100)), [0, 1]
    )
    method, main, seen = federation.method, federation.world.main, []
    assert isinstance(method, FedDF)
    judge = method._accuracy

    def noting(reference: Any, view: Any, state: Any) -> float:
        seen.append(judge(reference, view, state))
        return seen[-1]

    monkeypatch.setattr(method, "_accuracy", noting)
    method.merge(replies, 1)
    assert judge(main, main.full, method.weights["main"]) == max(seen)
    assert len(seen) == seen.index(max(seen)) + 1 + 5 < 60


def test_without_public_data_it_says_what_it_needs() -> None:
    none = SplitConfig(size=60, public=0.0)
    for method in (quick(), quick(validation=0.0)):
        with pytest.raises(InputError, match=r"split\.public.*noise"):
            nestling.run(small(method, split=none))
    result = nestling.run(small(quick(source="noise", validation=0.0), split=none))
    assert result.federation.world.public is None and result.summary["global_score"]["last"] > 0.1


def test_noise_is_other_noise_every_round_and_may_still_be_validated() -> None:
    result = nestling.run(small(quick(source="noise")))
    method = result.federation.method
    assert isinstance(method, FedDF) and method.inputs is None and method.judged is not None
    plain = nestling.run(small(quick(steps=0))).federation.method
    assert not equal(dict(method.weights["main"]), dict(plain.weights["main"]))


def test_models_at_chance_are_dropped_from_the_average_too() -> None:
    """One client's head points to one class only."""
    alike = FleetConfig(tiers=(Tier(name="all", ratio=1.0, count=4),))
    settings: dict[str, Any] = {
        "fleet": alike,
        "split": SplitConfig(kind="iid", size=400),
        "train": Train(epochs=3),
    }
    federation, replies = one_round(
        small(FedDF(steps=0, drop_worst=True, validation=0.5), **settings), [0, 1]
    )
    assert isinstance(federation.method, FedDF) and federation.method.judged is not None
    y = federation.method.judged[1]
    rare = int(torch.bincount(y, minlength=10).argmin())
    broken = dict(replies[1].message["weights"])
    broken["head.bias"] = torch.eye(10)[rare] * 1e4
    replies[1].message.parts["weights"] = broken  # type: ignore[index]
    federation.method.merge(replies, 1)
    assert equal(dict(federation.method.weights["main"]), dict(replies[0].message["weights"]))
    federation.method.merge(replies[1:], 2)  # where nobody is better than chance all count
    assert equal(dict(federation.method.weights["main"]), broken)


@pytest.mark.parametrize(
    "options",
    [
        {"steps": -1},
        {"batch": 0},
        {"lr": 0.0},
        {"temperature": 0.0},
        {"clip": -1.0},
        {"validation": 0.6},
        {"every": 0},
        {"patience": -1},
        {"source": "air"},
        {"noise": 0},
        {"weighting": "age"},
        {"compat": "mine"},
        {"drop_worst": True, "validation": 0.0},
    ],
)
def test_bad_settings_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"method.{next(iter(options))}"):
        FedDF(**options)


def test_what_travels_are_the_networks() -> None:
    result = nestling.run(small(quick(), fleet=MIXED))
    world, size = result.federation.world, 0
    for row in result.metrics:
        for client in row["clients"]:
            piece = world.device(client).piece
            size += 4 * sum(t.numel() for t in piece.view.extract(piece.reference.initial).values())
    assert result.summary["bytes_up"] == result.summary["bytes_down"] == size


def test_devices_with_one_part_get_one_message() -> None:
    _, federation = assemble(small(quick(), fleet=MIXED))
    method, world = federation.method, federation.world
    own = [c for c in range(4) if world.fleet.tier_of(c).name == "small"]
    first, second = (method.send(world.device(c), world.device(c).piece, 1) for c in own)
    assert first is second
    method.restore(method.state())
    assert method.send(world.device(own[0]), world.device(own[0]).piece, 2) is not first


def test_it_goes_on_where_it_stood(tmp_path: Path) -> None:
    goes_on_where_it_stood(partial(small, quick(), fleet=MIXED), tmp_path)


def test_stacks_of_clients_give_the_same() -> None:
    same_in_a_stack(partial(small, quick(), fleet=MIXED))


def test_running_statistics_follow_the_distilled_weights() -> None:
    tracked = Named("tinycnn", {"channels": [8, 16, 16], "norm": "tracked"})
    after = {
        steps: nestling.run(
            small(quick(steps=steps, validation=0.0), model=tracked, rounds=1)
        ).federation.method.weights
        for steps in (0, 12)
    }
    moving = [name for name in after[0]["main"] if name.endswith("running_mean")]
    assert moving and not any(
        torch.equal(after[0]["main"][name], after[12]["main"][name]) for name in moving
    )


LEARNING: dict[str, Any] = {
    **SETTING,
    "model": Named("mlp", {"hidden": [32]}),
    "fleet": FleetConfig(
        tiers=(
            Tier(name="mlp", ratio=1.0, count=3),
            Tier(name="cnn", model="tinycnn", model_options={"channels": [8, 16, 32]}, count=3),
            Tier(name="depthwise", model="dscnn", model_options={"width": 0.25}, count=3),
        )
    ),
    "split": SplitConfig(kind="iid", size=40, public=0.03),
    "rounds": 10,
    "train": Train(epochs=4, batch=20, optimizer="adam", lr=0.006, decay=1.0),
    "evaluate": Evaluation(every=10, clients=9),
    "engine": EngineConfig("cohort", 1),
}
"""Few private rows, and a main network that others know more than: an average of three clients
leaves something to learn."""


@pytest.mark.slow
def test_it_beats_training_alone_and_plain_averages_within_architectures() -> None:
    def learned(method: Any) -> tuple[list[float], list[float]]:
        runs: list[Experiment] = [experiment(method, seed, **LEARNING) for seed in SEEDS]
        found = [nestling.run(run).summary for run in runs]
        return tuple(
            [s[kind]["last"] for s in found] for kind in ("personal_score", "global_score")
        )  # type: ignore[return-value]

    alone, plain, ours = (
        learned(m)
        for m in ("local", Named(NAME, {"steps": 0}), Named(NAME, {"steps": 20, "batch": 64}))
    )
    assert clearly_above(ours[0], alone[0]) and mean(ours[0]) > mean(plain[0]), (ours, plain, alone)
    assert clearly_above(ours[1], plain[1]) and mean(ours[1]) > 0.65, (ours, plain)

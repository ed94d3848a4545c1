"""Learning rates by round: decay and milestones, a cosine over the run, warm-up before either."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import nestling
from nestling import Evaluation, Train
from nestling.runs.assemble import make_world
from tests.methods.learning import experiment
from tests.small import small


def rates(train: Train, rounds: int) -> list[float]:
    return [train.optim(round).lr for round in range(1, rounds + 1)]


def test_decay_and_milestones_are_as_ever() -> None:
    train = Train(lr=0.1, decay=0.9, milestones=(2,), factor=0.5)
    assert rates(train, 4) == [0.1, 0.1 * 0.9, 0.1 * 0.9**2 * 0.5, 0.1 * 0.9**3 * 0.5]


def test_a_cosine_equals_torchs_over_the_run() -> None:
    optim = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    theirs, expected = torch.optim.lr_scheduler.CosineAnnealingLR(optim, 12), []
    for _ in range(12):
        expected.append(optim.param_groups[0]["lr"])
        optim.step()
        theirs.step()
    assert rates(Train(lr=0.1, schedule="cosine").over(12), 12) == pytest.approx(expected, rel=1e-9)


def test_warm_up_climbs_in_equal_steps_and_then_the_schedule_begins() -> None:
    assert rates(Train(lr=0.1, decay=1.0, warmup=3), 5) == pytest.approx(
        [0.025, 0.05, 0.075, 0.1, 0.1]
    )
    both = rates(Train(lr=0.1, schedule="cosine", warmup=2).over(6), 8)
    assert both[:3] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1])
    assert both[3:6] == pytest.approx(
        [0.05 * (1 + math.cos(math.pi * k / 4)) for k in (1, 2, 3)]
    ) and both[6:] == [0, 0]


def test_the_run_says_how_long_a_cosine_is_unless_the_user_does() -> None:
    for train, span in (
        (Train(schedule="cosine"), 7),
        (Train(schedule="cosine", span=20), 20),
        (Train(), 0),
    ):
        made, _, world = make_world(small(rounds=7, train=train))
        assert world.train.span == span and made.train == train


def test_a_resumed_run_follows_the_same_cosine(tmp_path: Path) -> None:
    train = Train(
        epochs=1, schedule="cosine", warmup=1, span=4, optimizer="adamw", lr=1e-3, weight_decay=0.05
    )
    nestling.run(small(rounds=2, train=train), out=tmp_path / "run")
    parts = nestling.resume(tmp_path / "run", overrides=("rounds=4",)).federation.method.weights
    whole = nestling.run(small(rounds=4, train=train)).federation.method.weights
    assert all(torch.equal(parts[name], t) for name, t in whole.items())


@pytest.mark.parametrize(
    "train",
    [
        Train(lr=0.05, schedule="cosine", warmup=1),
        Train(optimizer="adamw", lr=3e-3, weight_decay=0.01),
    ],
)
def test_it_learns(train: Train) -> None:
    result = nestling.run(
        experiment("fedavg", 0, rounds=8, train=train, evaluate=Evaluation(every=8))
    )
    assert result.summary["global_score"]["last"] > 0.4

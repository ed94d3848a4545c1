"""Server distillation: teachers, source, student, loss, steps, early stop."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.training.distiller import (
    Distillation,
    Student,
    combine,
    distil,
    proxy,
    rows_of,
    whole,
)
from nestling.training.optimisers import Optim

torch.manual_seed(0)
X, TARGETS = torch.randn(40, 6), torch.randn(40, 3)
SETTINGS = Distillation(steps=60, batch=16, temperature=1.0, optim=Optim("adam", 0.05))


def student(optim: Optim = SETTINGS.optim) -> Student:
    torch.manual_seed(1)
    module = nn.Linear(6, 3)
    return Student(module.state_dict(), ("weight", "bias"), whole(module), optim)


def gap(state: dict[str, Tensor]) -> float:
    return float(
        F.kl_div(
            (X @ state["weight"].T + state["bias"]).log_softmax(1),
            TARGETS.softmax(1),
            reduction="batchmean",
        )
    )


def test_a_student_comes_close_to_its_teachers_and_the_start_is_not_touched() -> None:
    pupil = student()
    start = pupil.state()
    kept = {name: t.clone() for name, t in start.items()}
    found = distil(pupil, proxy(X, TARGETS, 16, 0, "test"), SETTINGS, 0, "test")
    assert gap(found) < 0.7 * gap(start)
    assert all(torch.equal(t, kept[name]) for name, t in start.items())


def test_a_step_is_the_gradient_of_the_loss() -> None:
    settings = replace(SETTINGS, steps=1, batch=40, optim=Optim("sgd", 0.5, 0.0))
    pupil = student(settings.optim)
    start = {name: t.clone().requires_grad_() for name, t in pupil.state().items()}
    found = distil(pupil, proxy(X, TARGETS, 40, 0, "test"), settings, 0, "test")
    loss = F.kl_div(
        (X @ start["weight"].T + start["bias"]).log_softmax(1),
        TARGETS.softmax(1),
        reduction="batchmean",
    )
    grads = dict(zip(start, torch.autograd.grad(loss, list(start.values())), strict=True))
    for name, t in start.items():
        assert torch.allclose(found[name], t - 0.5 * grads[name], atol=1e-6)


def test_every_epoch_of_the_proxy_has_every_row_once() -> None:
    rows = torch.cat(list(islice(rows_of(40, 16, 0, "a"), 3)))
    assert sorted(rows.tolist()) == list(range(40))
    assert not torch.equal(rows, torch.cat(list(islice(rows_of(40, 16, 0, "b"), 3))))


def test_the_best_checked_state_is_returned_and_patience_ends_it() -> None:
    scores = iter([0.0, 0.1, 0.9, 0.5, 0.4, 0.3, 0.2])  # the first is that of the start
    seen: list[dict[str, Tensor]] = []

    def check(state: dict[str, Tensor]) -> float:
        seen.append(state)
        return next(scores)

    settings = replace(SETTINGS, steps=60, every=10, patience=20)
    pupil = student()
    best = distil(pupil, proxy(X, TARGETS, 16, 0, "test"), settings, 0, "test", check=check)
    # better at the second, then twenty steps of nothing better
    assert len(seen) == 5 and pupil.steps == 40
    assert all(torch.equal(t, seen[2][name]) for name, t in best.items())


def test_the_rate_falls_along_a_half_cosine() -> None:
    used: list[float] = []

    class Noting(Student):
        def update(self, loss: Tensor) -> None:
            used.append(self.optim.lr)
            super().update(loss)

    module = nn.Linear(6, 3)
    pupil = Noting(module.state_dict(), ("weight",), whole(module), Optim("sgd", 0.2, 0.0))
    distil(
        pupil,
        proxy(X, TARGETS, 16, 0, "t"),
        replace(SETTINGS, steps=4, cosine=True, optim=pupil.optim),
        0,
        "t",
    )
    assert used == pytest.approx(
        [0.2, 0.1 * (1 + math.cos(math.pi / 4)), 0.1, 0.1 * (1 + math.cos(3 * math.pi / 4))]
    )
    # not among the parameters that are trained
    assert torch.equal(pupil.state()["bias"], module.bias.detach())


def test_teachers_are_combined_by_samples_spread_or_equally() -> None:
    sure, unsure = torch.tensor([[4.0, -4.0]]), torch.tensor([[0.1, -0.1]])
    assert torch.allclose(combine([sure, unsure], [1, 3]), (sure + 3 * unsure) / 4)
    assert torch.allclose(combine([sure, unsure], [1, 3], "uniform"), (sure + unsure) / 2)
    spread = [float(t.var()) for t in (sure, unsure)]
    expected = (spread[0] * sure + spread[1] * unsure) / sum(spread)
    assert torch.allclose(combine([sure, unsure], [1, 3], "variance"), expected)
    # Of an input that nobody has anything to say of, all say equally little.
    flat = [torch.tensor([[1.0, 1.0], [4.0, -4.0]]), torch.tensor([[3.0, 3.0], [0.0, 0.0]])]
    assert torch.equal(combine(flat, [1, 3], "variance"), torch.tensor([[2.0, 2.0], [4.0, -4.0]]))

"""What every task measures, against an independent count; its loss, by the type of its targets."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from nestling.tasks import (
    TASKS,
    Classification,
    Forecast,
    MultiLabel,
    NextToken,
    Reconstruction,
    Regression,
    losses,
)
from nestling.tasks.reconstruction import FALSE_ALARMS, partial_area
from nestling.tasks.task import Task, joined, spread

CHANCE = torch.Generator().manual_seed(3)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=CHANCE)


ROWS = 40
VALUES = drawn(ROWS, 3)
ODD = torch.arange(ROWS) % 4 == 0
CASES: dict[str, tuple[Task, torch.Tensor, torch.Tensor]] = {
    "classification": (Classification(5), drawn(ROWS, 5), torch.arange(ROWS) % 5),
    "multi-label": (MultiLabel(), drawn(ROWS, 3), drawn(ROWS, 3) > 0),
    "regression": (
        Regression((1.0, 2.0, 3.0), (2.0, 1.0, 4.0), tuple(VALUES.double().var(0, False).tolist())),
        VALUES + 0.5 * drawn(ROWS, 3),
        VALUES,
    ),
    "forecast": (Forecast((0.0,) * 3, (1.0,) * 3, (1.0,) * 3), drawn(ROWS, 3), VALUES),
    "reconstruction": (Reconstruction(ODD), drawn(ROWS, 3), VALUES),
    "next-token": (NextToken(), drawn(ROWS, 6, 7), torch.arange(ROWS * 6).reshape(ROWS, 6) % 7),
}
"""Of every task: itself, outputs, targets."""


def test_there_is_a_case_for_every_task() -> None:
    assert set(CASES) == set(TASKS)


@pytest.mark.parametrize("name", CASES)
def test_losses_rows_and_stacks(name: str) -> None:
    """The loss of a row does not depend on the others; in a stack of models it is that of each; the
    answers have it; the shape asked of networks is that of the outputs."""
    task, outputs, y = CASES[name]
    found = losses(outputs, y)
    assert found.shape == (ROWS,)
    assert torch.allclose(found[7:9], losses(outputs[7:9], y[7:9]), atol=1e-6)
    both = torch.stack([outputs, -outputs])
    each = vmap(losses)(both, torch.stack([y, y]))
    assert torch.allclose(each[1], losses(-outputs, y), atol=1e-6)
    told = task.answers(both, y, keep=True)
    assert torch.allclose(told.loss, each, atol=1e-6)
    assert task.shape(y, outputs.shape[-1]) == tuple(outputs.shape)
    one, other = told.each()
    assert torch.equal(other.found, task.answers(-outputs, y).found)
    halves = [
        task.answers(both[:, rows], y[rows], keep=True) for rows in (slice(9), slice(9, ROWS))
    ]
    again = joined(halves, along=1)
    assert torch.equal(again.found, told.found) and torch.equal(again.outputs, told.outputs)  # type: ignore[arg-type]
    metrics, _ = task.measured(joined([one, other]), y.repeat(2, *(1 for _ in y.shape[1:])))
    assert metrics["test_loss"] is not None


@pytest.mark.parametrize("name", CASES)
def test_what_is_perfect_scores_one(name: str) -> None:
    task, _, y = CASES[name]
    if y.is_floating_point():
        perfect = y + 0.1 * ODD[:, None]  # only the anomalous rows are rebuilt badly
        if not isinstance(task, Reconstruction):
            perfect = y
    else:
        perfect = 20 * (F.one_hot(y).float() if y.dtype == torch.int64 else y.float() - 0.5)
    right = task.right(task.answers(perfect, y), y)
    assert right.shape == (ROWS,) and float(right.double().mean()) == pytest.approx(1)


def test_flags_beside_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    task, outputs, y = CASES["multi-label"]
    answers = task.answers(outputs, y)
    told, known = (outputs > 0).numpy(), y.numpy()
    exact = float(task.right(answers, y).double().mean())
    assert exact == pytest.approx(sklearn.accuracy_score(known, told))
    metrics, by_class = task.measured(answers, y)
    assert metrics["macro_f1"] == pytest.approx(sklearn.f1_score(known, told, average="macro"))
    assert metrics["label_accuracy"] == pytest.approx((known == told).mean())
    assert by_class["recall"] == pytest.approx(sklearn.recall_score(known, told, average=None))
    loss = sklearn.log_loss(known.reshape(-1), outputs.sigmoid().reshape(-1).double().numpy())
    assert metrics["test_loss"] == pytest.approx(loss, rel=1e-5)


def test_values_beside_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    task, outputs, y = CASES["regression"]
    assert isinstance(task, Regression)
    answers = task.answers(outputs, y)
    score = float(task.right(answers, y).double().mean())
    assert score == pytest.approx(sklearn.r2_score(y.numpy(), outputs.numpy()), abs=1e-5)
    mean, scale = np.array(task.mean), np.array(task.scale)
    known, told = (part.double().numpy() * scale + mean for part in (y, outputs))
    metrics, _ = task.measured(answers, y)
    assert metrics["mae"] == pytest.approx(sklearn.mean_absolute_error(known, told), rel=1e-5)
    rmse = math.sqrt(sklearn.mean_squared_error(known, told))
    assert metrics["rmse"] == pytest.approx(rmse, rel=1e-5)
    always = task.answers(torch.zeros_like(y) + y.mean(0), y)
    assert float(task.right(always, y).double().mean()) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("ties", [False, True])
def test_anomalies_beside_scikit_learn(ties: bool) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    task = Reconstruction(ODD)
    y = torch.zeros(ROWS, 2)
    error = drawn(ROWS).abs() + 0.4 * ODD
    error = (4 * error).round() / 4 if ties else error
    answers = task.answers(error.sqrt()[:, None].repeat(1, 2), y)
    known, told = ODD.numpy(), answers.loss.numpy()
    area = sklearn.roc_auc_score(known, told)
    right = task.right(answers, y)
    assert float(right.mean()) == pytest.approx(area)
    assert (
        float(right[ODD].mean()) == float(right[~ODD].mean())
        or abs(float(right[ODD].mean() - right[~ODD].mean())) < 1e-9
    )
    metrics, _ = task.measured(answers, y)
    part = sklearn.roc_auc_score(known, told, max_fpr=FALSE_ALARMS)
    assert metrics["auroc"] == pytest.approx(area) and metrics["pauc"] == pytest.approx(part)
    assert partial_area(answers.loss.double(), ODD, 1 - 1e-12) == pytest.approx(area)
    assert metrics["test_loss"] == pytest.approx(told[~known].mean())


def test_texts_by_hand() -> None:
    task, outputs, y = CASES["next-token"]
    chances = outputs.log_softmax(-1)
    each = [-float(chances[r, s, y[r, s]]) for r in range(ROWS) for s in range(6)]
    metrics, _ = task.measured(task.answers(outputs, y), y)
    assert metrics["perplexity"] == pytest.approx(math.exp(sum(each) / len(each)), rel=1e-5)
    hits = [(outputs[r, s].argmax() == y[r, s]).item() for r in range(ROWS) for s in range(6)]
    right = task.right(task.answers(outputs, y), y)
    assert float(right.mean()) == pytest.approx(sum(hits) / len(hits))
    hopeless = task.answers(1e4 * outputs, y)
    assert task.measured(hopeless, y)[0]["perplexity"] is None  # beyond what a float holds


def test_a_model_that_diverged_beside_others() -> None:
    """Values may be missed by more than a float holds: such a score is no number of the log."""
    told = spread([-math.inf, 0.5, 0.75])
    assert told["personal_worst"] is None and told["personal_variance"] is None
    assert spread([0.25, 0.5])["personal_worst"] == 0.25

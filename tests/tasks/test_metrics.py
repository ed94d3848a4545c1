"""Metrics from one pass: right against an independent count, in every file, and a user's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import nestling
from nestling import Evaluation, InputError
from nestling.report.metrics_part import metrics_line
from nestling.runfiles import last_and_best
from nestling.tasks.classification import (
    BINS,
    Classification,
    calibration_error,
    confusion_of,
    macro_f1,
    recall,
)
from nestling.tasks.task import Answers, joined, spread
from tests.small import small

Y = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 2, 0])
LOGITS = torch.randn(10, 4, generator=torch.Generator().manual_seed(5))
TASK = Classification(4)


def test_the_matrix_and_what_follows_from_it() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    found = TASK.answers(LOGITS, Y)
    y, told = Y.numpy(), LOGITS.argmax(1).numpy()
    matrix = confusion_of(found.found, Y, 4)
    assert np.array_equal(matrix, sklearn.confusion_matrix(y, told, labels=range(4)))
    assert matrix.diagonal().sum() / 10 == pytest.approx(sklearn.accuracy_score(y, told))
    with np.errstate(all="ignore"):
        assert macro_f1(matrix) == pytest.approx(sklearn.f1_score(y, told, average="macro"))
    by_hand = sklearn.recall_score(y, told, labels=range(3), average=None, zero_division=0)
    assert recall(matrix)[:3] == pytest.approx(by_hand)
    assert recall(matrix)[3] is None  # no row is of the fourth class


def test_loss_and_confidence_are_those_of_the_softmax() -> None:
    found = TASK.answers(LOGITS, Y)
    assert torch.allclose(
        found.loss, torch.nn.functional.cross_entropy(LOGITS, Y, reduction="none")
    )
    assert torch.allclose(found.sure, LOGITS.softmax(1).max(1).values)
    assert found.outputs is None and TASK.answers(LOGITS, Y, keep=True).outputs is LOGITS


def test_calibration_by_hand() -> None:
    """Two bins: nine tenths sure and right half the time; sure and right always."""
    classes = torch.tensor([0, 1, 0, 0])
    sure = torch.tensor([0.9, 0.9, 1.0, 1.0])
    answers = Answers(classes, torch.zeros(4), sure)
    assert calibration_error(answers, torch.zeros(4, dtype=torch.long)) == pytest.approx(0.2)
    by_loop = 0.0
    found = TASK.answers(LOGITS, Y)
    right = TASK.right(found, Y).double()
    for k in range(BINS):
        inside = (found.sure >= k / BINS) & (found.sure < (k + 1) / BINS)
        if inside.any():
            by_loop += abs(float((right[inside] - found.sure[inside].double()).sum())) / 10
    assert calibration_error(found, Y) == pytest.approx(by_loop)


def test_a_broken_model_has_no_loss_but_a_file_of_it_can_be_read() -> None:
    metrics, by_class = TASK.measured(TASK.answers(torch.full((10, 4), torch.nan), Y), Y)
    assert metrics["test_loss"] is None
    json.loads(json.dumps([metrics, by_class], allow_nan=False))


def test_several_models() -> None:
    both = TASK.answers(torch.stack([LOGITS, -LOGITS]), Y, keep=True)
    one, other = both.each()
    assert torch.equal(other.found, (-LOGITS).argmax(1)) and torch.equal(one.loss, both.loss[0])
    together = joined([one, other])
    assert torch.equal(together.loss, torch.cat([one.loss, other.loss]))
    assert together.outputs is not None and len(together.outputs) == 20


def test_spread_and_best() -> None:
    found = spread([0.5, 0.7, 0.9])
    assert found["personal_worst"] == 0.5 and found["personal_variance"] == pytest.approx(0.08 / 3)
    assert found["personal_tenth"] == pytest.approx(0.54) and spread([]) == {}
    points = [(1, 0.4), (2, 0.2), (3, None), (4, 0.3)]
    assert last_and_best(points, least=True) == {"last": 0.3, "best": 0.2, "best_round": 2}
    assert last_and_best(points) == {"last": 0.3, "best": 0.4, "best_round": 1}


# In a run


def half_right(y: np.ndarray, found: np.ndarray) -> float:
    return float((y == found).mean()) / 2


def surest(y: np.ndarray, found: np.ndarray, logits: np.ndarray) -> float:
    assert logits.shape == (len(y), 10) and np.array_equal(logits.argmax(1), found)
    return float(logits.max())


def broken(y: np.ndarray, found: np.ndarray) -> float:
    raise ValueError("not today")


def test_every_file_has_them_and_a_users_own(tmp_path: Path) -> None:
    settings = Evaluation(every=2, clients=4, metrics=(half_right, surest))
    result = nestling.run(small("heterofl", rounds=3, evaluate=settings), out=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert lines[0]["metrics"] == {} and lines[0]["by_class"] == {}  # a round without a test
    last = lines[-1]
    assert list(last["metrics"]) == [
        "macro_f1", "test_loss", "calibration_error", "personal_worst", "personal_tenth",
        "personal_variance", "half_right", "surest",
    ]  # fmt: skip
    matrix = np.array(last["by_class"]["confusion"])
    assert matrix.shape == (10, 10) and matrix.sum() == 2000
    assert matrix.diagonal().sum() / 2000 == pytest.approx(last["global_score"])
    assert last["metrics"]["half_right"] == pytest.approx(last["global_score"] / 2)
    assert last["by_class"]["recall"] == pytest.approx(matrix.diagonal() / matrix.sum(1))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"]["test_loss"]["last"] == last["metrics"]["test_loss"]
    assert summary["by_class"] == last["by_class"]
    page = (tmp_path / "run" / "report.html").read_text()
    for words in ("Macro F1", "Calibration error", "half_right", "c-confusion", 'href="#metrics"'):
        assert words in page, words
    assert "macro F1" in metrics_line(summary) and "worst client" in metrics_line(summary)
    assert result.metrics[-1]["metrics"] == last["metrics"]
    # the folder names code of the user's: it goes on where the user names it too, and opens anyhow
    names = [f"{__name__}:half_right", f"{__name__}:surest"]
    with pytest.raises(InputError, match="--trust"):
        nestling.resume(tmp_path / "run", overrides=("rounds=4",))
    with nestling.runs.run.opened(tmp_path / "run"):
        pass
    more = nestling.resume(tmp_path / "run", overrides=("rounds=4",), trust=names)
    assert more.metrics[-1]["metrics"]["half_right"] > 0


def test_metrics_are_told_with_the_score_of_the_task() -> None:
    summary = {
        "task": {"score": "AUROC"},
        "metrics": {name: {"last": 0.5} for name in ("auroc", "macro_f1", "personal_worst")},
    }
    told = metrics_line(summary)
    assert told == "AUROC 50.00%; macro F1 50.00%; personal AUROC, the worst client 50.00%"


def test_clients_without_a_global_model_are_measured_together() -> None:
    result = nestling.run(
        small("local", rounds=1, evaluate=Evaluation(metrics=(surest,), clients=4))
    )
    (row,) = result.metrics
    matrix = np.array(row["by_class"]["confusion"])
    assert matrix.sum() == 2000 * 3  # one client of each tier is tested
    assert matrix.diagonal().sum() / matrix.sum() == pytest.approx(row["global_score"])
    assert row["metrics"]["surest"] is not None


def test_looking_closer_changes_no_bit() -> None:
    plain, closer = (
        nestling.run(small("heterofl", rounds=2, evaluate=Evaluation(clients=4, metrics=own)))
        for own in ((), (half_right, surest))
    )
    one, other = (r.model.state_dict() for r in (plain, closer) if r.model is not None)
    assert all(torch.equal(t, other[n]) for n, t in one.items())


@pytest.mark.parametrize(
    ("metrics", "word"),
    [
        ((broken,), "not today"),
        ((f"{__name__}:nothing",), "no function"),
        (("half_right",), "does not name a function"),
        (("no_such_module:f",), "cannot import"),
        ((half_right, f"{__name__}:half_right"), "two metrics"),
        ((lambda y: 1.0,), "raised TypeError"),
    ],
)
def test_bad_metrics(metrics: tuple[object, ...], word: str) -> None:
    with pytest.raises(InputError, match=word) as caught:
        nestling.run(small("fedavg", rounds=1, evaluate=Evaluation(metrics=metrics)))  # type: ignore[arg-type]
    assert caught.value.field == "evaluate.metrics"


def test_those_of_scikit_learn_serve_by_their_names() -> None:
    pytest.importorskip("sklearn")
    named = ("sklearn.metrics:cohen_kappa_score",)
    experiment = small("fedavg", rounds=1, evaluate=Evaluation(metrics=named, clients=4))
    assert nestling.Experiment.from_table(experiment.to_table()) == experiment
    assert "cohen_kappa_score" in nestling.run(experiment).metrics[0]["metrics"]


def test_a_large_matrix_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nestling.runs.accounting.MOST_CLASSES", 9)
    rows = nestling.run(small("fedavg", rounds=2)).metrics
    assert "confusion" not in rows[0]["by_class"] and "recall" in rows[0]["by_class"]
    assert "confusion" in rows[1]["by_class"]

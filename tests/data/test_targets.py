"""Every task's targets through the doors that give them; rows that bring none; anomalies that
stand among the test rows alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nestling import Data, InputError
from nestling.data import load
from nestling.data.npz import read_npz

RNG = np.random.default_rng(3)
N = 30
X = RNG.normal(size=(N, 4)).astype(np.float32)
SERIES = RNG.normal(size=(N, 16, 2)).astype(np.float32)
TEXTS = RNG.integers(0, 7, (N, 9))
CLASSES = np.arange(N) % 3
VALUES = RNG.normal(size=(N, 2)) * 4 + 7
FLAGS = RNG.integers(0, 2, (N, 3))
TEST = np.arange(N) % 5 == 0


def table(folder: Path) -> Path:
    names = ["a", "b", "price", "size", "red", "test"]
    rows = zip(X[:, 0], X[:, 1], VALUES[:, 0], VALUES[:, 1], FLAGS[:, 0], TEST, strict=True)
    path = folder / "t.csv"
    path.write_text("\n".join([",".join(names), *(",".join(map(str, row)) for row in rows)]))
    return path


def test_values_through_a_table_and_an_array(tmp_path: Path) -> None:
    path = str(table(tmp_path))
    one = load("csv", path=path, task="regression", label="price", features=("a", "b"))
    assert one.y.shape == (24, 1) and one.classes == 1
    two = load("csv", path=path, task="regression", label="price, size", features=("a", "b"))
    assert two.reading is not None and "'price', 'size' as target" in two.reading.line("iid")
    given = Data.of(X[:, :2], VALUES, test=TEST, task="regression").load()
    assert torch.allclose(two.y, given.y, atol=1e-5)
    assert torch.allclose(given.y.mean(0), torch.zeros(2), atol=1e-5)
    assert given.strata[0].bincount().tolist() == [3, 2, 2, 3, 2, 2, 3, 2, 2, 3]  # tenths
    # columns of targets are no features
    rest = load("csv", path=path, task="regression", label="price, size")
    assert rest.shape == (3,)
    with pytest.raises(InputError, match="'blue' for the values") as caught:
        load("csv", path=path, task="regression", label="price, blue")
    assert caught.value.field == "data.label"


def test_flags_through_a_table_an_array_and_pairs(tmp_path: Path) -> None:
    found = load("csv", path=str(table(tmp_path)), task="multi-label", label="red")
    assert found.y.dtype == torch.bool and found.y.shape == (24, 1)
    given = Data.of(X, FLAGS, test=TEST, task="multi-label").load()
    items = [(x, torch.tensor(y)) for x, y in zip(X, FLAGS, strict=True)]
    pairs = Data.of(torch.utils.data.Subset(items, range(N)), test=TEST, task="multi-label").load()  # type: ignore[arg-type]
    assert torch.equal(given.y, torch.tensor(FLAGS[~TEST]).bool())
    assert torch.equal(given.y, pairs.y) and given.classes == 3
    first = [next((k for k in range(3) if row[k]), 3) for row in FLAGS[~TEST]]
    assert given.strata[0].tolist() == first


@pytest.mark.parametrize(
    ("task", "x", "layout"), [("forecast", SERIES, "lc"), ("next-token", TEXTS, "tokens")]
)
def test_what_needs_no_target_is_read_without_one(
    tmp_path: Path, task: str, x: np.ndarray, layout: str
) -> None:
    how: dict[str, Any] = {"task": task, "layout": layout}
    given = Data.of(x, test=TEST, **how).load()
    np.savez(tmp_path / "mine.npz", x=x, test=TEST)
    read = read_npz(tmp_path / "mine.npz", **how)
    assert torch.equal(given.x, read.x) and torch.equal(given.y, read.y)
    alone = Data.of(torch.utils.data.Subset(list(x), range(N)), test=TEST, **how).load()  # type: ignore[arg-type]
    assert torch.equal(alone.x, given.x)
    with pytest.raises(InputError, match="the rows have no y"):
        read_npz(tmp_path / "mine.npz", layout=layout)
    with pytest.raises(InputError, match="only one have y"):
        Data.of(x, test=(x, np.zeros(N)), **how)


def test_texts_in_a_table(tmp_path: Path) -> None:
    lines = [",".join(f"t{k}" for k in range(9)), *(",".join(map(str, row)) for row in TEXTS)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    read = load("csv", path=str(tmp_path / "t.csv"), task="next-token", layout="tokens")
    assert read.classes == 7 and read.shape == (8,)
    assert torch.equal(read.x[:, 1:], read.y[:, :-1])


def test_anomalies_may_stand_among_the_test_rows_alone() -> None:
    """Whoever has normal rows only to train on calls them so."""
    names = np.where(TEST & (np.arange(N) % 2 == 0), "broken", "ok")
    found = Data.of(X, names, test=TEST, task="reconstruction", normal=("ok",)).load()
    assert len(found.y) == 24 and torch.equal(found.y, found.x)
    assert found.learned.odd.tolist() == (names[TEST] == "broken").tolist()  # type: ignore[attr-defined]
    same = np.where(CLASSES == 2, "broken", "ok")
    mixed = Data.of(X, same, test=TEST, task="reconstruction", normal=("ok",)).load()
    assert len(mixed.y) == int(((same == "ok") & ~TEST).sum())
    with pytest.raises(InputError, match="test rows have labels that no training row has"):
        Data.of(X, names, test=TEST).load()  # classes must be learned


@pytest.mark.parametrize("name", ["mnist12k", "har"])
@pytest.mark.parametrize("task", ["regression", "multi-label"])
def test_sets_of_classes_have_no_values(name: str, task: str) -> None:
    """The numbers of classes are none."""
    with pytest.raises(InputError, match="its rows have classes") as caught:
        load(name, task=task)
    assert caught.value.field == "data.task"

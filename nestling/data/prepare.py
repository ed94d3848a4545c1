"""From the rows that a door hands over to a data set: layout, classes, clients, held-out rows,
scale. The same rules for every door."""

from __future__ import annotations

import numpy as np
import torch

from nestling.data.dataset import Dataset, as_labels
from nestling.data.layout import arranged
from nestling.data.lengths import as_silence, placed
from nestling.data.log_mel import OPTIONS, log_mel
from nestling.data.recipe import NONE, RawRows, Reading, Recipe
from nestling.data.scaling import scaled
from nestling.data.targets import Brought, fills_at_end, for_task, needs_classes, needs_values
from nestling.seeds import stream
from nestling.tasks import Reconstruction

TEST_SHARE = 0.2
MANY_CLASSES = 20
"""Up to so many classes are believed of any number of rows; more, of twice as many rows."""


def prepare(name: str, raw: RawRows, recipe: Recipe) -> Dataset:
    """The data set that rows give, checked, with what was done to them."""
    recipe.check()
    if recipe.transform == "log-mel":
        known = {key: recipe.options[key] for key in OPTIONS if key in recipe.options}
        raw = log_mel(as_silence(raw), {**OPTIONS, **known})
    x, layout = arranged(raw, recipe.layout)
    x, steps = placed(x, layout, raw, at_end=fills_at_end(recipe.task))
    raw = raw.told(steps.told) if steps else raw
    labels = np.zeros(len(x), np.int64)
    if needs_classes(recipe.task):
        labels = _ids("y", _targets(raw, recipe.task), raw)
        _check_length("y", labels, len(x), raw)
        _check_classes(labels, raw)
    client = None
    if raw.client is not None and recipe.client != NONE:
        client = _ids("client", raw.client, raw)
        _check_length("client", client, len(x), raw)
    test = _test_mask(labels, client, recipe.seed, raw)
    y, names = labels, raw.class_names
    if needs_classes(recipe.task):
        y, names = _number_labels(labels, test, raw, recipe.task)
    seen = x if steps is None else x[steps.of_samples(x)]
    low, high = (0.0, 0.0) if _blank(seen) else _extremes(seen)
    x, done = scaled(x, test, layout, recipe, raw, steps)
    whose = None if client is None else np.unique(client[~test], return_inverse=True)[1]
    dataset = Dataset(
        name=name,
        x=torch.from_numpy(x[~test]),
        y=as_labels(y[~test]),
        x_test=torch.from_numpy(x[test]),
        y_test=as_labels(y[test]),
        classes=len(names),
        client=None if whose is None else whose.astype(np.int64),
        class_names=names,
        reading=Reading(
            name=name,
            rows=int((~test).sum()),
            test_rows=int(test.sum()),
            test="drawn" if raw.test is None else "as marked",
            found=tuple(raw.x.shape[1:]),
            layout=layout,
            shape=tuple(x.shape[1:]),
            low=low,
            high=high,
            scale=done,
            classes=len(names),
            clients=0 if whose is None else int(whose.max()) + 1,
            more=raw.more,
        ),
    )
    values = _values(raw, len(x), recipe.task) if needs_values(recipe.task) else np.zeros((0, 0))
    brought = Brought(test, values, None if steps is None else steps.of_samples(x))
    found = for_task(dataset, recipe, brought)
    found.check()
    return found


def _targets(raw: RawRows, task: str) -> np.ndarray:
    if raw.y is None:
        fix = f"give y, which {task} needs, or set data.task to forecast or next-token"
        raise raw.bad("the rows have no y", fix)
    return raw.y


def _values(raw: RawRows, rows: int, task: str) -> np.ndarray:
    """Targets that are no classes, (N, K); one value a row may stand alone."""
    found = _targets(raw, task)
    y = found[:, None] if found.ndim == 1 else found
    if y.ndim != 2 or not y.size or y.dtype.kind not in "biuf":
        raise raw.bad(
            f"y is {found.dtype} {found.shape}", "give one number a row, or a row of numbers"
        )
    _check_length("y", y, rows, raw)
    return y


def _blank(x: np.ndarray) -> bool:
    return x.dtype.kind == "f" and bool(np.isnan(x).all())


def _extremes(x: np.ndarray) -> tuple[float, float]:
    return float(np.nanmin(x)), float(np.nanmax(x))


def _ids(key: str, values: np.ndarray, raw: RawRows) -> np.ndarray:
    what = "one class a row" if key == "y" else "one value a row"
    only = '; data.task is "classification", "regression" takes values' if key == "y" else ""
    if values.ndim != 1:
        raise raw.bad(f"{key} has shape {values.shape}", f"give {what}: shape (N,){only}")
    if values.dtype.kind == "S":
        return np.char.decode(values, "utf-8", "replace")
    if values.dtype.kind not in "biuU":
        raise raw.bad(f"{key} has type {values.dtype}", f"give integers or strings{only}")
    return values


def _check_length(key: str, values: np.ndarray, rows: int, raw: RawRows) -> None:
    if len(values) != rows:
        raise raw.bad(f"x has {rows} rows but {key} has {len(values)}", "give one value a row")


def _check_classes(labels: np.ndarray, raw: RawRows) -> None:
    found = len(np.unique(labels))
    if found > max(MANY_CLASSES, len(labels) // 2):
        raise raw.bad(
            f"{len(labels)} rows have {found} classes",
            'name another column or array, or set data.task = "regression" if they are values',
        )


def _test_mask(
    labels: np.ndarray, client: np.ndarray | None, seed: int, raw: RawRows
) -> np.ndarray:
    test = raw.test
    if test is None:
        test = _hold_out(labels, client, seed)
        if not test.any():
            raise raw.bad(
                f"{len(labels)} row(s) are too few to hold some out for the test",
                "add rows, or a boolean array 'test'",
            )
        return test
    if test.dtype != np.bool_ or test.shape != labels.shape:
        raise raw.bad(
            f"test is {test.dtype} {test.shape}",
            f"give {len(labels)} booleans, True for held-out rows",
        )
    if test.all() or not test.any():
        raise raw.bad(
            f"test marks {int(test.sum())} of {len(test)} rows", "mark some rows, but not all"
        )
    return test


def _hold_out(labels: np.ndarray, client: np.ndarray | None, seed: int) -> np.ndarray:
    _, group, sizes = np.unique(
        np.zeros(len(labels)) if client is None else client, return_inverse=True, return_counts=True
    )
    order = np.lexsort((stream(seed, "npz", "test").random(len(labels)), group))
    place = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    test = np.zeros(len(labels), bool)
    test[order] = place < np.floor(TEST_SHARE * sizes + 0.5)[group[order]]
    # A class that landed in the test rows alone could never be learnt: its rows go back.
    return test & np.isin(labels, labels[~test])


def _number_labels(
    labels: np.ndarray, test: np.ndarray, raw: RawRows, task: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    # nobody trains on anomalies, so that they may stand among the test rows alone
    values = np.unique(labels if task == Reconstruction.name else labels[~test])
    unseen = np.setdiff1d(labels[test], values)
    if len(unseen):
        few = ", ".join(map(str, unseen[:5]))
        raise raw.bad(
            f"test rows have labels that no training row has: {few}", "mark other rows as test"
        )
    if len(values) < 2:
        raise raw.bad(
            f"all training rows have the label {values[0]!s}", "at least two classes are needed"
        )
    names = raw.class_names
    if names and not (values.dtype.kind in "iu" and values[0] >= 0 and values[-1] < len(names)):
        raise raw.bad(
            f"{len(names)} class names for labels {values[0]!s} to {values[-1]!s}",
            "number the classes 0.. in the order of their names",
        )
    return (
        np.searchsorted(values, labels),
        tuple(names[value] if names else str(value) for value in values),
    )

"""What is learned of rows: a data set of classes as one of another task.

Targets say by their type what they are (see `tasks.losses`). `kinds` stand for the classes where a
split divides rows by class, and where a client's score weights the test rows as its own data has
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nestling.data.dataset import Dataset
from nestling.data.recipe import Recipe
from nestling.errors import InputError
from nestling.tasks import (
    TASKS,
    Classification,
    Forecast,
    MultiLabel,
    NextToken,
    Reconstruction,
    Regression,
)
from nestling.tasks.losses import FILLING

KINDS = 10
"""Into how many parts of equal size the rows are put by their values."""


@dataclass(frozen=True)
class Brought:
    """What rows bring beside samples and classes: which are the test's; targets that are no
    classes, (N, K) numbers, of which there may be none; and what of the samples is real, where
    sequences were filled up."""

    test: np.ndarray
    values: np.ndarray
    real: np.ndarray | None

    def parts(self, found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Something of all rows, of those of the training and of the test."""
        return found[~self.test], found[self.test]

    @property
    def real_parts(self) -> tuple[Tensor, Tensor] | None:
        """What is real, of both."""
        if self.real is None:
            return None
        train, test = self.parts(self.real)
        return torch.from_numpy(train), torch.from_numpy(test)


def needs_classes(task: str) -> bool:
    """Whether rows must come with classes: those of the other tasks need none."""
    return task in (Classification.name, Reconstruction.name)


def needs_values(task: str) -> bool:
    """Whether rows come with a target that is no class."""
    return task in (MultiLabel.name, Regression.name)


def refuse_values(name: str, task: str) -> None:
    """Refuses a task whose targets are no classes for a data set that has classes alone."""
    if needs_values(task):
        raise InputError(
            f"{name}: its rows have classes, which {task} cannot use",
            field="data.task",
            fix="leave it out, or bring rows with such targets",
        )


def fills_at_end(task: str) -> bool:
    """Whether filling belongs behind what is real: where no step sees a later one."""
    return task == NextToken.name


def for_task(dataset: Dataset, recipe: Recipe, brought: Brought | None = None) -> Dataset:
    """The data set with the targets of the recipe's task."""
    if recipe.normal and recipe.task != Reconstruction.name:
        raise _bad(dataset, "nothing is anomalous", "normal", 'set data.task = "reconstruction"')
    if recipe.horizon and recipe.task != Forecast.name:
        raise _bad(dataset, "nothing is foretold", "horizon", 'set data.task = "forecast"')
    if recipe.task == Classification.name:
        return dataset
    if needs_values(recipe.task):
        assert brought is not None
        return (_regression if recipe.task == Regression.name else _multi_label)(dataset, brought)
    return _FROM_ROWS[recipe.task](dataset, recipe, brought.real_parts if brought else None)


def _regression(dataset: Dataset, brought: Brought) -> Dataset:
    """Values, standardised by the training rows."""
    train, test = brought.parts(brought.values.astype(np.float64))
    mean, scale = train.mean(0), train.std(0)
    scale[scale <= 1e-10 * np.abs(mean)] = 1
    y, y_test = ((part - mean) / scale for part in (train, test))
    if not all(np.isfinite(part).all() for part in (y, y_test)):
        fix = "mend them, or bring them to the range of 32-bit floats"
        raise InputError(f"{dataset.name}: y has values that are not finite", field="data", fix=fix)
    task = Regression(_floats(mean), _floats(scale), _variance(y_test))
    edges = np.quantile(y[:, 0], np.arange(1, KINDS) / KINDS)
    kinds = tuple(np.searchsorted(edges, part[:, 0]) for part in (y, y_test))
    return _with(dataset, _tensors(y, y_test), task, y.shape[1], kinds)


def _multi_label(dataset: Dataset, brought: Brought) -> Dataset:
    """Flags; a row's kind is its first label, or that it has none."""
    if not np.isin(brought.values, (0, 1)).all():
        fix = "give 0 or 1 (or booleans) for every label"
        raise InputError(f"{dataset.name}: y holds more than flags", field="data", fix=fix)
    flags = brought.values.astype(bool)
    labels = flags.shape[1]
    first = np.where(flags.any(1), flags.argmax(1), labels)
    train, test = map(torch.from_numpy, brought.parts(flags))
    return _with(dataset, (train, test), MultiLabel(), labels, brought.parts(first))


Real = tuple[Tensor, Tensor] | None
"""What of training and test samples is real; None: all of it."""


def _forecast(dataset: Dataset, recipe: Recipe, real: Real) -> Dataset:
    """The last steps of every sequence are foretold from the others, as they are scaled."""
    if len(dataset.shape) != 2:
        raise _bad(dataset, f"samples of {dataset.shape} are no sequences", "task", _SEQUENCES)
    steps, ahead = dataset.shape[1], recipe.horizon or max(1, dataset.shape[1] // 8)
    if ahead >= steps:
        raise _bad(dataset, f"sequences have {steps} steps", "horizon", "give fewer")
    few = sum(int((~part[:, 0, steps - ahead - 1]).sum()) for part in real or ())
    if few:
        message = f"{few:,} of the sequences have no more than {ahead} steps"
        raise _bad(dataset, message, "horizon", "give fewer, or leave those sequences out")
    y, y_test = (x[:, :, steps - ahead :].flatten(1) for x in (dataset.x, dataset.x_test))
    values = y.shape[1]
    task = Forecast((0.0,) * values, (1.0,) * values, _variance(y_test.numpy()))
    cut = replace(
        dataset,
        x=dataset.x[:, :, : steps - ahead].contiguous(),
        x_test=dataset.x_test[:, :, : steps - ahead].contiguous(),
    )
    return _with(cut, (y.contiguous(), y_test.contiguous()), task, values, _classes(dataset))


def _reconstruction(dataset: Dataset, recipe: Recipe, real: Real) -> Dataset:
    """Samples are their own targets; rows that are not normal are for the test alone."""
    names = dataset.class_names or tuple(map(str, range(dataset.classes)))
    strange = sorted(set(recipe.normal) - set(names))
    if strange or not recipe.normal or set(recipe.normal) >= set(names):
        told = "it says of no class, or of all, that its rows are normal"
        message = f"there is no class {strange[0]!r}" if strange else told
        raise _bad(dataset, message, "normal", f"name some of {', '.join(names)}")
    if not dataset.x.is_floating_point():
        raise _bad(dataset, "token ids cannot be rebuilt as values", "task", "leave it out")
    normal = torch.tensor([name in recipe.normal for name in names])
    rows, odd = normal[dataset.y], ~normal[dataset.y_test]
    if odd.all() or not odd.any():
        fix = "let the test rows have normal and other ones"
        raise _bad(dataset, "the test rows are all of one sort", "normal", fix)
    client = dataset.client
    if client is not None:
        client = np.unique(client[rows.numpy()], return_inverse=True)[1].astype(np.int64)
    kept = replace(dataset, x=dataset.x[rows], y=dataset.y[rows], client=client)
    y, y_test = kept.x, kept.x_test
    if real is not None:  # what is no number is no target
        y = y.where(real[0][rows], torch.nan)
        y_test = y_test.where(real[1], torch.nan)
    y, y_test = y.flatten(1), y_test.flatten(1)
    return _with(kept, (y, y_test), Reconstruction(odd), y.shape[1], _classes(kept))


def _next_token(dataset: Dataset, recipe: Recipe, real: Real) -> Dataset:  # noqa: ARG001 (as the others)
    """Texts, and the same moved by one token."""
    if dataset.x.is_floating_point() or dataset.shape[0] < 2:
        fix = 'give rows of token ids, and data.layout = "tokens"'
        raise _bad(dataset, f"samples of {dataset.shape} are no texts", "task", fix)
    words = len(dataset.class_names) or 1 + int(max(dataset.x.max(), dataset.x_test.max()))
    parts = [(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in (dataset.x, dataset.x_test)]
    (x, y), (x_test, y_test) = parts
    if real is not None:
        few = sum(int((~part[:, 1]).sum()) for part in real)
        if few:
            fix = "leave them out"
            raise _bad(dataset, f"{few:,} texts have a single token, and nothing next", "task", fix)
        y, y_test = (t.where(r[:, 1:], FILLING) for t, r in zip((y, y_test), real, strict=True))
    kinds = np.zeros(len(x), np.int64), np.zeros(len(x_test), np.int64)
    moved = replace(dataset, x=x, x_test=x_test)
    return _with(moved, (y, y_test), NextToken(), words, kinds, dataset.class_names)


_SEQUENCES = 'leave it out, or say what the dimensions are, e.g. data.layout = "lc"'
_FROM_ROWS: dict[str, Callable[[Dataset, Recipe, Real], Dataset]] = {
    Forecast.name: _forecast,
    Reconstruction.name: _reconstruction,
    NextToken.name: _next_token,
}
assert set(_FROM_ROWS) | {Classification.name, Regression.name, MultiLabel.name} == set(TASKS)


def _with(
    dataset: Dataset,
    y: tuple[Tensor, Tensor],
    task: Regression | MultiLabel | Reconstruction | NextToken,
    outputs: int,
    kinds: tuple[np.ndarray, ...],
    names: tuple[str, ...] = (),
) -> Dataset:
    reading = dataset.reading
    if reading is not None:
        reading = replace(
            reading, rows=len(y[0]), task=task.name, outputs=outputs, shape=dataset.shape
        )
    return replace(
        dataset,
        y=y[0],
        y_test=y[1],
        classes=outputs,
        class_names=names,
        task=task,
        kinds=torch.from_numpy(kinds[0].astype(np.int64)),
        kinds_test=torch.from_numpy(kinds[1].astype(np.int64)),
        reading=reading,
    )


def _classes(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    return dataset.y.numpy(), dataset.y_test.numpy()


def _tensors(*parts: np.ndarray) -> tuple[Tensor, Tensor]:
    y, y_test = (torch.from_numpy(part.astype(np.float32)) for part in parts)
    return y, y_test


def _floats(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _variance(values: np.ndarray) -> tuple[float, ...]:
    """The variance of each value; 1 where it is constant."""
    found = values.astype(np.float64).var(0)
    return _floats(np.where(found > 0, found, 1.0))


def _bad(dataset: Dataset, message: str, field: str, fix: str) -> InputError:
    return InputError(f"{dataset.name}: {message}", field=f"data.{field}", fix=fix)

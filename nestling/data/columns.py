"""Tables with named columns: .csv files, and .parquet files with `nestling[tables]`."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from nestling.data.recipe import AUTO, NONE, RawRows, Recipe
from nestling.data.targets import needs_classes, needs_values
from nestling.errors import InputError
from nestling.tasks import Regression

LABELS = ("label", "y", "class", "target")
_TRUE, _FALSE = ("1", "true", "yes", "test"), ("0", "false", "no", "train")


def read_csv(path: Path, recipe: Recipe) -> RawRows:
    """The rows of a text file whose first line names the columns. An empty cell is a missing
    value."""
    settings = recipe.take_options(delimiter=",")
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            lines = list(csv.reader(file, delimiter=settings["delimiter"], strict=True))
    except (OSError, ValueError, TypeError, csv.Error) as error:
        raise _bad(path, f"cannot be read: {error}", "give a UTF-8 text file of columns") from error
    lines = [line for line in lines if line]
    if len(lines) < 2:
        raise _bad(path, "has no rows", "the first line names the columns, the others are rows")
    names = [name.strip() for name in lines[0]]
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(names):
            raise _bad(
                path,
                f"row {number} has {len(line)} cells, the first line names {len(names)} columns",
                "mend the row, or set data.options.delimiter",
            )
    cells = list(zip(*lines[1:], strict=True))
    return _rows(path, names, [np.array([c.strip() for c in column]) for column in cells], recipe)


def read_parquet(path: Path, recipe: Recipe) -> RawRows:
    """The rows of a .parquet file."""
    recipe.take_options()
    try:
        from pyarrow import parquet
    except ImportError:
        raise InputError(
            "reading .parquet files needs pyarrow",
            field="data.name",
            fix="pip install 'nestling[tables]'",
        ) from None
    try:
        table = parquet.read_table(path)
        found = [np.asarray(column.to_numpy()) for column in table.columns]
    except Exception as error:  # a damaged file may raise nearly anything
        raise _bad(path, f"cannot be read: {error}", "give a whole .parquet file") from error
    columns = [values.astype(str) if values.dtype == object else values for values in found]
    return _rows(path, list(table.column_names), columns, recipe)


def _rows(path: Path, names: list[str], columns: list[np.ndarray], recipe: Recipe) -> RawRows:
    twice = next((name for name in names if not name or names.count(name) > 1), None)
    if twice is not None:
        raise _bad(path, f"the column {twice!r} is there twice, or has no name", "name each once")
    table = dict(zip(names, columns, strict=True))
    labels = _labels(path, table, recipe)
    asked = recipe.client if recipe.client not in (AUTO, NONE) else ""
    client = _named(path, table, asked, ("client",), "client", "whose each row is", need=False)
    test = _named(path, table, recipe.test, ("test",), "test", "the held-out rows", need=False)
    features = recipe.features or [n for n in table if n not in (*labels, client, test)]
    for name in features:
        _named(path, table, name, (), "features", "a feature")
    if not features:
        raise _bad(path, "has no column of features", "name them in data.features")
    return RawRows(
        np.stack([_numbers(path, name, table[name]) for name in features], 1),
        _targets(path, labels, table, recipe.task),
        _texts(table[client]) if client else None,
        _flags(path, test, table[test]) if test else None,
        layout="f",
        more=f"{len(features)} columns as features{_told(labels, recipe.task)}",
        where=str(path),
        field="data.path",
    )


def _labels(path: Path, table: dict[str, np.ndarray], recipe: Recipe) -> list[str]:
    """The columns of the targets; several, with commas between them, where they are values."""
    if needs_values(recipe.task):
        asked = [recipe.label] if recipe.label in table else recipe.label.split(",")
        what = "the values" if recipe.task == Regression.name else "the flags"
        return [_named(path, table, one.strip(), LABELS, "label", what) for one in asked]
    need = needs_classes(recipe.task)
    found = _named(path, table, recipe.label, LABELS, "label", "the classes", need=need)
    return [found] if found else []


def _targets(
    path: Path, labels: list[str], table: dict[str, np.ndarray], task: str
) -> np.ndarray | None:
    if needs_values(task):
        return np.stack([_numbers(path, name, table[name], "label") for name in labels], 1)
    return _classes(path, labels[0], table[labels[0]]) if needs_classes(task) else None


def _told(labels: list[str], task: str) -> str:
    if not labels or not (needs_values(task) or needs_classes(task)):
        return ""
    return f", {', '.join(map(repr, labels))} as {'target' if needs_values(task) else 'class'}"


def _named(
    path: Path,
    table: dict[str, np.ndarray],
    asked: str,
    usual: tuple[str, ...],
    setting: str,
    what: str,
    need: bool = True,
) -> str:
    found = [name for name in ([asked] if asked else usual) if name in table]
    if not found and (asked or need):
        has = ", ".join(list(table)[:20])
        raise InputError(
            f"{path}: no column {' or '.join(map(repr, [asked] if asked else usual))} for {what}",
            field=f"data.{setting}",
            fix=f"name one of {has}",
        )
    return found[0] if found else ""


def _numbers(path: Path, name: str, values: np.ndarray, setting: str = "features") -> np.ndarray:
    if values.dtype.kind in "biuf":
        return values.astype(np.float64)
    found = np.where(values == "", "nan", values)
    try:
        return found.astype(np.float64)
    except ValueError:
        wrong = next(at for at, value in enumerate(found) if not _is_number(str(value)))
        raise InputError(
            f"{path}: the column {name!r} holds {str(values[wrong])!r} in row {wrong + 2}, which "
            "is no number",
            field=f"data.{setting}",
            fix="name the columns that hold numbers, or number what it holds",
        ) from None


def _classes(path: Path, name: str, values: np.ndarray) -> np.ndarray:
    """Whole numbers, or words. Other numbers are no classes: as words they would be very many."""
    if values.dtype.kind in "biu":
        return values
    texts = values.astype(str)
    if (texts == "").any():
        raise _bad(
            path, f"{name!r} is empty in row {int((texts == '').argmax()) + 2}", "fill it in"
        )
    if not all(_is_number(text) for text in texts):
        return texts
    figures = texts.astype(np.float64)
    if not np.isfinite(figures).all() or (figures != np.floor(figures)).any():
        raise _bad(
            path,
            f"{name!r} holds numbers that are no classes, such as "
            f"{texts[int((figures != np.floor(figures)).argmax())]}",
            'classes are whole numbers or words; data.task = "regression" takes values',
        )
    return figures.astype(np.int64)


def _texts(values: np.ndarray) -> np.ndarray:
    return values if values.dtype.kind in "iu" else values.astype(str)


def _flags(path: Path, name: str, values: np.ndarray) -> np.ndarray:
    if values.dtype.kind == "b":
        return values
    words = np.char.lower(values.astype(str))
    strange = words[~np.isin(words, (*_TRUE, *_FALSE))]
    if len(strange):
        raise _bad(path, f"{name!r} holds {strange[0]!r}", "say true or false, or test or train")
    return np.isin(words, _TRUE)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _bad(path: Path, message: str, fix: str) -> InputError:
    return InputError(f"{path}: {message}", field="data.path", fix=fix)

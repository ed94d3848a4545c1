"""Rows that are given as objects: arrays, tensors, a torch `Dataset`, a Hugging Face `Dataset`.

Objects are known by what they can do, not by their class, so that no package is needed for its
data to be taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from nestling.data.columns import LABELS
from nestling.data.lengths import alike, stacked
from nestling.data.recipe import RawRows
from nestling.errors import InputError

_SAMPLES = ("x", "image", "img", "audio", "input_ids", "features")


def raw_rows(
    x: Any,
    y: Any = None,
    *,
    client: Any = None,
    test: Any = None,
    features: str | Sequence[str] = (),
    class_names: Sequence[str] = (),
) -> RawRows:
    """The rows of an object.

    x, y:     arrays or tensors, or a list of sequences of unequal length, and no y where the task
              needs none; or a torch `Dataset` of (sample, class) pairs and no y; or a
              Hugging Face `Dataset`, where y and client name columns and `features` that of the
              samples.
    client:   whose each row is.
    test:     booleans that mark the held-out rows; or a pair (x, y); or a second `Dataset`.
    """
    if isinstance(x, Mapping) and _is_table(x.get("train")):
        held_out = x.get("test") if test is None else test
        return raw_rows(
            x["train"],
            y,
            client=client,
            test=held_out,
            features=features,
            class_names=class_names,
        )
    rows = _one(x, y, client, features)
    names = tuple(str(name) for name in class_names) or rows.class_names
    rows = replace(rows, class_names=names)
    if test is None:
        return rows
    if isinstance(test, tuple) and len(test) == 2:
        return _joined(rows, _one(*test, None, ()))
    if _is_table(test) or _is_pairs(test):
        return _joined(rows, _one(test, y, client if isinstance(client, str) else None, features))
    return replace(rows, test=_array(test, "test"))


def digest_of(raw: RawRows) -> str:
    """What tells these rows from others."""
    found = hashlib.sha256()
    for array in (raw.x, raw.y, raw.client, raw.test):
        if array is not None:
            found.update(f"{array.dtype} {array.shape}".encode())
            found.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
        found.update(b"|")
    found.update(repr(raw.class_names).encode())
    if raw.length is not None:
        found.update(repr(raw.length.tolist()).encode())
    return found.hexdigest()


def _one(x: Any, y: Any, client: Any, features: str | Sequence[str]) -> RawRows:
    if _is_table(x):
        return _from_table(x, y, client, features)
    if y is None and _is_pairs(x):
        return _from_pairs(x, client)
    who = None if client is None else _array(client, "client")
    return _with_lengths(x, None if y is None else _array(y, "y"), who)


def _with_lengths(x: Any, y: np.ndarray | None, client: np.ndarray | None) -> RawRows:
    """Rows whose samples may be sequences of unequal length."""
    parts = _parts(x, "x")
    if parts is None or all(one.shape == parts[0].shape for one in parts):
        return RawRows(_array(x, "x"), y, client)
    filled, length, layout = stacked(parts)
    return RawRows(filled, y, client, layout=layout, length=length)


def _is_table(value: Any) -> bool:
    """Whether it has named columns, as a Hugging Face `Dataset` does."""
    return hasattr(value, "column_names") and hasattr(value, "features")


def _is_pairs(value: Any) -> bool:
    """Whether it is a `Dataset` as torch understands it: a length, and items by their number."""
    plain = isinstance(value, (np.ndarray, Tensor, Mapping, str, list, tuple))
    return not plain and hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _from_pairs(dataset: Any, client: Any) -> RawRows:
    # by number: an `IndexError` need not end such an object's iteration
    items = [dataset[number] for number in range(len(dataset))]
    alone = items and not any(isinstance(item, (tuple, list)) for item in items)
    if alone:  # samples without targets
        who = None if client is None else _array(client, "client")
        return _with_lengths(items, None, who)
    if not items or not all(isinstance(item, (tuple, list)) and len(item) >= 2 for item in items):
        raise InputError(
            f"the items of {type(dataset).__name__} are no (sample, class) pairs",
            field="data",
            fix="let its __getitem__ return (sample, class), or (sample, class, client)",
        )
    if client is None and all(len(item) == 3 for item in items):
        client = [_plain(item[2]) for item in items]
    names = getattr(dataset, "classes", ())
    y = _array([_plain(item[1]) for item in items], "y")
    named = isinstance(names, (list, tuple)) and names and y.dtype.kind in "iu"
    rows = _with_lengths(
        [item[0] for item in items], y, None if client is None else _array(client, "client")
    )
    return replace(rows, class_names=tuple(str(name) for name in names) if named else ())


def _from_table(table: Any, y: Any, client: Any, features: str | Sequence[str]) -> RawRows:
    columns = list(table.column_names)
    label = _column(columns, y, LABELS, "y", "the classes", need=bool(y))
    chosen = [features] if isinstance(features, str) else list(features)
    for name in chosen or [""]:
        _column(columns, name, _SAMPLES, "features", "the samples")
    chosen = chosen or [_column(columns, "", _SAMPLES, "features", "the samples")]
    whose = (
        _column(columns, client, (), "client", "whose each row is")
        if isinstance(client, str)
        else ""
    )
    who = table[whose] if whose else client
    names = getattr(table.features.get(label), "names", None)
    target = _array(list(table[label]), "y") if label else None
    client = None if who is None else _array(list(who), "client")
    if len(chosen) == 1:
        rows = _with_lengths(_values(table[chosen[0]]), target, client)
    else:
        parts = [_array(_values(table[name]), name) for name in chosen]
        rows = RawRows(np.stack(parts, 1), target, client)
    more = f", {label!r} as target" if label else ""
    rows = rows.told(f"column {', '.join(chosen)} as sample{more}")
    return replace(rows, class_names=tuple(names) if names else ())


def _column(
    columns: list[str], asked: Any, usual: Sequence[str], key: str, what: str, need: bool = True
) -> str:
    wanted = [asked] if asked else list(usual)
    found = [name for name in wanted if name in columns]
    if not found and not need:
        return ""
    if not found:
        raise InputError(
            f"no column {' or '.join(map(repr, wanted))} for {what}",
            field="data",
            fix=f"name one in Data.of(…, {key}=…): {', '.join(map(str, columns))}",
        )
    return found[0]


def _values(column: Iterable[Any]) -> list[Any]:
    """Samples of a column; sound comes with its signal inside."""
    found = list(column)
    return [one["array"] if isinstance(one, Mapping) and "array" in one else one for one in found]


def _parts(value: Any, key: str) -> list[np.ndarray] | None:
    """The samples of a list of samples; None of what is no such list."""
    if not isinstance(value, (list, tuple)) or not value or isinstance(value[0], (int, float, str)):
        return None
    try:
        return [_array(one, key) if isinstance(one, Tensor) else np.asarray(one) for one in value]
    except ValueError as error:  # lists of lists of unequal length
        fix = "give every sample as an array"
        raise InputError(f"a sample of {key} is no array: {error}", field="data", fix=fix) from None


def _array(value: Any, key: str) -> np.ndarray:
    """Whatever holds numbers or words as an array."""
    if isinstance(value, Tensor):
        return (
            value.detach().cpu().float().numpy() if _half(value) else value.detach().cpu().numpy()
        )
    parts = _parts(value, key)
    if parts is not None:
        odd = next((one.shape for one in parts if one.shape != parts[0].shape), None)
        if odd is not None:
            raise InputError(
                f"{key} holds samples of {parts[0].shape} and of {odd}",
                field="data",
                fix="bring them to one shape: fill up the shorter ones",
            )
        return np.stack(parts)
    found = np.asarray(value)
    if found.dtype == object:
        with suppress(ValueError, TypeError):
            found = np.array(found.tolist(), str) if _words(found) else np.stack(found.tolist())
    if found.dtype == object:
        raise InputError(
            f"{key} holds objects that are no numbers", field="data", fix="give an array"
        )
    return found


def _half(value: Tensor) -> bool:
    return value.is_floating_point() and value.element_size() < 4


def _words(values: np.ndarray) -> bool:
    return all(isinstance(one, str) for one in values.ravel().tolist())


def _plain(value: Any) -> Any:
    """A class or a client as Python has it; of several flags or values, all of them."""
    if isinstance(value, (np.ndarray, Tensor)) and value.ndim:
        return value.tolist()
    return value.item() if hasattr(value, "item") else value


def _joined(train: RawRows, test: RawRows) -> RawRows:
    train, test = alike(train, test)
    if test.x.shape[1:] != train.x.shape[1:] or test.x.dtype != train.x.dtype:
        raise InputError(
            f"training rows are {train.x.dtype} {train.x.shape}, test rows {test.x.dtype} "
            f"{test.x.shape}",
            field="data",
            fix="make them alike",
        )
    if (train.y is None) != (test.y is None):
        raise InputError(
            "of training and test rows only one have y", field="data", fix="give both, or neither"
        )
    client = train.client
    if client is not None:
        theirs = test.client if test.client is not None else np.full(len(test.x), client[0])
        client = np.concatenate([client, theirs])
    return replace(
        train,
        x=np.concatenate([train.x, test.x]),
        y=_both(train.y, test.y),
        client=client,
        test=np.arange(len(train.x) + len(test.x)) >= len(train.x),
        length=_both(train.length, test.length),
    )


def _both(train: np.ndarray | None, test: np.ndarray | None) -> np.ndarray | None:
    return None if train is None or test is None else np.concatenate([train, test])

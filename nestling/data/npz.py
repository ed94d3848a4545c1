"""Reader for a user's own data: one .npz file with `x`, `y` and, if wanted, `client` and `test`.

| key | content |
|---|---|
| `x` | the samples, see the table below |
| `y` | (N,) integers or strings; re-numbered 0..C-1 in sorted order, named by their values |
| `client` | (N,) integers or strings: each row's natural client; re-numbered 0..K-1 like `y` |
| `test` | (N,) booleans: the held-out rows |

| `x` | read as | values |
|---|---|---|
| 2-d (N, F) | vectors | standardised per feature |
| 3-d (N, H, W), uint8 | grey images -> (N, 1, H, W) | scaled to 0..1 |
| 3-d (N, L, C), any other number | sequences -> (N, C, L) | standardised per channel |
| 4-d, last one 1, 3 or 4 | images (N, H, W, C) -> (N, C, H, W) | uint8 to 0..1, else as above |
| 4-d otherwise | images (N, C, H, W) | the same |

Standardised means (value - mean) / standard deviation, both of the training rows alone; a constant
feature becomes zero.

Without `test`, 20 % of the rows (of each client, if there are clients) are held out at random, but
never all rows of a class.

Missing values (NaN) are refused unless `missing` is "mean" (the training mean of that feature or
channel) or "zero"; infinite values are refused always.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from nestling.data.dataset import Dataset, as_labels
from nestling.errors import InputError, unknown
from nestling.files import read_arrays
from nestling.seeds import stream

MISSING = ("refuse", "mean", "zero")
TEST_SHARE = 0.2


def read_npz(path: Path, *, name: str = "npz", missing: str = "refuse", seed: int = 0) -> Dataset:
    """The data set in one .npz file, by the rules above. `seed` chooses the held-out rows where the
    file does not."""
    if missing not in MISSING:
        raise unknown("rule for missing values", missing, MISSING, field="data.missing")
    arrays = read_arrays(path)
    x, labels = _samples(arrays["x"], path), _ids("y", arrays["y"], path)
    rows = len(x)
    if rows == 0 or x.size == 0:
        raise _bad(path, f"x is empty: {x.shape}", "give at least one row with at least one value")
    _check_length("y", labels, rows, path)
    client = _ids("client", arrays["client"], path) if "client" in arrays else None
    if client is not None:
        _check_length("client", client, rows, path)
    test = _test_mask(arrays.get("test"), labels, client, seed, path)
    y, names = _number_labels(labels, test, path)
    x = _scaled(x, test, missing, path)
    dataset = Dataset(
        name=name,
        x=torch.from_numpy(x[~test]),
        y=as_labels(y[~test]),
        x_test=torch.from_numpy(x[test]),
        y_test=as_labels(y[test]),
        classes=len(names),
        client=None
        if client is None
        else np.unique(client[~test], return_inverse=True)[1].astype(np.int64),
        class_names=names,
    )
    dataset.check()
    return dataset


def _samples(x: np.ndarray, path: Path) -> np.ndarray:
    if x.dtype.kind not in "biuf":
        raise _bad(path, f"x has type {x.dtype}", "give numbers")
    if x.ndim not in (2, 3, 4):
        raise _bad(
            path,
            f"x has shape {x.shape}",
            "give (N, F) vectors, (N, L, C) sequences, or (N, H, W) or (N, H, W, C) images",
        )
    if x.ndim == 3:
        return x[:, None] if x.dtype == np.uint8 else x.transpose(0, 2, 1)
    return x.transpose(0, 3, 1, 2) if x.ndim == 4 and x.shape[-1] in (1, 3, 4) else x


def _ids(key: str, values: np.ndarray, path: Path) -> np.ndarray:
    if values.ndim != 1:
        raise _bad(path, f"{key} has shape {values.shape}", "give one value a row: shape (N,)")
    if values.dtype.kind == "S":
        return np.char.decode(values, "utf-8", "replace")
    if values.dtype.kind not in "biuU":
        raise _bad(path, f"{key} has type {values.dtype}", "give integers or strings")
    return values


def _check_length(key: str, values: np.ndarray, rows: int, path: Path) -> None:
    if len(values) != rows:
        raise _bad(path, f"x has {rows} rows but {key} has {len(values)}", "give one value a row")


def _test_mask(
    test: np.ndarray | None, labels: np.ndarray, client: np.ndarray | None, seed: int, path: Path
) -> np.ndarray:
    if test is None:
        test = _hold_out(labels, client, seed)
        if not test.any():
            raise _bad(
                path,
                f"{len(labels)} row(s) are too few to hold some out for the test",
                "add rows, or a boolean array 'test'",
            )
        return test
    if test.dtype != np.bool_ or test.shape != labels.shape:
        raise _bad(
            path,
            f"test is {test.dtype} {test.shape}",
            f"give {len(labels)} booleans, True for held-out rows",
        )
    if test.all() or not test.any():
        raise _bad(
            path, f"test marks {int(test.sum())} of {len(test)} rows", "mark some rows, but not all"
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
    labels: np.ndarray, test: np.ndarray, path: Path
) -> tuple[np.ndarray, tuple[str, ...]]:
    values = np.unique(labels[~test])
    unseen = np.setdiff1d(labels[test], values)
    if len(unseen):
        few = ", ".join(map(str, unseen[:5]))
        raise _bad(
            path,
            f"test rows have labels that no training row has: {few}",
            "mark other rows as test",
        )
    if len(values) < 2:
        raise _bad(
            path,
            f"all training rows have the label {values[0]!s}",
            "at least two classes are needed",
        )
    return np.searchsorted(values, labels), tuple(str(value) for value in values)


def _scaled(x: np.ndarray, test: np.ndarray, missing: str, path: Path) -> np.ndarray:
    """Contiguous float32: 8-bit images in 0..1, everything else standardised by the training
    rows."""
    if x.dtype == np.uint8 and x.ndim == 4:
        return np.ascontiguousarray(x, np.float32) / np.float32(255)
    x = np.ascontiguousarray(x, np.float64)
    axes = (0, *range(2, x.ndim))
    _fill_missing(x, test, axes, missing, path)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = x[~test].mean(axes, keepdims=True), x[~test].std(axes, keepdims=True)
        # Rounding leaves a constant feature a deviation just above zero; dividing by that would
        # blow the noise up.
        std[std <= 1e-10 * np.abs(mean)] = 1
        x = ((x - mean) / std).astype(np.float32)
    if not (np.isfinite(std).all() and np.isfinite(x).all()):
        raise _bad(
            path,
            "x has values too large to standardise",
            "rescale them to the range of 32-bit floats",
        )
    return x


def _fill_missing(
    x: np.ndarray, test: np.ndarray, axes: tuple[int, ...], missing: str, path: Path
) -> None:
    if np.isinf(x).any():
        raise _bad(path, "x has infinite values", "replace them; only NaN counts as missing")
    gaps = np.isnan(x)
    if not gaps.any():
        return
    if missing == "refuse":
        fix = 'set data.missing to "mean" or "zero", or fill them in'
        raise _bad(path, f"x has {int(gaps.sum())} missing values (NaN)", fix)
    fill = np.zeros(())
    if missing == "mean":
        known = np.where(gaps, 0, x)[~test].sum(axes, keepdims=True)
        fill = known / np.maximum((~gaps)[~test].sum(axes, keepdims=True), 1)
    np.copyto(x, fill, where=gaps)


def _bad(path: Path, message: str, fix: str) -> InputError:
    return InputError(f"{path}: {message}", field="data.path", fix=fix)

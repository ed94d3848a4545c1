"""The data that a device brings: rows of the experiment's form in .npz files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestling.data import image_statistics, normalise
from nestling.errors import InputError
from nestling.files import parse_toml, read_arrays
from nestling.fleet.node.data_files import data_files
from nestling.fleet.protocol.wire import Welcome
from nestling.tasks import Classification


@dataclass(frozen=True)
class Rows:
    """Samples of float32 and labels of int64."""

    x: Tensor
    y: Tensor


def read_rows(path: str | Path, welcome: Welcome) -> Rows:
    """The rows in an .npz file, or in all .npz files of a folder in the order of their names.

    `x` holds samples in the experiment's form: float numbers as the experiment's own data have them
    after preparation, or bytes, which are prepared as the experiment's pictures are (scaled to 0..1
    where it has none). `y` holds the classes: their names, or where the names are numbers or
    absent, their numbers.
    """
    task = _settings(welcome).get("task", Classification.name)
    if task != Classification.name:
        raise InputError(
            f"rows of a device's own have classes, and {task} is to be learned",
            field="--data",
            fix="say --data experiment: it then has its share of the experiment's rows",
        )
    parts = [_read(file, welcome) for file in data_files(path)]
    return Rows(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))


def _settings(welcome: Welcome) -> dict[str, Any]:
    """What the experiment says of its data."""
    return dict(parse_toml(welcome.experiment, "the experiment").get("data", {}))


def _read(file: Path, welcome: Welcome) -> Rows:
    arrays = read_arrays(file, field="--data")
    x, y = arrays["x"], arrays["y"]
    if y.ndim != 1 or x.shape[:1] != y.shape or not len(y):
        raise _bad(
            file,
            f"x is {x.shape}, y is {y.shape}",
            "give one class a sample, and at least one sample",
        )
    return Rows(_samples(file, x, welcome), _classes(file, y, welcome))


def _samples(file: Path, x: np.ndarray, welcome: Welcome) -> Tensor:
    shape = welcome.shape
    if x.dtype.kind not in "uif" or (x.dtype.kind in "ui" and x.dtype != np.uint8):
        raise _bad(file, f"x is of type {x.dtype}", "give float32, or bytes (uint8) for pictures")
    if x.shape[1:] == shape[1:] and shape[0] == 1:
        x = x[:, None]
    elif x.shape[1:] != shape and x.ndim == 4 and x.shape[1:] == (*shape[1:], shape[0]):
        x = x.transpose(0, 3, 1, 2)
    if x.shape[1:] != shape:
        raise _bad(file, f"samples are {x.shape[1:]}", f"the experiment's are {shape}")
    if x.dtype == np.uint8:
        stats = image_statistics(_settings(welcome).get("name", ""))
        return normalise(x, *(stats or ((0.0,), (1.0,))))
    found = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    if not bool(torch.isfinite(found).all()):
        raise _bad(file, "x holds NaN or infinite values", "replace them")
    return found


def _classes(file: Path, y: np.ndarray, welcome: Welcome) -> Tensor:
    number = {name: place for place, name in enumerate(welcome.class_names)}
    if y.dtype.kind in "US" or all(name.lstrip("-").isdigit() for name in number):
        told = [
            str(one) if not isinstance(one, bytes) else one.decode(errors="replace")
            for one in y.tolist()
        ]
        strange = sorted(set(told) - set(number))
        if strange:
            raise _bad(
                file,
                f"there is no class {strange[0]!r}",
                f"classes are {', '.join(welcome.class_names)}",
            )
        return torch.tensor([number[one] for one in told], dtype=torch.int64)
    if y.dtype.kind not in "ui" or y.min() < 0 or y.max() >= welcome.classes:
        raise _bad(
            file,
            f"y is of type {y.dtype}, from {y.min()} to {y.max()}",
            f"give numbers 0..{welcome.classes - 1}, or names",
        )
    return torch.from_numpy(y.astype(np.int64))


def _bad(file: Path, message: str, fix: str) -> InputError:
    return InputError(f"{file}: {message}", field="--data", fix=fix)

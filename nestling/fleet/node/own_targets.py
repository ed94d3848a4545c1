"""What is to be learned of the rows that a device brings: targets by the run's task, and targets of
their form where there are no rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nestling.errors import InputError
from nestling.files import parse_toml
from nestling.fleet.protocol.wire import Welcome
from nestling.tasks import (
    Classification,
    Forecast,
    MultiLabel,
    NextToken,
    Reconstruction,
    Regression,
    Task,
)

OF_SAMPLES = (Forecast.name, Reconstruction.name, NextToken.name)
"""Tasks whose targets are in the samples: rows of a device have no y."""


def task_name(welcome: Welcome) -> str:
    """What the run learns."""
    data = parse_toml(welcome.experiment, "the experiment").get("data", {})
    return str(data.get("task", Classification.name))


def form_of_targets(welcome: Welcome) -> tuple[Task | None, Tensor]:
    """The task, and one target of its form for each row (no memory is taken); None for classes,
    of which there are all."""
    name, rows, outputs = task_name(welcome), welcome.rows, welcome.classes
    if name == Classification.name:
        return None, torch.arange(rows) % outputs
    if name == NextToken.name:
        return NextToken(), torch.zeros(1, *welcome.shape, dtype=torch.int64).expand(rows, -1)
    if name == MultiLabel.name:
        return MultiLabel(), torch.zeros(1, outputs, dtype=torch.bool).expand(rows, outputs)
    values = torch.zeros(1, outputs).expand(rows, outputs)
    if name == Reconstruction.name:
        return Reconstruction(torch.tensor([False, True])), values  # of the two test rows
    mean, scale = welcome.mean or (0.0,) * outputs, welcome.scale or (1.0,) * outputs
    kind = Forecast if name == Forecast.name else Regression
    return kind(mean, scale, (1.0,) * outputs), values


def whole_shape(welcome: Welcome) -> tuple[int, ...]:
    """The shape of a sample with its target, where that is in it: the steps to be foretold, or the
    last token."""
    name, shape = task_name(welcome), welcome.shape
    if name == Forecast.name:
        return (*shape[:-1], shape[-1] + welcome.classes // shape[0])
    return (shape[0] + 1,) if name == NextToken.name else shape


def parted(x: Tensor, y: np.ndarray, file: Path, welcome: Welcome) -> tuple[Tensor, Tensor]:
    """Samples and their targets."""
    name = task_name(welcome)
    if name == Reconstruction.name:
        return x, x.flatten(1)
    if name == Forecast.name:
        steps = welcome.shape[-1]
        return x[..., :steps].contiguous(), x[..., steps:].flatten(1)
    if name == NextToken.name:
        if int(x.max()) >= welcome.classes:
            raise bad(file, f"x holds token {int(x.max())}", f"give 0..{welcome.classes - 1}")
        return x[:, :-1].contiguous(), x[:, 1:].contiguous()
    if name == Classification.name:
        return x, _classes(file, y, welcome)
    table = y[:, None] if y.ndim == 1 else y
    if table.ndim != 2 or table.shape[1] != welcome.classes or table.dtype.kind not in "buif":
        fix = f"give {welcome.classes} numbers a sample"
        raise bad(file, f"y is {y.dtype} {y.shape}", fix)
    return x, (_flags if name == MultiLabel.name else _values)(file, table, welcome)


def _flags(file: Path, y: np.ndarray, _welcome: Welcome) -> Tensor:
    if not np.isin(y, (0, 1)).all():
        raise bad(file, "y holds more than flags", "give 0 or 1 for every label")
    return torch.from_numpy(y.astype(bool))


def _values(file: Path, y: np.ndarray, welcome: Welcome) -> Tensor:
    """In the units of the data: they are brought to the run's own mean and scale here."""
    mean, scale = np.array(welcome.mean or (0.0,)), np.array(welcome.scale or (1.0,))
    found = torch.from_numpy(((y.astype(np.float64) - mean) / scale).astype(np.float32))
    if not bool(torch.isfinite(found).all()):
        raise bad(file, "y holds NaN, infinite or far too large values", "replace them")
    return found


def _classes(file: Path, y: np.ndarray, welcome: Welcome) -> Tensor:
    number = {name: place for place, name in enumerate(welcome.class_names)}
    if y.ndim != 1:
        raise bad(file, f"y is {y.shape}", "give one class a sample")
    if y.dtype.kind in "US" or all(name.lstrip("-").isdigit() for name in number):
        told = [
            str(one) if not isinstance(one, bytes) else one.decode(errors="replace")
            for one in y.tolist()
        ]
        strange = sorted(set(told) - set(number))
        if strange:
            raise bad(
                file,
                f"there is no class {strange[0]!r}",
                f"classes are {', '.join(welcome.class_names)}",
            )
        return torch.tensor([number[one] for one in told], dtype=torch.int64)
    if y.dtype.kind not in "ui" or y.min() < 0 or y.max() >= welcome.classes:
        raise bad(
            file,
            f"y is of type {y.dtype}, from {y.min()} to {y.max()}",
            f"give numbers 0..{welcome.classes - 1}, or names",
        )
    return torch.from_numpy(y.astype(np.int64))


def bad(file: Path, message: str, fix: str) -> InputError:
    """What is raised where a device's file cannot be used."""
    return InputError(f"{file}: {message}", field="--data", fix=fix)

"""The data that a device brings: rows of the experiment's form in .npz files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nestling.data import image_statistics, normalise
from nestling.files import parse_toml, read_arrays
from nestling.fleet.node.data_files import data_files
from nestling.fleet.node.own_targets import OF_SAMPLES, bad, parted, task_name, whole_shape
from nestling.fleet.protocol.wire import Welcome


@dataclass(frozen=True)
class Rows:
    """Samples (float32; of token ids int64) and what the run's task has as their targets."""

    x: Tensor
    y: Tensor

    @property
    def kinds(self) -> np.ndarray:
        """The class of each row; where there are none, all rows are of one kind."""
        of_classes = self.y.dtype == torch.int64 and self.y.dim() == 1
        return self.y.numpy() if of_classes else np.zeros(len(self.y), np.int64)


def read_rows(path: str | Path, welcome: Welcome) -> Rows:
    """The rows in an .npz file, or in all .npz files of a folder in the order of their names.

    `x` holds samples in the experiment's form: float numbers as the experiment's own data have them
    after preparation, or bytes, which are prepared as the experiment's pictures are (scaled to 0..1
    where it has none). `y` holds the classes: their names, or where the names are numbers or
    absent, their numbers; with the task multi-label flags, with regression values in the units of
    the experiment's data. The other tasks need none: of a forecast `x` has the steps to be foretold
    too, of a next token the whole text, of a reconstruction what is normal.
    """
    parts = [_read(file, welcome) for file in data_files(path)]
    return Rows(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))


def _read(file: Path, welcome: Welcome) -> Rows:
    told = task_name(welcome) not in OF_SAMPLES
    arrays = read_arrays(file, field="--data", need=("x", "y") if told else ("x",))
    x = arrays["x"]
    y = arrays["y"] if told else np.zeros(x.shape[:1])
    if not x.ndim or not len(x) or x.shape[:1] != y.shape[:1]:
        raise bad(
            file,
            f"x is {x.shape}, y is {y.shape}",
            "give one target a sample, and at least one sample",
        )
    return Rows(*parted(_samples(file, x, welcome), y, file, welcome))


def _samples(file: Path, x: np.ndarray, welcome: Welcome) -> Tensor:
    shape = whole_shape(welcome)
    if welcome.tokens:
        if x.dtype.kind not in "ui" or x.shape[1:] != shape or (x.size and x.min() < 0):
            raise bad(file, f"x is {x.dtype} {x.shape}", f"give {shape[0]} token ids a sample")
        return torch.from_numpy(x.astype(np.int64))
    if x.dtype.kind not in "uif" or (x.dtype.kind in "ui" and x.dtype != np.uint8):
        raise bad(file, f"x is of type {x.dtype}", "give float32, or bytes (uint8) for pictures")
    if x.shape[1:] == shape[1:] and shape[0] == 1:
        x = x[:, None]
    elif x.shape[1:] != shape and x.ndim == 4 and x.shape[1:] == (*shape[1:], shape[0]):
        x = x.transpose(0, 3, 1, 2)
    if x.shape[1:] != shape:
        raise bad(file, f"samples are {x.shape[1:]}", f"the experiment's are {shape}")
    if x.dtype == np.uint8:
        stats = image_statistics(
            parse_toml(welcome.experiment, "the experiment").get("data", {}).get("name", "")
        )
        return normalise(x, *(stats or ((0.0,), (1.0,))))
    found = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    if not bool(torch.isfinite(found).all()):
        raise bad(file, "x holds NaN or infinite values", "replace them")
    return found

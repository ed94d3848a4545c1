"""What every reader returns: samples, labels, test rows and, where the data has them, natural
clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nestling.data.recipe import Reading
from nestling.errors import InputError
from nestling.tasks import Classification, NextToken, Task
from nestling.tasks.losses import FILLING


@dataclass(frozen=True)
class Dataset:
    """Training and test rows in memory. One sample is (C, H, W), (C, L) or (F,); channels come
    first. Token ids are (L,) whole numbers. A target is what the task says; `classes` is how many
    outputs a network has for it: classes, values, or tokens."""

    name: str
    x: Tensor  # float32 (token ids: int64), normalised, contiguous
    y: Tensor  # int64 (N,) of classes
    x_test: Tensor
    y_test: Tensor
    classes: int
    client: np.ndarray | None = None  # natural client of each training row, int64 0..K-1
    class_names: tuple[str, ...] = ()
    reading: Reading | None = None  # what was read, and what was done to it
    task: Task | None = None  # None: classification
    kinds: Tensor | None = None  # of rows that have no class: what stands for it in a split
    kinds_test: Tensor | None = None
    kind_names: tuple[str, ...] = ()

    @property
    def learned(self) -> Task:
        """What is learned from the rows."""
        return self.task or Classification(self.classes)

    @property
    def strata(self) -> tuple[Tensor, Tensor]:
        """The classes of training and test rows, or the kinds that stand for them."""
        if self.kinds is None or self.kinds_test is None:
            return self.y, self.y_test
        return self.kinds, self.kinds_test

    @property
    def strata_names(self) -> tuple[str, ...]:
        """What the classes, or the kinds that stand for them, are called."""
        named = self.class_names if self.kinds is None else self.kind_names
        return named or tuple(map(str, range(1 + max(int(part.max()) for part in self.strata))))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x.shape[1:])

    def check(self) -> None:
        """Raise `InputError` unless the parts fit together: lengths, types, labels in range, finite
        values."""
        if self.classes < 2 and self.learned.has_classes:
            raise self._wrong(f"{self.classes} class(es)", "at least two classes are needed")
        self._check_rows("training", self.x, self.y)
        self._check_rows("test", self.x_test, self.y_test)
        if self.x_test.shape[1:] != self.x.shape[1:] or self.x_test.dtype != self.x.dtype:
            raise self._wrong(
                f"training samples are {self.shape}, test samples not: {tuple(self.x_test.shape)}",
                "make them alike",
            )
        if self.class_names and len(self.class_names) != self.classes:
            raise self._wrong(
                f"{len(self.class_names)} class names for {self.classes} classes",
                "name each class once or none",
            )
        if self.client is not None:
            self._check_client(self.client)

    def _check_rows(self, part: str, x: Tensor, y: Tensor) -> None:
        tokens = x.dtype == torch.int64 and x.dim() == 2
        of_classes = self.learned.has_classes
        if (x.dtype != torch.float32 and not tokens) or (of_classes and y.dtype != torch.int64):
            raise self._wrong(
                f"{part} rows are {x.dtype} with {y.dtype} labels",
                "samples are float32 (token ids int64), labels int64",
            )
        if (of_classes and y.dim() != 1) or x.dim() not in (2, 3, 4):
            raise self._wrong(
                f"{part} samples are {tuple(x.shape)}, labels {tuple(y.shape)}",
                "samples are (N, F), (N, C, L) or (N, C, H, W)",
            )
        if len(x) != len(y):
            raise self._wrong(
                f"{len(x)} {part} samples but {len(y)} labels", "give one label a sample"
            )
        if x.numel() == 0:
            raise self._wrong(f"no {part} rows", "give at least one sample with at least one value")
        if not x.is_contiguous():
            raise self._wrong(f"{part} samples are not contiguous", "call .contiguous() on them")
        known = y[y != FILLING] if isinstance(self.learned, NextToken) else y
        low, high = (int(known.min()), int(known.max())) if self._counted else (0, 0)
        if low < 0 or high >= self.classes:
            raise self._wrong(
                f"{part} labels run from {low} to {high}", f"labels lie in 0..{self.classes - 1}"
            )
        # The extremes are finite exactly when everything is (NaN propagates), and no mask of the
        # data's size is made.
        if not all(torch.isfinite(extreme) for extreme in torch.aminmax(x)):
            raise self._wrong(
                f"{part} samples hold NaN or infinite values", "replace them before use"
            )

    @property
    def _counted(self) -> bool:
        """Whether targets are numbers of outputs: classes, or tokens."""
        return self.learned.has_classes or isinstance(self.learned, NextToken)

    def _check_client(self, client: np.ndarray) -> None:
        if client.dtype != np.int64 or client.shape != (len(self.y),):
            raise self._wrong(
                f"clients are {client.dtype} {client.shape}",
                f"give one int64 client for each of {len(self.y)} rows",
            )
        if client.min() < 0 or not np.bincount(client).all():
            raise self._wrong(
                "client numbers have gaps or are negative", "number the clients 0..K-1"
            )

    def _wrong(self, message: str, fix: str) -> InputError:
        return InputError(f"{self.name}: {message}", field="data", fix=fix)


def normalise(images: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """8-bit images (N, C, H, W) as float32: scaled to 0..1, then (value - mean) / std per
    channel."""
    out = images.astype(np.float32, order="C")
    out /= 255
    out -= np.asarray(mean, np.float32).reshape(-1, 1, 1)
    out /= np.asarray(std, np.float32).reshape(-1, 1, 1)
    return torch.from_numpy(out)


def as_labels(labels: np.ndarray) -> Tensor:
    """Labels of any integer type as an int64 tensor."""
    return torch.from_numpy(labels.astype(np.int64))

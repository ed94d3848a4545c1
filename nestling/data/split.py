"""Federated splits: which training rows each client has, decided by a seed.

There are two ways. With `size = 0` the rows are divided: every row has one owner (or none), kept as
one order array and offsets. With `size > 0` each client draws its own rows, on demand and from its
own stream: a million clients cost nothing until asked for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch

from nestling.data import partition
from nestling.data.dataset import Dataset
from nestling.errors import InputError
from nestling.seeds import stream
from nestling.settings import (
    Bounds,
    Count,
    OneOf,
    Positive,
    ShareBelowOne,
    check_settings,
    take_types,
)

KINDS = ("iid", "dirichlet", "classes", "quantity", "natural")


@dataclass(frozen=True)
class SplitConfig:
    """How training rows are divided among the clients (`[split]` in an experiment's file).

    kind:     "iid" (any rows to anybody), "dirichlet" (classes in unequal shares), "classes" (each
              client holds a few of them), "quantity" (unequal numbers of rows), or "natural" (by
              the clients that the rows name).
    alpha:    how equal the shares are, the larger the more: of the classes ("dirichlet") or of the
              numbers of rows ("quantity").
    classes:  how many classes a client holds, with "classes".
    min_size: the fewest rows of a client, those held out included; natural clients keep what they
              have.
    size:     how many rows every client draws for itself; clients may then share rows.
    holdout:  the share of each client's rows that is kept for its personal test.
    public:   the share of training rows that the server takes before the split: the public rows.
    """

    kind: Annotated[str, OneOf(KINDS, "kind of split")] = "dirichlet"
    alpha: Positive = 0.5
    classes: Count = 2
    min_size: Count = 10
    size: Annotated[int, Bounds(0, zero="the rows are divided")] = 0
    holdout: ShareBelowOne = 0.0
    public: ShareBelowOne = 0.01

    def __post_init__(self) -> None:
        """Refuses what is of another type; `check` refuses what is out of range."""
        take_types(self, "split")

    def check(self, classes: int | None = None) -> None:
        """Raise `InputError` for a field out of range; `classes` is the number of classes of the
        data, where it is known."""
        check_settings(self, "split")
        _require(math.isfinite(self.alpha), "alpha", self.alpha, "a positive number")
        if self.kind == "classes" and classes is not None:
            _require(
                self.classes <= classes,
                "classes",
                self.classes,
                f"at most {classes}, the number of classes in the data",
            )
        if self.size and self.kind in ("quantity", "natural"):
            raise InputError(
                f"clients cannot draw rows with kind {self.kind!r}",
                field="split.size",
                fix="set it to 0, or choose another kind",
            )
        if self.size and self.kind == "classes":
            _require(
                self.size >= self.classes,
                "size",
                self.size,
                f"at least split.classes = {self.classes}",
            )


class Split(ABC):
    """The rows of every client. Each answer depends on the client alone, not on what was asked
    before."""

    def __init__(self, clients: int, y: np.ndarray, classes: int, holdout: float) -> None:
        """Keeps the labels, from which the classes are counted, and the share of its rows that a
        client holds out."""
        self.clients = clients
        self._y, self._classes, self._holdout = y, classes, holdout

    def indices(self, client: int) -> np.ndarray:
        """The training rows of one client, int64, in a random but fixed order."""
        return self._parts(client)[0]

    def holdout(self, client: int) -> np.ndarray:
        """The rows one client keeps for its personal test; none of them is among its training
        rows."""
        return self._parts(client)[1]

    def size(self, client: int) -> int:
        """How many training rows one client has."""
        return len(self.indices(client))

    def most(self) -> int:
        """The most training rows that any client has."""
        return max(self.size(client) for client in range(self.clients))

    def counts(self, client: int) -> np.ndarray:
        """Training rows of one client per class."""
        return np.bincount(self._y[self.indices(client)], minlength=self._classes)

    @abstractmethod
    def _rows(self, client: int) -> np.ndarray:
        """All rows of one client in random order."""

    def _parts(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self._rows(self._known(client))
        kept = _kept(len(rows), self._holdout)
        return rows[kept:], rows[:kept]

    def _known(self, client: int) -> int:
        if not 0 <= client < self.clients:
            raise IndexError(f"client {client} of {self.clients}")
        return int(client)


class DividedSplit(Split):
    """Every row has at most one owner."""

    def __init__(
        self,
        owner: np.ndarray,
        clients: int,
        y: np.ndarray,
        classes: int,
        holdout: float,
        rng: np.random.Generator,
    ) -> None:
        """Shuffles the rows and sorts them by `owner`, so that the rows of a client lie side by
        side."""
        super().__init__(clients, y, classes, holdout)
        order = rng.permutation(len(owner))
        order = order[owner[order] != partition.NOBODY]
        self._order = order[np.argsort(owner[order], kind="stable")]
        self._start = np.concatenate(([0], np.cumsum(np.bincount(owner[order], minlength=clients))))

    def size(self, client: int) -> int:
        """How many training rows one client has."""
        client = self._known(client)
        rows = int(self._start[client + 1] - self._start[client])
        return rows - _kept(rows, self._holdout)

    def most(self) -> int:
        """The most training rows that any client has."""
        return self.size(int(np.diff(self._start).argmax()))

    def _rows(self, client: int) -> np.ndarray:
        return self._order[self._start[client] : self._start[client + 1]].copy()


class DrawnSplit(Split):
    """Every client draws its own rows, so that clients may share some."""

    def __init__(
        self, config: SplitConfig, clients: int, y: np.ndarray, classes: int, seed: int
    ) -> None:
        """Notes what the draws need; no client's rows are drawn yet."""
        super().__init__(clients, y, classes, config.holdout)
        self._config, self._seed, self._groups = config, seed, partition.class_rows(y)
        self._held = min(config.classes, len(self._groups))
        most = config.size if config.kind == "dirichlet" else math.ceil(config.size / self._held)
        # Whether no client can meet a row twice, whatever it draws.
        self._distinct = config.kind == "iid" or most <= min(len(rows) for rows in self._groups)
        self._last: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def size(self, client: int) -> int:
        """How many training rows one client has."""
        self._known(client)
        if self._holdout and not self._distinct:
            return super().size(client)
        return self._config.size - _kept(self._config.size, self._holdout)

    def most(self) -> int:
        """The most training rows that any client may have."""
        return self._config.size

    def _rows(self, client: int) -> np.ndarray:
        # Rows and class counts of one client are asked for in a row, and drawing costs more than
        # all the rest.
        if self._last[0] != client:
            self._last = (client, self._drawn(client))
        return self._last[1].copy()

    def _drawn(self, client: int) -> np.ndarray:
        rng = stream(self._seed, "split", "draw", client)
        if self._config.kind == "iid":
            return rng.choice(len(self._y), self._config.size, replace=False)
        takes = self._takes(rng)
        drawn = [
            _draw(rows, take, rng)
            for rows, take in zip(self._groups, takes.tolist(), strict=True)
            if take
        ]
        return rng.permutation(np.concatenate(drawn))

    def _takes(self, rng: np.random.Generator) -> np.ndarray:
        """How many rows this client draws of each class that occurs."""
        size, present = self._config.size, len(self._groups)
        if self._config.kind == "dirichlet":
            return rng.multinomial(size, partition.proportions(self._config.alpha, present, rng))
        takes = np.zeros(present, np.int64)
        takes[rng.choice(present, self._held, replace=False)] = np.diff(
            size * np.arange(self._held + 1) // self._held
        )
        return takes

    def _parts(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        if self._distinct:
            return super()._parts(client)
        rows = self._rows(self._known(client))
        if not self._holdout:
            return rows, rows[:0]
        # A row drawn twice must not be trained on and tested with: whole rows change sides, repeats
        # included.
        _, first = np.unique(rows, return_index=True)
        distinct = rows[np.sort(first)]
        held = np.isin(rows, distinct[: _kept(len(distinct), self._holdout)])
        return rows[~held], rows[held]


def make_split(
    config: SplitConfig,
    *,
    y: np.ndarray,
    classes: int,
    clients: int,
    seed: int,
    client: np.ndarray | None = None,
) -> Split:
    """The split of rows with labels `y` among `clients`; `client` gives the natural client of each
    row (kind "natural")."""
    config.check(classes)
    y = _check_labels(np.asarray(y), classes)
    if clients < 1:
        raise InputError(f"{clients} clients", field="clients", fix="use at least one")
    if config.size:
        if config.size > len(y):
            raise InputError(
                f"{config.size} rows a client, the data has {len(y)}",
                field="split.size",
                fix=f"use at most {len(y)}",
            )
        return DrawnSplit(config, clients, y, classes, seed)
    rng = stream(seed, "split", config.kind)
    return DividedSplit(
        _owner(config, y, clients, client, rng), clients, y, classes, config.holdout, rng
    )


def take_public(dataset: Dataset, share: float, seed: int) -> tuple[Dataset, Dataset | None]:
    """Take `share` of the training rows out, stratified by class: (the remaining data, the public
    rows or None if `share` is 0).

    Every class and every natural client keeps at least one row. The public part has no clients and
    the same test rows.
    """
    _check_share(share)
    if share == 0:
        return dataset, None
    public = _public_rows(dataset, share, stream(seed, "public"))
    kinds = dataset.kinds
    if not public.any():
        raise InputError(
            f"no row can be spared for a share of {share}",
            field="split.public",
            fix="set it to 0, or use more data",
        )
    mask = torch.from_numpy(public)
    client = None if dataset.client is None else dataset.client[~public]
    rest = replace(
        dataset,
        x=dataset.x[~mask],
        y=dataset.y[~mask],
        client=client,
        kinds=None if kinds is None else kinds[~mask],
    )
    return rest, replace(
        dataset,
        name=f"{dataset.name} (public)",
        x=dataset.x[mask],
        y=dataset.y[mask],
        client=None,
        kinds=None if kinds is None else kinds[mask],
    )


def _public_rows(dataset: Dataset, share: float, rng: np.random.Generator) -> np.ndarray:
    y = dataset.strata[0].numpy()
    spare = np.ones(len(y), bool)
    if dataset.client is not None:
        spare[np.unique(dataset.client, return_index=True)[1]] = False
    groups = partition.class_rows(y)
    takes = partition.shared_out(
        max(1, round(share * len(y))), np.array([len(rows) for rows in groups], float)
    )
    public = np.zeros(len(y), bool)
    for rows, take in zip(groups, takes, strict=True):
        public[rng.permutation(rows[spare[rows]])[: min(take, len(rows) - 1)]] = True
    return public


def _owner(
    config: SplitConfig,
    y: np.ndarray,
    clients: int,
    client: np.ndarray | None,
    rng: np.random.Generator,
) -> np.ndarray:
    if config.kind == "natural":
        return partition.natural(_check_client(client, len(y)), clients, rng)
    if clients * config.min_size > len(y):
        raise InputError(
            f"{clients} clients with at least {config.min_size} rows each need more than the "
            f"{len(y)} rows there are",
            field="split.size",
            fix="set split.size so that clients draw their own rows, lower split.min_size, or "
            "use fewer clients",
        )
    if config.kind == "iid":
        return partition.iid(len(y), clients, rng)
    if config.kind == "quantity":
        return partition.quantity(len(y), clients, config.alpha, config.min_size, rng)
    if config.kind == "classes":
        return partition.classes(y, clients, config.classes, config.min_size, rng)
    return partition.dirichlet(y, clients, config.alpha, config.min_size, rng)


def _check_labels(y: np.ndarray, classes: int) -> np.ndarray:
    if y.ndim != 1 or y.dtype.kind not in "iu" or len(y) == 0:
        raise InputError(
            f"labels are {y.dtype} {y.shape}",
            field="data",
            fix="give at least one integer label a row",
        )
    if y.min() < 0 or y.max() >= classes:
        raise InputError(
            f"labels run from {y.min()} to {y.max()}",
            field="data",
            fix=f"labels lie in 0..{classes - 1}",
        )
    return y.astype(np.int64)


def _check_client(client: np.ndarray | None, rows: int) -> np.ndarray:
    if client is None:
        raise InputError(
            "the data has no natural clients",
            field="split.kind",
            fix="use another kind, or data whose rows name their client",
        )
    if client.shape != (rows,) or client.dtype.kind not in "iu" or client.min() < 0:
        raise InputError(
            f"clients are {client.dtype} {client.shape}",
            field="data",
            fix=f"give one client 0..K-1 for each of {rows} rows",
        )
    return client.astype(np.int64)


def _check_share(share: float) -> None:
    _require(0 <= share < 1, "public", share, "a share from 0 to below 1")


def _require(good: bool, name: str, value: float, wanted: str) -> None:
    if not good:
        raise InputError(f"{value} is out of range", field=f"split.{name}", fix=f"use {wanted}")


def _draw(rows: np.ndarray, take: int, rng: np.random.Generator) -> np.ndarray:
    """`take` of these rows: distinct while they last, repeats only beyond that."""
    if take <= len(rows):
        return rng.choice(rows, take, replace=False)
    return np.concatenate((rows, rng.choice(rows, take - len(rows))))


def _kept(rows: int, share: float) -> int:
    """How many of `rows` are held out; one always stays for training."""
    return min(math.floor(rows * share + 0.5), max(rows - 1, 0))

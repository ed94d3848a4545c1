"""Statistics by class: what a client tells of its features (what the server makes of it is in `class_table`).

A client tells of the classes it holds, one row of every statistic each, and of no others: rows of absent classes do not travel. A
message's facts say which classes they are, as with names. The server takes means over the clients that tell of a class, so that a
class on one client alone is that client's statistic, and keeps what it knew of a class of which nobody told this time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from nestling.methods.api import Client, Device, Message, Piece, Replies, State, World, kept, made
from nestling.methods.part import Fact, Facts, Part, Parts, Tensors, can_count
from nestling.methods.personal import Personal, common_features
from nestling.methods.representation.class_table import COUNTS, STATISTICS, ClassTable
from nestling.models.embedding import with_features
from nestling.models.taps import Taps, logits_and_features
from nestling.settings import Whole
from nestling.training.objectives import Given

_LOOK = 256  # rows that a client looks at in one go


@dataclass(frozen=True)
class Told(Piece):
    """A piece, and the classes that a reply tells of."""

    classes: tuple[int, ...] = ()


def _told(method: TellsByClass, client: Client, _received: Message) -> State:
    statistics, classes = method.statistics(client), torch.from_numpy(method.told_of(client)).to(client.place)
    return {name: rows[classes] for name, rows in statistics.items()}


def _told_like(method: TellsByClass, piece: Piece, _sent: Message) -> State:
    assert isinstance(piece, Told)
    shapes = method.shapes(method.world.classes)
    return {name: torch.empty(len(piece.classes), *shape, device="meta") for name, shape in shapes.items()}


def _counted(method: TellsByClass, client: Client, _received: Message) -> State:
    rows = client.counts[method.told_of(client)].astype(np.int32)
    return {"rows": torch.from_numpy(rows).to(client.place)}


def _counted_like(_method: TellsByClass, piece: Piece, _sent: Message) -> State:
    assert isinstance(piece, Told)
    return {"rows": torch.empty(len(piece.classes), dtype=torch.int32, device="meta")}


def _rising(method: TellsByClass, _sent: Message, said: Any) -> bool:
    most = method.world.classes
    return isinstance(said, list) and all(type(c) is int and 0 <= c < most for c in said) and sorted(set(said)) == said


TOLD = Part(STATISTICS, up=_told, like=_told_like)
_COUNTED = Part(
    COUNTS,
    up=_counted,
    like=_counted_like,
    when=lambda method: method.counted,
    can=lambda _method, reply: can_count(reply[COUNTS]["rows"], reply),
)
_CLASSES = Fact(
    "classes",
    lambda method, client, _: method.told_of(client).tolist(),
    _rising,
    "the classes told of, rising numbers below that of all classes,",
)


@dataclass
class TellsByClass(Personal):
    """Base of the methods whose clients keep their networks and tell of every class they hold: what is told, and how it is checked."""

    parts: ClassVar[Parts] = (TOLD, _COUNTED)
    said: ClassVar[Facts] = (_CLASSES,)

    @abstractmethod
    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        """The shape of every statistic of one class, by name."""

    @property
    def counted(self) -> bool:
        """Whether clients also tell how many rows of a class they have."""
        return True

    @property
    def fewest(self) -> int:
        """The fewest rows of a class that a client tells of."""
        return 1

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def cut_to(self, piece: Piece, sent: Message, facts: Mapping[str, Any]) -> Piece:
        """The piece with the classes that the reply tells of."""
        return Told(piece.reference, piece.view, tuple(facts["classes"]))

    def largest(self, piece: Piece, sent: Message) -> Mapping[str, Tensors]:
        """What a reply that tells of all classes holds."""
        return self.expects(Told(piece.reference, piece.view, tuple(range(self.world.classes))), sent)

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def statistics(self, client: Client) -> State:
        """The client's statistics now, each with one row per class; what rows of absent classes hold does not matter."""
        raise NotImplementedError

    def told_of(self, client: Client) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The classes of which a client has enough rows; not on the client's place, where asking would wait for its training."""
        return np.flatnonzero(client.counts >= self.fewest)


@dataclass
class ByClass(TellsByClass):
    """Base of the methods whose clients keep their networks and exchange statistics of their features by class. Networks with another
    number of features than the common one have theirs pooled to it.

    size: how many features (0: as many as the network with the fewest has).
    """

    size: Whole = 0

    wide: int = made()
    table: ClassTable = kept()

    parts: ClassVar[Parts] = (replace(TOLD, down=lambda method, *_: method.table.of(method.table.classes())), _COUNTED)

    def tailor(self, module: nn.Module, taps: Taps) -> nn.Module:
        """The network with its features pooled to the common number."""
        return with_features(module, taps, self.wide)

    def setup(self, world: World) -> None:
        """Settles the common number of features, tailors the networks to it, and starts with an empty table."""
        self.wide = common_features(world, self.size)
        super().setup(world)
        self.know_nothing(world)

    def know_nothing(self, world: World) -> None:
        """Makes the table for a new run."""
        self.table = ClassTable.empty(self.shapes(world.classes), world.classes, world.place)

    def facts(self, device: Device, piece: Piece, round: int) -> dict[str, Any]:
        """The classes that the table knows of."""
        return {"classes": self.table.classes().tolist()}

    def merge(self, replies: Replies, round: int) -> None:
        """The mean per class over the clients that tell of it, weighted by their rows."""
        self.table = self.table.after(replies, robust=self.robust, most=self.most_of_class)


@torch.no_grad()
def outputs_of(client: Client, rows: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The features, logits and labels of a client's (first) rows under its weights as they are now, in evaluation mode."""
    module = client.reference.network(client.view, client.weights).eval()
    head, parts = client.reference.taps.head, client.x[:rows].split(_LOOK)
    logits, features = zip(*[logits_and_features(module, head, x) for x in parts], strict=True)
    return torch.cat(features), torch.cat(logits), client.y[:rows]


def class_means(values: Tensor, y: Tensor, classes: int) -> Tensor:
    """The mean of every class's rows, (classes, …); zero where a class has none."""
    flags = (y[:, None] == torch.arange(classes, device=y.device)).to(torch.float64)
    sums = flags.T @ values.reshape(len(values), -1).to(torch.float64)
    means = sums / flags.sum(0).clamp(min=1)[:, None]
    return means.reshape(classes, *values.shape[1:]).to(values.dtype)


def spread(received: Message, classes: int) -> dict[str, Tensor]:
    """What was received by class, one row for each of all classes, and "known": 1 for those that it tells of, 0 for the others."""
    given: dict[str, Tensor] = {}
    for name, rows in received[STATISTICS].items():
        which = torch.tensor(received.facts["classes"], dtype=torch.int64, device=rows.device)
        given[name] = rows.new_zeros(classes, *rows.shape[1:]).index_copy(0, which, rows)
        given["known"] = rows.new_zeros(classes).index_fill(0, which, 1.0)
    return given


def gap(features: Tensor, y: Tensor, given: Given, name: str = "features") -> Tensor:
    """Per row, how far its features are from the received ones of its class (mean square); 0 where nothing is known of the class."""
    return ((features - given[name][y]) ** 2).mean(1) * given["known"][y]

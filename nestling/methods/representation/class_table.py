"""What the server makes of statistics by class: means over the clients that tell of a class, kept until somebody tells anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nestling.methods.api import Replies, State
from nestling.trust.robust import Robust
from nestling.trust.weighing import fair_caps

STATISTICS, COUNTS = "statistics", "counts"


@dataclass(eq=False)
class ClassTable:
    """What the server knows by class: statistics with one row per class (zero where nothing is known), and which classes are known."""

    rows: State
    known: Tensor

    @staticmethod
    def empty(shapes: Mapping[str, tuple[int, ...]], classes: int, place: torch.device) -> ClassTable:
        """A table of statistics of these shapes, in which nothing is known."""
        rows = {name: torch.zeros(classes, *shape, device=place) for name, shape in shapes.items()}
        return ClassTable(rows, torch.zeros(classes, dtype=torch.bool, device=place))

    def after(
        self,
        replies: Replies,
        weighting: str = "samples",
        rate: float = 1.0,
        robust: Robust | None = None,
        most: float = 0.0,
    ) -> ClassTable:
        """The table after some replies: per class the mean over the clients that tell of it, weighted by their rows of the class or
        not at all, nobody by more than the share `most` of a class's weight, or what a robust rule makes of them; of what was known
        before, 1 − `rate` stays."""
        rows: State = {}
        said = self.known.clone()
        for name, old in self.rows.items():
            new, said = _by_rule(robust, replies, name, old) if robust else _class_mean(replies, name, old, weighting, most)
            both = torch.where(_wide(self.known, old), old.lerp(new, rate), new)
            rows[name] = torch.where(_wide(said, old), both, old)
        return ClassTable(rows, self.known | said)

    def classes(self) -> Tensor:
        """The classes it knows of."""
        return self.known.nonzero().flatten()

    def of(self, classes: Tensor) -> State:
        """What it knows of some classes, one row each; nothing if there are none."""
        return {name: rows[classes] for name, rows in self.rows.items()} if len(classes) else {}


def _class_mean(replies: Replies, name: str, like: Tensor, weighting: str, most: float) -> tuple[Tensor, Tensor]:
    """Per class Σ weight·statistic / Σ weight over the clients that tell of it, and which classes anybody tells of."""
    total = torch.zeros_like(like, dtype=torch.float64)
    weight = torch.zeros(len(like), dtype=torch.float64, device=like.device)
    caps = _caps(replies, len(like), most) if weighting == "samples" and 0 < most < 1 else None
    for reply in replies:
        classes = torch.tensor(reply.message.facts["classes"], dtype=torch.int64, device=like.device)
        own = reply.message[STATISTICS][name].to(total)
        share = (
            reply.by_class(reply.message[COUNTS]["rows"]).to(weight)
            if weighting == "samples"
            else torch.ones(len(classes)).to(weight)
        )
        share = share if caps is None else torch.minimum(share, caps.to(share)[classes])
        total.index_add_(0, classes, own * _wide(share, own))
        weight.index_add_(0, classes, share)
    return (total / _wide(weight.clamp(min=1e-12), total)).to(like.dtype), weight > 0


def _caps(replies: Replies, classes: int, most: float) -> Tensor:
    """By class, the most rows that anybody may count for."""
    rows = torch.zeros(max(1, len(replies)), classes, dtype=torch.float64)
    for k, reply in enumerate(replies):
        rows[k, reply.message.facts["classes"]] = reply.by_class(reply.message[COUNTS]["rows"]).to(rows)
    return fair_caps(rows, most)


def _by_rule(robust: Robust, replies: Replies, name: str, old: Tensor) -> tuple[Tensor, Tensor]:
    """Per class what a rule makes of the clients that tell of it, each counting alike, and which classes anybody tells of."""
    told = torch.zeros(len(replies), len(old), dtype=torch.bool, device=old.device)
    values = torch.zeros(len(replies), *old.shape, dtype=old.dtype, device=old.device)
    for k, reply in enumerate(replies):
        classes = torch.tensor(reply.message.facts["classes"], dtype=torch.int64, device=old.device)
        told[k, classes], values[k, classes] = True, reply.message[STATISTICS][name].to(values)
    held = told.reshape(*told.shape, *[1] * (old.dim() - 1)).expand_as(values)
    return (robust.combine(values, held, old) if len(replies) else old), told.any(0)


def _wide(rows: Tensor, like: Tensor) -> Tensor:
    return rows.reshape(-1, *[1] * (like.dim() - 1))

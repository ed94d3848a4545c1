"""A phase: one piece of client work (data source, objective, length, optimiser)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any

from torch import Tensor, nn

from nestling.errors import unknown
from nestling.schema import require
from nestling.settings import (
    Bounds,
    Count,
    NonZeroShare,
    NotNegative,
    OneOf,
    Positive,
    ShareBelowOne,
    Whole,
)
from nestling.training.augment import AUGMENTATIONS
from nestling.training.objectives import Given, Objective, supervised
from nestling.training.optimisers import OPTIMISERS, Optim

SCHEDULES = ("decay", "cosine")

GradientRule = Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Given], Mapping[str, Tensor]]
"""(parameters, gradients, given) → the gradients to apply. Pure, like an objective."""


@dataclass(frozen=True)
class Hook:
    """Changes what some layers put out while the phase trains: `change(layer, output)` for every
    layer of the given types, or those of them that `names` names."""

    layers: tuple[type[nn.Module], ...]
    change: Callable[[nn.Module, Any], Any]
    names: tuple[str, ...] = ()


def divide(layer: nn.Module, out: Tensor, *, by: float) -> Tensor:  # noqa: ARG001 (a hook's signature)
    """For hooks that bring the outputs of a narrow network to the scale of a wide one."""
    return out / by


@dataclass(frozen=True)
class Phase:
    """What a client does with data for a while.

    source:  "private" (the client's rows) or "public" (the server's share, without labels).
    rows:    which rows of the public source (None: all); `Batch.rows` counts within them.
    given:   tensors the objective and the rule may read.
    also:    a second objective; its gradients act only through the rule, which is given them as
             "also/<name of the parameter>".
    epochs:  passes over the source; `steps` > 0 stops after that many batches.
    freeze:  prefixes of parameter names that are not trained.
    augment: what happens to the inputs of every batch (see `augment`).
    """

    objective: Objective = supervised
    optim: Optim = field(default_factory=Optim)
    epochs: int = 1
    batch: int = 32
    steps: int = 0
    source: str = "private"
    given: Mapping[str, Tensor] = field(default_factory=dict)
    rule: GradientRule | None = None
    also: Objective | None = None
    hooks: tuple[Hook, ...] = ()
    freeze: tuple[str, ...] = ()
    drop_last: bool = False
    augment: str = "none"
    rows: Tensor | None = None


@dataclass(frozen=True)
class Train:
    """How clients train, unless their method says otherwise.

    epochs:    passes over a client's rows in a round.
    batch:     rows a step.
    optimizer: "sgd" (with `momentum`), "adam", or "adamw" (whose `weight_decay` acts on the
               weights, not through the gradient).
    lr:        the learning rate, before schedule and warm-up.
    momentum:  of "sgd".
    weight_decay: how much of a weight is added to its gradient, or with "adamw" taken off.
    clip:      the largest norm that a step's whole gradient may have; longer ones are scaled down.
    decay:     what the rate is multiplied by from round to round, with the schedule "decay".
    milestones: the rounds after which `factor` counts once more, with the schedule "decay".
    factor:    what the rate is multiplied by at a milestone.
    drop_last: whether a last batch that is not full is left out.
    schedule:  how the learning rate falls: "decay" (by `decay` every round and by `factor` at every
               milestone, a round number) or "cosine" (half a wave from `lr` towards 0 over `span`
               rounds; `decay` and `factor` then say nothing).
    warmup:    over so many first rounds the rate climbs to its full height in equal steps; a cosine
               falls from there.
    span:      the rounds of a cosine.
    augment:   what happens to training images: "none", "shift" (moved by up to two pixels),
               "crop-flip" (widened by four pixels of zeros each way, cropped anywhere, mirrored
               half the time), "cutout" (a square of half their side set to zero), or
               "crop-flip-cutout".
    """

    epochs: Count = 2
    batch: Count = 20
    optimizer: Annotated[str, OneOf(OPTIMISERS)] = "sgd"
    lr: Positive = 0.02
    momentum: ShareBelowOne = 0.9
    weight_decay: NotNegative = 0.0
    clip: Annotated[float, Bounds(0, zero="no clipping")] = 0.0
    decay: NonZeroShare = 0.98
    milestones: tuple[int, ...] = ()
    factor: NonZeroShare = 0.1
    schedule: Annotated[str, OneOf(SCHEDULES)] = "decay"
    warmup: Whole = 0
    span: Annotated[int, Bounds(0, zero="the rounds of the run")] = 0
    drop_last: bool = False
    augment: Annotated[str, OneOf(AUGMENTATIONS)] = "shift"

    def __post_init__(self) -> None:
        """Refuses unknown names, numbers out of range, and settings that contradict each other."""
        require(
            self.optimizer in OPTIMISERS,
            f"unknown optimiser {self.optimizer!r}",
            "train.optimizer",
            f"allowed: {', '.join(OPTIMISERS)}",
        )
        if self.augment not in AUGMENTATIONS:
            raise unknown("augmentation", self.augment, AUGMENTATIONS, field="train.augment")
        require(self.epochs >= 1, "at least one epoch", "train.epochs")
        require(self.batch >= 1, "at least one sample a batch", "train.batch")
        require(self.lr > 0, "must be above 0", "train.lr")
        require(0 <= self.momentum < 1, "must be in [0, 1)", "train.momentum")
        require(self.weight_decay >= 0, "must not be negative", "train.weight_decay")
        require(self.clip >= 0, "must not be negative (0 turns clipping off)", "train.clip")
        require(0 < self.decay <= 1, "must be in (0, 1]", "train.decay")
        require(0 < self.factor <= 1, "must be in (0, 1]", "train.factor")
        if self.schedule not in SCHEDULES:
            raise unknown("schedule", self.schedule, SCHEDULES, field="train.schedule")
        fix = 'leave them out, or set train.schedule = "decay"'
        require(
            not (self.milestones and self.schedule == "cosine"),
            "a cosine has none",
            "train.milestones",
            fix,
        )
        require(self.warmup >= 0, "must not be negative", "train.warmup")
        require(self.span >= 0, "must not be negative (0: the rounds of the run)", "train.span")
        if self.span and self.schedule == "cosine":
            require(
                self.warmup < self.span,
                f"all {self.span} rounds of the cosine are warm-up",
                "train.warmup",
                "take fewer",
            )

    def over(self, rounds: int) -> Train:
        """The same in a run of so many rounds."""
        return replace(self, span=rounds) if self.schedule == "cosine" and not self.span else self

    def rate(self, round: int) -> float:
        """The learning rate of round 1, 2, …"""
        height = min(1.0, round / (self.warmup + 1)) if self.warmup else 1.0
        if self.schedule == "decay":
            passed = sum(round > m for m in self.milestones)
            return self.lr * self.decay ** (round - 1) * self.factor**passed * height
        done = (round - 1 - self.warmup) / max(self.span - self.warmup, 1)
        return self.lr * height * (1 + math.cos(math.pi * min(max(done, 0.0), 1.0))) / 2

    def optim(self, round: int) -> Optim:
        """The optimiser of round 1, 2, …"""
        lr = self.rate(round)
        return Optim(
            self.optimizer,
            lr,
            self.momentum if self.optimizer == "sgd" else 0.0,
            self.weight_decay,
            self.clip,
        )

    def phase(self, round: int, **changes: Any) -> Phase:
        """The phase of plain local training in a round; `changes` are fields of `Phase`."""
        plain = _plain_phase(self, round)
        return replace(plain, **changes) if changes else plain


@lru_cache(maxsize=16)
def _plain_phase(train: Train, round: int) -> Phase:
    """One object for all clients of a round, which also says that they do the same."""
    return Phase(
        optim=train.optim(round),
        epochs=train.epochs,
        batch=train.batch,
        drop_last=train.drop_last,
        augment=train.augment,
    )

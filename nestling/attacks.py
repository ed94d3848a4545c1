"""Clients that lie, in a simulation: to see what a fleet and its merge can bear before it is real.

An attacker does its work as everybody does. What it then replies is changed, or, with "labels", the
labels that it works with. It is the same on every engine, since no engine knows of it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from nestling.data.split import Split
from nestling.errors import InputError
from nestling.message import Message
from nestling.seeds import stream
from nestling.settings import NotNegative, UnitShare, check_settings
from nestling.views import Tensors, View
from nestling.views.sparse import restored, survivors

WEIGHTS = ("weights", "update")
"""The parts of a reply that attackers of weights change, whichever it holds."""

TOLD = ("statistics", "logits")
"""What they change of a reply that holds no weights: prototypes and their like, and logits."""

POISONED = {"prototypes": "statistics", "logits": "logits"}
"""The part that a kind of poisoning changes, wherever it travels."""

HUGE = 1e15
"""What "huge" puts in: finite, so that a reply with it is admitted."""

_FACTORS = {"sign": 1.0, "scale": 10.0, "counts": 1000.0}


@dataclass(frozen=True)
class Attack:
    """Clients that lie (`[attack]` in an experiment; never on by itself, and for simulations only).

    kind:   "none"; "sign" (its step from the weights it received, turned round, times the factor);
            "scale" (its step times the factor); "labels" (trains on classes − 1 − y); "counts"
            (claims its number of samples times the factor); "huge" (one weight is 1e15);
            "free-rider" (sends back the weights that it received). Where statistics by class or
            logits travel and no weights, "sign", "scale" and "huge" change these, from zero.
            "prototypes" (tells of every class what is true of the next one that it holds, times the
            factor) and "logits" (gives every class the logit of the next one, times the factor).
    share:  of the fleet that lies, rounded, drawn from the seed.
    factor: how far a lie goes (0: 1 for "sign", "prototypes" and "logits", 10 for "scale", 1000 for
            "counts").
    """

    kind: Literal[
        "none",
        "sign",
        "scale",
        "labels",
        "counts",
        "huge",
        "free-rider",
        "prototypes",
        "logits",
    ] = "none"
    share: UnitShare = 0.2
    factor: NotNegative = 0.0

    def __post_init__(self) -> None:
        """Refuses unknown kinds and numbers out of range."""
        check_settings(self, "attack")

    @property
    def on(self) -> bool:
        """Whether anybody is to lie."""
        return self.kind != "none"

    def check(self, title: str, up: Collection[str]) -> None:
        """Refuses attacks on weights where a method's replies, which hold the parts `up`, have
        none."""
        told = {"free-rider": WEIGHTS, **{kind: (part,) for kind, part in POISONED.items()}}
        changes = told.get(self.kind, (*WEIGHTS, *TOLD))
        if self.kind not in ("none", "labels", "counts") and not set(up) & set(changes):
            raise InputError(
                f"the clients of {title} send nothing that {self.kind!r} would change",
                field="attack.kind",
                fix=f"take labels or counts, or a method whose clients send {' or '.join(changes)}",
            )

    def check_task(self, task: str) -> None:
        """Refuses flipped labels where there are no classes to be flipped."""
        if self.kind == "labels":
            raise InputError(
                f"labels are classes, and {task} is to be learned",
                field="attack.kind",
                fix="take another kind",
            )

    def attackers(self, clients: int, seed: int) -> frozenset[int]:
        """Who lies."""
        count = round(self.share * clients) if self.on else 0
        drawn = stream(seed, "attackers").choice(clients, count, replace=False)
        return frozenset(drawn.tolist())

    def note(self, attackers: Collection[int], clients: int) -> str:
        """What a run must say of it."""
        return (
            f"UNDER ATTACK, as asked for: {len(attackers)} of {clients} clients lie "
            f"({self.kind}); results are those of an attacked fleet"
        )

    def lie(self, reply: Message, received: Tensors) -> Message:
        """What an attacker sends in place of its reply; `received` are the weights that it began
        with, in the shapes of the reply."""
        if self.kind == "counts":
            samples = max(1, round(int(reply.facts["samples"]) * self._strength))
            return Message(reply.parts, {**reply.facts, "samples": samples})
        if self.kind == "labels":
            return reply
        if self.kind in POISONED:
            part = POISONED[self.kind]
            poisoned = {n: self._moved_on(t) for n, t in reply.parts.get(part, {}).items()}
            return Message({**reply.parts, **({part: poisoned} if poisoned else {})}, reply.facts)
        if set(WEIGHTS) & reply.parts.keys():
            begun = dict.fromkeys(WEIGHTS, received)
        else:
            begun = {kind: _zeros(reply.parts.get(kind, {})) for kind in TOLD}
        parts = {
            kind: self._changed(part, begun[kind]) if kind in begun else part
            for kind, part in reply.parts.items()
        }
        return Message(parts, reply.facts)

    @property
    def _strength(self) -> float:
        return self.factor or _FACTORS.get(self.kind, 1.0)

    def _moved_on(self, told: Tensor) -> Tensor:
        """What is said of every class, said of the one before: prototypes have a row a class,
        logits a column. Who tells of one class only says the opposite."""
        classes = 0 if self.kind == "prototypes" else -1
        if not told.is_floating_point() or not told.dim():
            return told
        alone = told.shape[classes] == 1
        return self._strength * (-told if alone else told.roll(-1, classes))

    def _changed(self, part: Tensors, received: Tensors) -> Tensors:
        floats = [name for name, t in part.items() if t.is_floating_point() and t.numel()]
        if self.kind == "huge" and floats:
            first = part[floats[0]].clone()
            first.view(-1)[0] = HUGE
            return {**part, floats[0]: first}
        times = {"sign": -self._strength, "scale": self._strength}.get(self.kind, 0.0)
        moved = {n: received[n] + times * (part[n] - received[n]) for n in floats if n in received}
        return {**part, **moved}


def _zeros(part: Tensors) -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in part.items()}


def received_as(weights: Tensors, sent: View, returned: View) -> Tensors:
    """The weights that were sent for one view, cut to the view that came back. Those of masked
    views travel as the line of what the masks keep."""
    if sent.key() == returned.key() and not (sent.masks or returned.masks):
        return weights
    dense = restored(sent, weights) if sent.masks else weights
    whole = {
        n: torch.zeros(sent.axes.shapes[n], dtype=t.dtype, device=t.device)
        for n, t in dense.items()
    }
    cut = returned.extract(sent.scatter(whole, dense))
    return survivors(returned, cut) if returned.masks else cut


class FlippedSplit(Split):
    """A split of rows that stand there twice, the second time with other labels: attackers have the
    second ones."""

    def __init__(
        self, split: Split, attackers: Collection[int], y: np.ndarray, classes: int
    ) -> None:
        """Takes the rows of `split`, and the labels of all rows, of the second ones too."""
        super().__init__(split.clients, y, classes, 0.0)
        self.split, self.attackers, self.rows = split, attackers, len(y) // 2

    def indices(self, client: int) -> np.ndarray:
        """The client's rows; those of an attacker among the second ones."""
        return self._rows(client)

    def holdout(self, client: int) -> np.ndarray:
        """What the client keeps for its personal test, as it was."""
        return self.split.holdout(client)

    def most(self) -> int:
        """The most rows that any client has, as it was."""
        return self.split.most()

    def _rows(self, client: int) -> np.ndarray:
        return self.split.indices(client) + self.rows * (client in self.attackers)


def flipped(
    x: Tensor, y: Tensor, split: Split, attackers: Collection[int], classes: int
) -> tuple[Tensor, Tensor, FlippedSplit]:
    """Rows, labels and split in which attackers have the label classes − 1 − y, and nobody else:
    clients may share rows, so the attackers' are rows of their own."""
    labels = torch.cat([y, classes - 1 - y])
    both = FlippedSplit(split, attackers, labels.cpu().numpy(), classes)
    return torch.cat([x, x]), labels, both

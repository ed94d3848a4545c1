"""Clients that prune themselves once their model is good enough: the gate that LotteryFL and Hermes share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from nestling.methods.api import Client, Device, Message, Phase, Piece, SharedWeights, Tensors, World, made
from nestling.methods.part import Fact, Facts
from nestling.settings import BetweenZeroAndOne, NonZeroShare, ShareBelowOne, UnitShare
from nestling.store import Records
from nestling.tasks import losses
from nestling.training.distiller import logits_of
from nestling.training.objectives import Batch, Given, Net
from nestling.training.phase import GradientRule

HELD_OUT = "none (clients hold out rows of their own)"
"""What their auxiliary data is."""

PRUNINGS = "prunings"
"""The name of how often a client has pruned, in facts and in what is kept of it."""

_FIRST = "first row in use"
_PRUNED = Fact(
    PRUNINGS,
    lambda _method, client, _: int(client.memory.get(PRUNINGS, 0)),
    lambda method, sent, said: method.can_be(int(sent.facts[PRUNINGS]), said),
    "the number of prunings",
)


@dataclass
class PrunesItself(SharedWeights):
    """Base of the methods whose clients prune their own model by a step whenever it is right about more than `acc_thr` of rows they
    hold out, until `r_target` is reached.

    How often a client has pruned (`prunings`) travels as a fact both ways. What a pruning leaves follows from the weights that were
    sent, so the server works it out itself and need not believe a client's mask; a client whose reply was lost hears from the number
    that the server knows nothing of its last pruning, and goes back to what it had before.
    """

    acc_thr: UnitShare = 0.5
    prune_step: BetweenZeroAndOne = 0.2
    r_target: NonZeroShare = 0.5
    validation: ShareBelowOne = 0.2

    records: Records = made()
    said: ClassVar[Facts] = (_PRUNED,)

    def setup(self, world: World) -> None:
        """The shared weights, and records of what clients have pruned."""
        super().setup(world)
        self.records = Records(world.store)

    def kept(self, prunings: int) -> float:
        """The share that is left after so many prunings: r_k."""
        return float((1 - self.prune_step) ** prunings)

    def may_prune(self, prunings: int) -> bool:
        """Whether the target is still ahead; the last step may pass it."""
        # The small tolerance keeps a target that is a power of the step from being missed by rounding.
        return self.acc_thr < 1 and self.kept(prunings) > self.r_target + 1e-9

    def prunings_of(self, device: Device) -> int:
        """How often a client has pruned, as the server knows it."""
        return int(self.records.get(device.id).get(PRUNINGS, 0))

    def facts(self, device: Device, piece: Piece, round: int) -> dict[str, Any]:
        """How often the client has pruned, as the server knows it."""
        return {PRUNINGS: self.prunings_of(device)}

    def can_be(self, known: int, said: Any) -> bool:
        """Whether a client may have pruned so often by now: as often as the server knows, or once more."""
        return type(said) is int and (said == known or (said == known + 1 and self.may_prune(known)))

    def cut_to(self, piece: Piece, sent: Message, facts: Mapping[str, Any]) -> Piece:
        """The piece as it was sent, or what one more pruning leaves of it."""
        return piece if facts[PRUNINGS] == sent.facts[PRUNINGS] else self.pruned(piece, sent, facts)

    @abstractmethod
    def pruned(self, piece: Piece, sent: Message, facts: Mapping[str, Any]) -> Piece:
        """What a client is left with after one more pruning."""

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def opens(self, client: Client, weights: Tensors, prunings: int) -> bool:
        """Whether the client prunes now: its model is right often enough about rows of its own that it does not train on."""
        if not self.may_prune(prunings):
            return False
        rows = self._held_out(client) or client.samples
        said = logits_of(client.reference.network(client.view, weights), client.x[:rows]).argmax(-1)
        return float((said == client.y[:rows]).float().mean()) > self.acc_thr

    def training(self, client: Client, given: Given | None = None, rule: GradientRule | None = None, epochs: int = 0) -> Phase:
        """Plain local training on the rows that are not held out, for the epochs of [train] unless told otherwise."""
        held, long = self._held_out(client), epochs or client.train.epochs
        if not held:
            return client.train.phase(client.round, given=given or {}, rule=rule, epochs=long)
        given = {**(given or {}), _FIRST: torch.tensor(held, device=client.place)}
        return client.train.phase(client.round, objective=_on_used_rows, given=given, rule=rule, epochs=long)

    def _held_out(self, client: Client) -> int:
        """How many of the client's rows, the first ones of their random order, decide on pruning: none where none is possible."""
        return min(int(self.validation * client.samples), client.samples - 1) if self.acc_thr < 1 and self.r_target < 1 else 0


def _on_used_rows(net: Net, batch: Batch, given: Given) -> Tensor:
    """Cross-entropy over the rows in use; a batch without any has no loss."""
    used = (batch.rows >= given[_FIRST]).float()
    each = losses(net(batch.x), batch.y)
    return batch.mean(each * used) / batch.mean(used).clamp(min=1e-6)

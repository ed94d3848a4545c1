"""FjORD: ordered dropout, one network that works at every width."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from nestling.methods.allocation import Ladder, ladder
from nestling.methods.api import Client, Contribution, Info, Message, Phases, Reply, SharedWeights, View, made, require
from nestling.models.norm import WidthNorm, used_rows
from nestling.settings import NonZeroShare, Positive, UnitShare
from nestling.tasks import losses
from nestling.training.objectives import Batch, Given, Net, distillation
from nestling.training.widths import Inner, widths_by_batch
from nestling.world import Device, Model, Piece, World, ratio_view


@dataclass
class FjORD(SharedWeights):
    """FjORD (Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane, "FjORD: Fair and Accurate Federated Learning under
    heterogeneous targets with Ordered Dropout", NeurIPS 2021).

    Idea: a device's network is the first ⌈p·K⌉ channels of every hidden layer, for the largest width p_max of `levels` that fits it.
    For every batch one of the widths up to p_max is drawn and trained, the same for all layers, so that each of them works alone.
    Loss: cross-entropy at the width drawn; with `distil`, cross-entropy at p_max plus the divergence of the width drawn from what
    p_max said (which gets no gradient), one optimiser step for both. Travels: the part of p_max, down and up. Merge: per entry, mean
    weighted by n_k over the devices that have it; statistics of a width (`model.norm = "per-width"`, as published) over those whose
    p_max reaches it.
    Entries of p_max that the drawn width leaves out have no gradient in that step, but weight decay and momentum move them, as in the
    released code; what lies outside p_max is never touched.
    Differs from the released code: it ships whole tensors of which the server reads the part of p_max; here only that part travels.
    On a GPU the width drawn is cut out by zeros, which computes the same and lets devices be trained as one stack.
    The global model is the widest that any tier trains.

    levels:             the widths, from small to large. A tier whose own part is narrower than the smallest adds it to them (not
                        with `per-width`, whose statistics know the stated ones only).
    distil:             self-distillation from p_max.
    alpha, temperature: the share of the divergence in the loss of the width drawn (the rest is cross-entropy), and the temperature
                        (both 1 in the paper, from memory).
    """

    levels: tuple[NonZeroShare, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    distil: bool = False
    alpha: UnitShare = 1.0
    temperature: Positive = 1.0

    rungs: Ladder = made()

    info = Info(
        "width",
        "width: nested prefixes, drawn anew for every batch",
        "contributed code read; two values from memory",
        "A",
        any_task=True,
    )

    def __post_init__(self) -> None:
        """Refuses widths that do not rise."""
        super().__post_init__()
        rising = bool(self.levels) and list(self.levels) == sorted(set(self.levels))
        require(rising, f"{list(self.levels)} are not widths", "method.levels", "list them from small to large")

    def setup(self, world: World) -> None:
        """Makes the ladder of widths; statistics per width must be kept for the same widths."""
        super().setup(world)
        for layer in world.main.module.modules():
            if isinstance(layer, WidthNorm):
                message = (
                    f"the network keeps statistics of the widths {list(layer.widths)}, the method trains {list(self.levels)}"
                )
                fix = f'use "per-width:{",".join(f"{p:g}" for p in self.levels)}"'
                require(layer.widths == tuple(self.levels), message, "model.norm", fix)
        self.rungs = ladder(world, world.main, self._widths())

    def _widths(self) -> list[View]:
        found = [ratio_view(self.world.main, p) for p in self.levels]
        if not self.world.main.by_width:
            own = {plan.piece.view.key(): plan.piece.view for plan in self.world.plans.values()}
            found += [view for key, view in own.items() if found[0].contains(view) and key != found[0].key()]
        return found

    def piece(self, device: Device, round: int) -> Piece:
        """The part of the largest width that fits the device."""
        return self.rungs.of(device, round)

    def facts(self, device: Device, piece: Piece, round: int) -> dict[str, Any]:
        """The widths inside the piece, its own among them, as views."""
        return {"levels": [level.spec() for level in self.rungs.pieces if piece.view.contains(level.view)]}

    def phases(self, client: Client, received: Message) -> Phases:
        """One training phase with a width drawn for every batch; plain training where there is only one width."""
        views = tuple(client.reference.view(spec) for spec in received.facts["levels"])
        if len(views) == 1:
            return [client.train.phase(client.round)]
        inner, given = widths_by_batch(client, views)
        objective = partial(_ordered, inner=inner, distil=self.distil, alpha=self.alpha, temperature=self.temperature)
        return [client.train.phase(client.round, objective=objective, given=given)]

    def contribution(self, reply: Reply) -> Contribution:
        """The reply's weights by samples; of statistics per width only those of widths inside its piece."""
        present = used_rows(reply.piece.reference.network(reply.piece.view)) if self.world.main.by_width else {}
        return replace(super().contribution(reply), present=present)

    def global_model(self) -> Model:
        """The widest part that any tier trains at rest."""
        piece = self.rungs.pieces[max(self.rungs.at_rest(tier) for tier in self.world.plans)]
        return Model(self.world.main, piece.view, piece.view.extract(self.weights))


def _ordered(net: Net, batch: Batch, given: Given, *, inner: Inner, distil: bool, alpha: float, temperature: float) -> Tensor:
    logits = inner(net, batch, given)
    loss = batch.mean(losses(logits, batch.y))
    if not distil:
        return loss
    whole = net(batch.x)
    told = distillation(whole.detach(), logits, temperature, batch)
    return batch.mean(losses(whole, batch.y)) + (1 - alpha) * loss + alpha * told

"""FjORD: ordered dropout, one network that works at every width."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.methods.allocation import Ladder, ladder
from nestling.methods.api import Client, Contribution, Info, Message, Phase, Reference, Reply, SharedWeights, View
from nestling.methods.kept import made
from nestling.models.norm import WidthNorm, used_rows
from nestling.schema import require
from nestling.seeds import stream
from nestling.settings import NonZeroShare, Positive, UnitShare
from nestling.training.objectives import Batch, Given, Net, distillation
from nestling.views.nested import Channels, by_zeros, forward, narrow, prepare
from nestling.world import Device, Model, Piece, World, ratio_view

Inner = Callable[[Net, Batch, Given], Tensor]
"""The logits of the width that was drawn for a batch."""


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
        "author-contributed code read; alpha and temperature from memory",
        "A",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        rising = bool(self.levels) and list(self.levels) == sorted(set(self.levels))
        require(rising, f"{list(self.levels)} are not widths", "method.levels", "list them from small to large")

    def setup(self, world: World) -> None:
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
        return self.rungs.of(device, round)

    def facts(self, device: Device, piece: Piece, round: int) -> dict[str, Any]:
        return {"levels": [level.spec() for level in self.rungs.pieces if piece.view.contains(level.view)]}

    def phases(self, client: Client, received: Message) -> Sequence[Phase]:
        views = tuple(client.reference.view(spec) for spec in received.facts["levels"])
        if len(views) == 1:
            return [client.train.phase(client.round)]
        inner, given = _drawn(client, views)
        objective = partial(_ordered, inner=inner, distil=self.distil, alpha=self.alpha, temperature=self.temperature)
        return [client.train.phase(client.round, objective=objective, given=given)]

    def contribution(self, reply: Reply) -> Contribution:
        present = used_rows(reply.piece.reference.network(reply.piece.view)) if self.world.main.by_width else {}
        return replace(super().contribution(reply), present=present)

    def global_model(self) -> Model:
        piece = self.rungs.pieces[max(self.rungs.at_rest(tier) for tier in self.world.plans)]
        return Model(self.world.main, piece.view, piece.view.extract(self.weights))


def _ordered(net: Net, batch: Batch, given: Given, *, inner: Inner, distil: bool, alpha: float, temperature: float) -> Tensor:
    logits = inner(net, batch, given)
    loss = batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))
    if not distil:
        return loss
    whole = net(batch.x)
    told = distillation(whole.detach(), logits, temperature, batch)
    return batch.mean(F.cross_entropy(whole, batch.y, reduction="none")) + (1 - alpha) * loss + alpha * told


def _drawn(client: Client, views: tuple[View, ...]) -> tuple[Inner, dict[str, Tensor]]:
    """A width for every batch, and how it is run: cut out, client by client, or with zeros for what is left out."""
    steps = max(1, client.train.epochs * math.ceil(client.samples / client.train.batch))
    draws = stream(client.site.seed, "width", client.id, client.round).integers(len(views), size=steps)
    channels, flags = by_zeros(client.reference, client.view, views) if _stacks_pay(client) else ({}, None)
    if flags is None:
        prepare(client.reference, views)
        numbers = tuple(int(number) for number in draws)
        return partial(_cut, reference=client.reference, own=client.view, views=views, draws=numbers), {}
    # A length that all clients share, or each size would be work of another kind.
    padded = torch.zeros(max(steps, client.most_steps(client.train.epochs, client.train.batch)), dtype=torch.int64)
    padded[:steps] = torch.from_numpy(draws)
    return partial(_zeroed, channels=channels), {"widths": flags, "draws": padded.to(client.place)}


def _stacks_pay(client: Client) -> bool:
    """Whether to take the way that is one recording for all widths: a tensor says which width is meant, at the cost of computing all
    of p_max. Where steps are not recorded cutting is faster."""
    return client.site.where.recorded


def _cut(
    net: Net, batch: Batch, given: Given, *, reference: Reference, own: View, views: Sequence[View], draws: Sequence[int]
) -> Tensor:
    view = views[draws[batch.number]]
    return net(batch.x) if view.key() == own.key() else forward(reference, view, net.state(), batch.x, inside=own)


def _zeroed(net: Net, batch: Batch, given: Given, *, channels: Channels) -> Tensor:
    flags = given["widths"].index_select(0, batch.pick(given["draws"]).reshape(1))[0]
    return net.with_weights(narrow(net.state(), channels, flags), batch.x)

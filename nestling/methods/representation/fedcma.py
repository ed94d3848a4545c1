"""Fed-CMA: class-conditional moments of bounded features, and a consensus of classifiers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from nestling.methods.api import Client, Message, Phases, Piece, Replies, State, World, kept
from nestling.methods.representation.class_means import ByClass, class_means, outputs_of, spread
from nestling.methods.representation.class_table import STATISTICS
from nestling.methods.representation.common_head import CLASSIFIER, HEAD, INFO
from nestling.models.embedding import with_features
from nestling.models.taps import Taps
from nestling.settings import Compat, Count, NonZeroShare, NotNegative
from nestling.tasks import losses
from nestling.training.objectives import Batch, Given, Net, forward_with_features

_CODE = 0.9  # the released code's EMA keeps 1 − 0.9·λ


def _head_like(method: FedCMA, _piece: Piece, _sent: Message) -> State:
    classes = method.world.classes
    return {"weight": torch.empty(classes, method.wide, device="meta"), "bias": torch.empty(classes, device="meta")}


@dataclass
class FedCMA(ByClass):
    """Fed-CMA (class-conditional moment alignment; abstract, and a fork of the authors' code).

    Idea: bounded features have moments that describe their distribution, so clients align the moments of every class with the common
    ones, and keep their last linear layer, which all of them have in the same form, near the common one.
    Loss: cross-entropy + λ_m·Σ_c [mean square of (z − M¹_c) over the batch's rows of class c + Σ_{q≥2} mean square of (the class's q-th
    central moment in the batch − M^q_c)] + λ_c·‖θ − θ̄‖². Travels: Q rows of d numbers per class, up for those the client holds (and its
    rows of them), down for those the server knows, and the classifier: at most C·d·Q + C·(d + 1). Merge: per class, the mean weighted
    by the clients' rows of it; the classifiers' mean; both move the server's value by `rate`, except the first, which is taken as
    it is.
    Differs from the released code: moments are those of all of a client's rows (there, of the first batch where data is not shuffled);
    absent classes are left out instead of counting as zeros; the moving average has a rate of its own. A class with one row in the
    batch has no central moment there. Features are the networks' own, pooled to the fewest where their numbers differ; the published
    sigmoid (`bound`) is off, since small networks hardly learn through it. The paper was not read: what stands
    here is from its abstract and the fork.

    lam:     λ_m.
    lam_c:   λ_c.
    moments: Q, the highest moment.
    size:    d, the number of features (0: as many as the network with the fewest has; 84 as published).
    bound:   what bounds the features: none, sigmoid (as published), tanh or relu.
    rate:    how far the server's moments and classifier move towards a round's means (0.9·0.5, the code's value at its defaults).
    weighting: what a client counts in the classifiers' mean: "samples" (n_k) or "uniform".
    compat:  "paper", or "code": rates 0.9·λ_m and 0.9·λ_c, and moments of a client's first batch only.
    """

    lam: NotNegative = 0.5
    lam_c: NotNegative = 0.5
    moments: Count = 1
    bound: Literal["none", "relu", "sigmoid", "tanh"] = "none"
    rate: NonZeroShare = 0.45
    weighting: Literal["samples", "uniform"] = "samples"
    compat: Compat = "paper"

    head: State = kept()

    info = replace(
        INFO, evidence="fork of the official code read; the paper from its abstract", title="Fed-CMA", paper="Fed-CMA (abstract)"
    )
    parts = (*ByClass.parts, replace(CLASSIFIER, like=_head_like))

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        """Per class, one row of features for each moment."""
        return {"moments": (self.moments, self.wide)}

    def tailor(self, module: nn.Module, taps: Taps) -> nn.Module:
        """The network with the common number of features, bounded as `bound` says."""
        return with_features(module, taps, self.wide, self.bound)

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """An empty table, and no common classifier yet."""
        super().setup(world)
        self.head = {}

    def merge(self, replies: Replies, round: int) -> None:
        """Moves the table and the common classifier towards this round's means."""
        if not replies:
            return
        self.table, old, new = self.table.after(replies, rate=self._rate(self.lam), most=self.most_of_class), self.head, {}
        shares = torch.tensor([float(r.samples) if self.weighting == "samples" else 1.0 for r in replies], dtype=torch.float64)
        for name, first in replies[0].message[HEAD].items():
            stack = torch.stack([r.message[HEAD][name] for r in replies]).to(torch.float64)
            mean = torch.tensordot((shares / shares.sum()).to(stack), stack, 1).to(first.dtype)
            new[name] = old[name].lerp(mean, self._rate(self.lam_c)) if name in old else mean
        self.head = new

    def _rate(self, lam: float) -> float:
        return min(1.0, _CODE * lam) if self.compat == "code" else self.rate

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def phases(self, client: Client, received: Message) -> Phases:
        """Local training, with the terms of moments and classifier once both came."""
        if STATISTICS not in received or HEAD not in received:
            return [client.train.phase(client.round)]
        given = {**spread(received, client.classes), **{f"{HEAD}/{name}": t for name, t in received[HEAD].items()}}
        objective = partial(_aligned, lam=self.lam, lam_c=self.lam_c, moments=self.moments, head=client.reference.taps.head)
        return [client.train.phase(client.round, objective=objective, given=given)]

    def statistics(self, client: Client) -> State:
        """Per class, the mean of the features and their central moments, over all rows or ("code") the first batch."""
        z, _, y = outputs_of(client, client.train.batch if self.compat == "code" else None)
        first = class_means(z, y, client.classes)
        central = [class_means((z - first[y]) ** q, y, client.classes) for q in range(2, self.moments + 1)]
        return {"moments": torch.stack([first, *central], 1)}


def _aligned(net: Net, batch: Batch, given: Given, *, lam: float, lam_c: float, moments: int, head: str) -> Tensor:
    logits, z = forward_with_features(net, batch.x, head)
    loss = batch.mean(losses(logits, batch.y))
    far = sum(((net.params[f"{head}.{name}"] - given[f"{HEAD}/{name}"]) ** 2).sum() for name in ("weight", "bias"))
    return loss + lam * _moment_gaps(z, batch, given, moments) + lam_c * far


def _moment_gaps(z: Tensor, batch: Batch, given: Given, moments: int) -> Tensor:
    """Σ over the batch's classes of how far their moments are from the common ones."""
    wanted, known = given["moments"], given["known"]
    member = (batch.y[:, None] == torch.arange(len(known), device=z.device)).to(z.dtype)
    if batch.mask is not None:
        member = member * batch.mask[:, None]
    count = member.sum(0)
    share = member / count.clamp(min=1)  # (rows, classes): every class's column sums to 1, or 0 where it is absent

    first = share.T @ ((z - wanted[:, 0][batch.y]) ** 2).mean(1)
    total = (first * known).sum()
    centred = z - (share.T @ z)[batch.y]
    for q in range(2, moments + 1):
        gaps = ((share.T @ centred**q - wanted[:, q - 1]) ** 2).mean(1)
        total = total + (gaps * known * (count > 1)).sum()
    return total

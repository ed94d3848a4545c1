"""The loss of a network and of a smaller one inside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from nestling.training.objectives import Batch, Given, Net, cross_entropy
from nestling.views import Reference, View
from nestling.views.nested import forward


def with_inner(
    net: Net, batch: Batch, given: Given, *, reference: Reference, own: View, smaller: Sequence[View], weight: float
) -> Tensor:
    """Cross-entropy of the network of view `own` and, with `weight`, of one of the smaller views inside it, in turn; their weighted
    mean."""
    loss = cross_entropy(net, batch, given)
    if not smaller:
        return loss
    part = smaller[batch.turn(len(smaller))]
    logits = forward(reference, part, net.state(), batch.x, inside=own)
    inner = batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))
    return (loss + weight * inner) / (1 + weight)

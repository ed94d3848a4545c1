"""The loss of a network and of a smaller one inside it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nestling.tasks import losses
from nestling.training.objectives import Batch, Given, Net, forward_with_features, supervised
from nestling.views import Reference, View
from nestling.views.nested import forward, headed


def with_inner(
    net: Net,
    batch: Batch,
    given: Given,
    *,
    reference: Reference,
    own: View,
    smaller: Sequence[View],
    weight: float,
    head: str = "",
) -> Tensor:
    """Cross-entropy of the network of view `own` and, with `weight`, of one of the smaller views
    inside it, in turn; their weighted mean. With `head` (see `views.nested.common_head`) the
    smaller network is not run, but read off the features of the larger one."""
    if not smaller:
        return supervised(net, batch, given)
    part = smaller[batch.turn(len(smaller))]
    outer, inner = (
        _both(net, batch.x, head, part, own) if head else _apart(net, batch.x, reference, part, own)
    )
    whole, part_of_it = (batch.mean(losses(said, batch.y)) for said in (outer, inner))
    return (whole + weight * part_of_it) / (1 + weight)


def _both(net: Net, x: Tensor, head: str, part: View, own: View) -> tuple[Tensor, Tensor]:
    logits, features = forward_with_features(net, x, head)
    return logits, headed(net.module, head, part, own, features)


def _apart(
    net: Net, x: Tensor, reference: Reference, part: View, own: View
) -> tuple[Tensor, Tensor]:
    return net(x), forward(reference, part, net.state(), x, inside=own)

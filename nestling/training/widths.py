"""A width of the network drawn for every batch (ordered dropout), run in the way that pays where
the client is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from nestling.seeds import stream
from nestling.training.client import Client
from nestling.training.objectives import Batch, Given, Net
from nestling.views import Reference, View
from nestling.views.nested import Channels, by_zeros, forward, narrow, prepare

Inner = Callable[[Net, Batch, Given], Tensor]
"""The logits of the width that was drawn for a batch."""


def widths_by_batch(client: Client, views: tuple[View, ...]) -> tuple[Inner, dict[str, Tensor]]:
    """A width for every batch, and how it is run: cut out, client by client, or with zeros for what
    is left out."""
    steps = max(1, client.train.epochs * math.ceil(client.samples / client.train.batch))
    draws = stream(client.site.seed, "width", client.id, client.round).integers(
        len(views), size=steps
    )
    channels, flags = (
        by_zeros(client.reference, client.view, views) if _stacks_pay(client) else ({}, None)
    )
    if flags is None:
        prepare(client.reference, views)
        numbers = tuple(int(number) for number in draws)
        return partial(
            _cut, reference=client.reference, own=client.view, views=views, draws=numbers
        ), {}
    # A length that all clients share, or each size would be work of another kind.
    padded = torch.zeros(
        max(steps, client.most_steps(client.train.epochs, client.train.batch)), dtype=torch.int64
    )
    padded[:steps] = torch.from_numpy(draws)
    return partial(_zeroed, channels=channels), {"widths": flags, "draws": padded.to(client.place)}


def _stacks_pay(client: Client) -> bool:
    """Whether to take the way that is one recording for all widths: a tensor says which width is
    meant, at the cost of computing all of p_max. Where steps are not recorded cutting is faster."""
    return client.site.where.recorded


def _cut(
    net: Net,
    batch: Batch,
    _given: Given,
    *,
    reference: Reference,
    own: View,
    views: Sequence[View],
    draws: Sequence[int],
) -> Tensor:
    view = views[draws[batch.number]]
    return (
        net(batch.x)
        if view.key() == own.key()
        else forward(reference, view, net.state(), batch.x, inside=own)
    )


def _zeroed(net: Net, batch: Batch, given: Given, *, channels: Channels) -> Tensor:
    flags = given["widths"].index_select(0, batch.pick(given["draws"]).reshape(1))[0]
    return net.with_weights(narrow(net.state(), channels, flags), batch.x)

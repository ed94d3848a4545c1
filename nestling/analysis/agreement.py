"""What clients say: how often two models name the same class, how far apart their softmaxes are,
how often each is right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestling.errors import InputError


@dataclass(frozen=True)
class Agreement:
    """Of every two clients, as (clients, clients), and of each with the labels.

    equal: share of inputs given the same class. kl: mean KL divergence of the column's softmax from
           the row's, in bits. js: mean
    Jensen-Shannon divergence, in bits, 0 (the same) to 1. right: share of inputs given their label,
    where labels are known.
    """

    equal: Tensor
    kl: Tensor
    js: Tensor
    right: Tensor | None


def agreement(logits: Sequence[Tensor], labels: Tensor | None = None) -> Agreement:
    """The agreement of clients whose logits (inputs, classes) are of the same inputs, in the same
    order."""
    if not logits or len({tuple(one.shape) for one in logits}) != 1:
        raise InputError(
            "the clients' logits differ in shape",
            field="logits",
            fix="give every client the same inputs",
        )
    logs = torch.stack([one.double().log_softmax(-1) for one in logits])
    named = torch.stack([one.argmax(-1) for one in logits])
    rows = logs.shape[1]
    equal = torch.stack([(named == one).double().mean(1) for one in named])
    own = (logs.exp() * logs).sum((1, 2))
    across = torch.einsum("ark,brk->ab", logs.exp(), logs)
    kl = ((own[:, None] - across) / (rows * math.log(2))).clamp_min(0)
    js = torch.stack([_jensen_shannon(one, logs) for one in logs])
    right = (named == labels.to(named.device)).double().mean(1) if labels is not None else None
    return Agreement(equal, kl, js, right)


def _jensen_shannon(one: Tensor, others: Tensor) -> Tensor:
    """Mean divergence of one client (rows, classes) from each of the others, of
    log-probabilities."""
    middle = torch.logaddexp(one.expand_as(others), others) - math.log(2)
    apart = (one.exp() * (one - middle) + others.exp() * (others - middle)).sum(-1) / 2
    return (apart.mean(-1) / math.log(2)).clamp(0, 1)

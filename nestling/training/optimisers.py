"""Optimisers as plain functions on lists of tensors, fused over the list.

Their state is a list of buffers made fresh for every phase: momentum does not survive a round. The same functions serve one client
and, with one more leading dimension, a batch of clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

OPTIMISERS = ("sgd", "adam")


@dataclass(frozen=True)
class Optim:
    """An optimiser and its settings. `clip` bounds the norm of the whole gradient (0: off)."""

    name: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass
class Buffers:
    """What an optimiser remembers within a phase."""

    steps: int = 0
    first: list[Tensor] = field(default_factory=list)
    second: list[Tensor] = field(default_factory=list)


@torch.no_grad()
def step(optim: Optim, params: Sequence[Tensor], grads: Sequence[Tensor], buffers: Buffers) -> None:
    """One update of `params`, in place."""
    params, grads = list(params), list(grads)
    if optim.clip > 0:
        grads = clip(grads, optim.clip)
    if optim.weight_decay > 0:
        grads = list(torch._foreach_add(grads, params, alpha=optim.weight_decay))
    buffers.steps += 1
    (_adam if optim.name == "adam" else _sgd)(optim, params, grads, buffers)


def clip(grads: Sequence[Tensor], limit: float) -> list[Tensor]:
    """The gradients scaled so that their joint norm is at most `limit`."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads))))
    return list(torch._foreach_mul(list(grads), (limit / (norm + 1e-6)).clamp(max=1.0)))


def _sgd(optim: Optim, params: list[Tensor], grads: list[Tensor], buffers: Buffers) -> None:
    if optim.momentum > 0:
        if not buffers.first:
            buffers.first = [g.clone() for g in grads]
        else:
            torch._foreach_mul_(buffers.first, optim.momentum)
            torch._foreach_add_(buffers.first, grads)
        grads = buffers.first
    torch._foreach_add_(params, grads, alpha=-optim.lr)


def _adam(optim: Optim, params: list[Tensor], grads: list[Tensor], buffers: Buffers) -> None:
    if not buffers.first:
        buffers.first = [torch.zeros_like(p) for p in params]
        buffers.second = [torch.zeros_like(p) for p in params]
    one, two = optim.betas
    torch._foreach_lerp_(buffers.first, grads, 1 - one)
    torch._foreach_mul_(buffers.second, two)
    torch._foreach_addcmul_(buffers.second, grads, grads, 1 - two)
    root = torch._foreach_sqrt(buffers.second)
    torch._foreach_div_(root, (1 - two**buffers.steps) ** 0.5)
    torch._foreach_add_(root, optim.eps)
    torch._foreach_addcdiv_(params, buffers.first, root, -optim.lr / (1 - one**buffers.steps))

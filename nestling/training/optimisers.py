"""Optimisers as plain functions on lists of tensors, fused over the list.

Their state is a list of buffers made fresh for every phase: momentum does not survive a round. The
same functions serve one client and, with one more leading dimension, a stack of clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

OPTIMISERS = ("sgd", "adam", "adamw")


@dataclass(frozen=True)
class Optim:
    """An optimiser and its settings. `weight_decay` is added to the gradient; "adamw" takes it off
    the weights instead. `clip` bounds the norm of the whole gradient (0: off). `lazy` leaves
    entries without a gradient (exactly 0) alone: neither momentum nor weight decay moves them, and
    their momentum waits."""

    name: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    lazy: bool = False

    @property
    def adaptive(self) -> bool:
        """Whether steps are no multiples of gradients."""
        return self.name != "sgd"


@dataclass
class Buffers:
    """What an optimiser remembers within a phase. `steps` may be a tensor where the update is
    recorded once and replayed."""

    steps: int | Tensor = 0
    first: list[Tensor] = field(default_factory=list)
    second: list[Tensor] = field(default_factory=list)

    @staticmethod
    def zeros(optim: Optim, params: Sequence[Tensor]) -> Buffers:
        """Buffers that exist before the first step."""
        need_first = optim.adaptive or optim.momentum > 0
        need_second = optim.adaptive
        return Buffers(
            torch.zeros((), dtype=torch.float64, device=params[0].device),
            [torch.zeros_like(p) for p in params] if need_first else [],
            [torch.zeros_like(p) for p in params] if need_second else [],
        )

    def tensors(self) -> list[Tensor]:
        """All that is remembered, less the count."""
        return [*self.first, *self.second]

    def everything(self) -> list[Tensor]:
        """All that is remembered, the count included where it is a tensor."""
        return [*self.tensors(), self.steps] if isinstance(self.steps, Tensor) else self.tensors()


@torch.no_grad()
def step(
    optim: Optim,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    buffers: Buffers,
    *,
    lr: Tensor | None = None,
    stacked: bool = False,
) -> None:
    """One update of `params`, in place. `lr` overrides the optimiser's; `stacked` says that
    dimension 0 counts clients, whose gradients are clipped one by one."""
    params, grads = list(params), list(grads)
    if optim.lazy:
        _step_lazily(optim, params, grads, buffers, lr, stacked)
        return
    if optim.clip > 0:
        grads = clip(grads, optim.clip, stacked)
    buffers.steps = buffers.steps + 1 if isinstance(buffers.steps, int) else buffers.steps.add_(1)
    if optim.name == "sgd" and isinstance(lr, Tensor) and lr.is_cuda:
        _fused_sgd(optim, params, grads, buffers, lr)
        return
    rate: float | Tensor = optim.lr if lr is None else lr
    if optim.weight_decay > 0 and optim.name == "adamw":
        torch._foreach_mul_(params, _scalar(1 - rate * optim.weight_decay, params))
    elif optim.weight_decay > 0:
        grads = list(torch._foreach_add(grads, params, alpha=optim.weight_decay))
    (_adam if optim.adaptive else _sgd)(optim, params, grads, buffers, rate)


def _step_lazily(
    optim: Optim,
    params: list[Tensor],
    grads: list[Tensor],
    buffers: Buffers,
    lr: Tensor | None,
    stacked: bool,
) -> None:
    """The plain step, undone wherever there was no gradient."""
    touched = [g != 0 for g in grads]
    kept = [[t.clone() for t in tensors] for tensors in (params, buffers.first, buffers.second)]
    step(replace(optim, lazy=False), params, grads, buffers, lr=lr, stacked=stacked)
    for old, new in zip(kept, (params, buffers.first, buffers.second), strict=True):
        # A buffer that did not exist before the step started from zero, and is still zero where
        # there was no gradient.
        for was, now, flags in zip(old, new, touched, strict=False):
            now.copy_(torch.where(flags, now, was))


def clip(grads: Sequence[Tensor], limit: float, stacked: bool = False) -> list[Tensor]:
    """The gradients scaled so that their joint norm is at most `limit`; of a stack, each client's
    for itself."""
    if not stacked:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads))))
        return list(torch._foreach_mul(list(grads), (limit / (norm + 1e-6)).clamp(max=1.0)))
    squares = torch.stack([g.reshape(len(g), -1).square().sum(1) for g in grads])
    scale = (limit / (squares.sum(0).sqrt() + 1e-6)).clamp(max=1.0)
    return [g * scale.reshape(-1, *[1] * (g.dim() - 1)) for g in grads]


def _sgd(
    optim: Optim, params: list[Tensor], grads: list[Tensor], buffers: Buffers, lr: float | Tensor
) -> None:
    if optim.momentum > 0:
        if not buffers.first:
            buffers.first = [g.clone() for g in grads]
        else:
            torch._foreach_mul_(buffers.first, optim.momentum)
            torch._foreach_add_(buffers.first, grads)
        grads = buffers.first
    _move(params, grads, lr)


def _fused_sgd(
    optim: Optim, params: list[Tensor], grads: list[Tensor], buffers: Buffers, lr: Tensor
) -> None:
    """Decay, momentum and update in one pass over memory."""
    torch._fused_sgd_(
        params,
        [
            g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)
            for p, g in zip(params, grads, strict=True)
        ],
        buffers.first,
        weight_decay=optim.weight_decay,
        momentum=optim.momentum,
        lr=lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def _adam(
    optim: Optim, params: list[Tensor], grads: list[Tensor], buffers: Buffers, lr: float | Tensor
) -> None:
    if not buffers.first:
        buffers.first = [torch.zeros_like(p) for p in params]
        buffers.second = [torch.zeros_like(p) for p in params]
    one, two = optim.betas
    torch._foreach_lerp_(buffers.first, grads, 1 - one)
    torch._foreach_mul_(buffers.second, two)
    torch._foreach_addcmul_(buffers.second, grads, grads, 1 - two)
    root = torch._foreach_sqrt(buffers.second)
    steps: Any = buffers.steps
    torch._foreach_mul_(root, _scalar((1 - two**steps) ** -0.5, params))
    torch._foreach_add_(root, optim.eps)
    _move(params, torch._foreach_div(buffers.first, root), lr / (1 - one**steps))


def _move(params: list[Tensor], direction: Sequence[Tensor], lr: float | Tensor) -> None:
    if isinstance(lr, Tensor):
        torch._foreach_sub_(params, torch._foreach_mul(list(direction), _scalar(lr, params)))
    else:
        torch._foreach_add_(params, list(direction), alpha=-lr)


def _scalar(value: float | Tensor, like: Sequence[Tensor]) -> Any:
    """A tensor factor in the type of what it multiplies, lest everything is promoted to float64."""
    return value.to(like[0].dtype) if isinstance(value, Tensor) else value

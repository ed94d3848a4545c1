"""Batches that were filled up, for layers that mix rows.

A filled-up batch keeps all batches of a program in one shape. Losses leave the filling out by the
batch's mask; batch normalisation would not, so inside `masked_statistics` it takes its mean and
variance over the rows that count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nestling.training.objectives import Batch, Given, Net, Objective
from nestling.training.phase import Phase

_SIGNATURE = signature(F.batch_norm)
_BatchNorm = nn.modules.batchnorm._BatchNorm


def with_masked_statistics(phase: Phase, module: nn.Module) -> Phase:
    """The phase with objectives that keep the filling of batches out of batch statistics, where the
    network has any."""
    if not any(isinstance(layer, _BatchNorm) for layer in module.modules()):
        return phase
    also = None if phase.also is None else partial(_masked, objective=phase.also)
    return replace(phase, objective=partial(_masked, objective=phase.objective), also=also)


def _masked(net: Net, batch: Batch, given: Given, *, objective: Objective) -> Tensor:
    if batch.mask is None:
        return objective(net, batch, given)
    with masked_statistics(batch.mask):
        return objective(net, batch, given)


class masked_statistics(TorchFunctionMode):
    """Inside the block batch normalisation of inputs with as many rows as the mask sees the flagged
    ones only. It works on the call and not on layers, so that teachers, networks inside networks
    and layers of the user's own are covered too."""

    def __init__(self, mask: Tensor) -> None:
        """Takes one flag per row of the batch."""
        super().__init__()
        self.mask = mask

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Normalises inputs of that many rows in training by the flagged ones; every other call
        runs as it is."""
        if func is F.batch_norm:
            given = _SIGNATURE.bind(*args, **(kwargs or {}))
            given.apply_defaults()
            x, mean, variance, weight, bias, training, momentum, eps = given.arguments.values()
            if training and len(x) == len(self.mask):
                return _normalised(x, self.mask, weight, bias, mean, variance, momentum, eps)
        return func(*args, **(kwargs or {}))


def _normalised(
    x: Tensor,
    mask: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    wide, dims = [1, -1, *[1] * (x.dim() - 2)], [0, *range(2, x.dim())]
    counts = mask.to(torch.float32).reshape(-1, *[1] * (x.dim() - 1))
    each = x[0, 0].numel()
    total, values = counts.sum() * each, x.float()
    mean = (values * counts).sum(dims) / total
    away = values - mean.reshape(wide)
    variance = (away.square() * counts).sum(dims) / total
    if running_mean is not None and running_variance is not None:
        with torch.no_grad():
            running_mean.copy_(running_mean.lerp(mean.detach(), momentum))
            running_variance.copy_(
                running_variance.lerp(variance.detach() * total / (total - 1), momentum)
            )
    out = away * torch.rsqrt(variance + eps).reshape(wide)
    if weight is not None:
        out = out * weight.reshape(wide)
    if bias is not None:
        out = out + bias.reshape(wide)
    return out.to(x.dtype)

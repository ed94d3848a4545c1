"""Normalisation, always named: a federated result depends on it more than on most of its hyper-parameters.

`group` needs no batch and no statistics, and a narrow network normalises exactly as the front of a wide one, as long as its
channels are a multiple of four. (Other counts get smaller groups: on a map of one pixel a group of one is always zero.)
`batch` uses the statistics of the batch at hand, in training and in evaluation.
`sbn` does the same until `calibrate` gives it statistics, once, after training (static batch normalisation, HeteroFL).
`tracked` is ordinary batch normalisation with running statistics.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nestling.errors import InputError, unknown

NORMS = ("group", "batch", "sbn", "tracked", "none")
GROUP_SIZE = 4
_BATCH = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def groups(channels: int) -> int:
    """How many groups `norm="group"` cuts `channels` into: the size of a group is fixed, not their number."""
    return channels // math.gcd(channels, GROUP_SIZE)


def norm_layer(kind: str, channels: int, dims: int = 2) -> nn.Module:
    """A normalisation layer for `channels` channels; `dims` counts the spatial dimensions (1 also serves flat features)."""
    if kind not in NORMS:
        raise unknown("norm", kind, NORMS, field="model.norm")
    if dims not in _BATCH:
        raise InputError(f"no normalisation for {dims} spatial dimensions", fix="use 1, 2 or 3")
    if kind == "none":
        return nn.Identity()
    if kind == "group":
        return nn.GroupNorm(groups(channels), channels)
    layer = _BATCH[dims](channels, track_running_stats=kind == "tracked")
    # A flag, not a subclass: symbolic tracing treats torch's own layers as one step but would walk into a subclass and fail.
    layer.kind = kind  # type: ignore[assignment]
    return layer


def calibrate(module: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """A copy of `module`, in evaluation mode, whose `sbn` layers carry the statistics of `batches`.

    The statistics are the plain average over batches of each batch's mean and variance, gathered in one pass. Only the
    `sbn` layers run in training mode during it: what is measured is the network that will be evaluated, without dropout.
    """
    fixed = copy.deepcopy(module).eval()
    layers = [part for part in fixed.modules() if getattr(part, "kind", None) == "sbn"]
    for layer in layers:
        _start_counting(layer)
        layer.train()
    if layers:
        _run(fixed, batches)
    return fixed.eval()


def _start_counting(layer: nn.Module) -> None:
    assert isinstance(layer, nn.modules.batchnorm._BatchNorm)
    layer.running_mean = torch.zeros_like(layer.weight)
    layer.running_var = torch.ones_like(layer.weight)
    layer.num_batches_tracked = torch.zeros((), dtype=torch.long, device=layer.weight.device)
    layer.track_running_stats = True
    layer.momentum = None  # None is torch's word for a cumulative average


@torch.no_grad()
def _run(module: nn.Module, batches: Iterable[Tensor]) -> None:
    seen = 0
    for batch in batches:
        module(batch)
        seen += 1
    if not seen:
        raise InputError("no batches to calibrate with", field="model.norm", fix='give at least one batch, or use norm = "batch"')

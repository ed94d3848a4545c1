"""Biases that batch normalisation takes off again.

A convolution's bias shifts a channel by a constant, and statistics of the batch remove it: output
and gradients are what they are without it, and its own gradient is zero but for rounding. To add it
and to sum its gradient up are two passes over the largest tensors of a network, a sixth of a round
of VGG16; so a program leaves it out. The bias itself stays, and whatever else acts on it (decay, a
pull to other weights) still does.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from nestling.training.objectives import Batch
from nestling.training.stacks.group import Group
from nestling.training.stacks.stacked import objective_on, remembered, sample_of


class _Unbiased1d(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight, None)


class _Unbiased2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight, None)


_UNBIASED: dict[type[nn.Module], type[nn.Module]] = {nn.Conv1d: _Unbiased1d, nn.Conv2d: _Unbiased2d}


_SPARED: dict[Any, bool] = {}


def may_spare_biases(group: Group) -> bool:
    """Whether a group's objective is the same without them: tried out, since an objective may look
    into the network."""
    return remembered(_SPARED, group, _try)


def _try(group: Group) -> bool:
    batch = Batch(*sample_of(group), 0)
    return bool(
        torch.allclose(
            objective_on(group, batch),
            objective_on(group, batch, spare_biases),
            rtol=1e-4,
            atol=1e-6,
        )
    )


def spare_biases(module: nn.Module) -> list[str]:
    """Has the network compute without such biases; gives the names of their layers. Only what
    stands directly in front of statistics of the batch at hand in a plain sequence counts: there
    nobody else reads what the convolution puts out. Statistics that are kept for later would miss
    the bias."""
    found = []
    for name, sequence in module.named_modules():
        if type(sequence) is nn.Sequential:
            for (leaf, layer), (_, behind) in pairwise(sequence.named_children()):
                if _is_spared(layer, behind):
                    layer.__class__ = _UNBIASED[type(layer)]
                    found.append(f"{name}.{leaf}" if name else leaf)
    return found


def _is_spared(layer: nn.Module, behind: nn.Module) -> bool:
    statistics = isinstance(behind, nn.modules.batchnorm._BatchNorm) and type(
        behind
    ).__module__.startswith("torch.")
    kept = getattr(behind, "track_running_stats", True)
    return (
        statistics
        and not kept
        and type(layer) in _UNBIASED
        and getattr(layer, "bias", None) is not None
    )

"""Normalisation, always named: a federated result depends on it more than on most of its
hyper-parameters.

`group` needs no batch and no statistics, and a narrow network normalises exactly as the front of a
wide one, as long as its channels are a multiple of four. (Other counts get smaller groups: on a map
of one pixel a group of one is always zero.) `batch` uses the statistics of the batch at hand, in
training and in evaluation. `sbn` does the same until `calibrate` gives it statistics, once, after
training (static batch normalisation, HeteroFL). `tracked` is ordinary batch normalisation with
running statistics. `per-width` is the same with one set of running statistics for each width and
one affine for all (FjORD). Its widths are `WIDTHS` unless the name states others, as in
`per-width:0.25,0.5,1`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.errors import InputError, unknown
from nestling.settings import OneOf

NORMS = ("group", "batch", "sbn", "tracked", "per-width", "none")
Norm = Annotated[str, OneOf(NORMS, more="per-width:0.25,0.5,1")]
GROUP_SIZE = 4
WIDTHS = (0.2, 0.4, 0.6, 0.8, 1.0)
"""The widths of `per-width`, unless stated."""
_BATCH = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def groups(channels: int) -> int:
    """How many groups `norm="group"` cuts `channels` into: the size of a group is fixed, not their
    number."""
    return channels // math.gcd(channels, GROUP_SIZE)


def norm_layer(kind: str, channels: int, dims: int = 2) -> nn.Module:
    """A normalisation layer for `channels` channels; `dims` counts the spatial dimensions (1 also
    serves flat features)."""
    kind, stated, widths = kind.partition(":")
    if kind not in NORMS or (stated and kind != "per-width"):
        raise unknown("norm", kind, NORMS, field="model.norm")
    if dims not in _BATCH:
        raise InputError(f"no normalisation for {dims} spatial dimensions", fix="use 1, 2 or 3")
    if kind == "none":
        return nn.Identity()
    if kind == "group":
        return nn.GroupNorm(groups(channels), channels)
    if kind == "per-width":
        return WidthNorm(channels, _widths(widths) if stated else WIDTHS)
    layer = _BATCH[dims](channels, track_running_stats=kind == "tracked")
    # A flag, not a subclass: symbolic tracing treats torch's own layers as one step but would walk
    # into a subclass and fail.
    layer.kind = kind  # type: ignore[assignment]
    return layer


class WidthNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalisation that keeps running statistics for every width it is used at; the affine
    is one for all.

    A network of some width is this layer cut to its first channels, and the number that is left
    says whose statistics are meant: those of the largest width that has no more. (Widths that round
    to the same number of channels share a set.)
    """

    kind = "per-width"
    means: Tensor
    variances: Tensor

    def __init__(self, channels: int, widths: tuple[float, ...] = WIDTHS) -> None:
        """Makes one row of running means and variances for each width."""
        super().__init__(channels, track_running_stats=False)
        self.whole, self.widths = channels, widths
        self.register_buffer("means", torch.zeros(len(widths), channels))
        self.register_buffer("variances", torch.ones(len(widths), channels))

    @property
    def row(self) -> int:
        """Which set of statistics the layer uses as it is cut now."""
        # The slack keeps 0.6 · 5 = 3.0000000000000004 from being more than 3.
        return max(
            sum(width * self.whole <= len(self.weight) + 1e-6 for width in self.widths) - 1, 0
        )

    def forward(self, x: Tensor) -> Tensor:
        """The normalised input; in training the statistics of this width move."""
        mean, variance = self.means[self.row], self.variances[self.row]
        if not self.training:
            return F.batch_norm(x, mean, variance, self.weight, self.bias, eps=self.eps)
        # Copies, because a stack of networks moves the statistics of a reshaped row and not the row
        # itself.
        means, variances = mean.clone(), variance.clone()
        out = F.batch_norm(
            x, means, variances, self.weight, self.bias, True, self.momentum or 0.0, self.eps
        )
        mean.copy_(means)
        variance.copy_(variances)
        return out


def used_rows(module: nn.Module) -> dict[str, Tensor]:
    """For the statistics of every `per-width` layer, flags of those that the network uses as it is
    cut now: its own width's and those of the narrower networks inside it."""
    found = {}
    for name, layer in module.named_modules():
        if isinstance(layer, WidthNorm):
            used = torch.arange(len(layer.means), device=layer.means.device) <= layer.row
            flags = used[:, None].expand(layer.means.shape)
            found.update(
                {f"{name}.{leaf}" if name else leaf: flags for leaf in ("means", "variances")}
            )
    return found


def _widths(stated: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in stated.split(","))
    except ValueError:
        found = ()
    if not found or list(found) != sorted(set(found)) or found[0] <= 0 or found[-1] > 1:
        raise InputError(
            f"{stated!r} are not widths",
            field="model.norm",
            fix='list them from small to large, e.g. "per-width:0.25,0.5,1"',
        )
    return found


def calibrate(module: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """A copy of `module`, in evaluation mode, whose `sbn` layers carry the statistics of `batches`.

    The statistics are the plain average over batches of each batch's mean and variance, gathered in
    one pass. Only the `sbn` layers run in training mode during it: what is measured is the network
    that will be evaluated, without dropout.
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
        raise InputError(
            "no batches to calibrate with",
            field="model.norm",
            fix='give at least one batch, or use norm = "batch"',
        )

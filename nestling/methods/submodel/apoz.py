"""How much of each part of a network is idle, and the widths that follow from it.

The share of zeros behind a ReLU (APoZ, "average percentage of zeros") says how much of a unit is redundant. `measure` finds it,
`WidthScale` turns it into widths: one number scales the widths of all units, so that all networks of one scale are nested.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nestling.methods.api import InputError, Phase, Reference, View, World
from nestling.methods.proxy import labelled_proxy
from nestling.training.optimisers import Optim
from nestling.training.trainer import train
from nestling.views import Axes, by_index

LEAST = 0.01
"""The least share of a unit's channels that is kept."""

_RELUS = ("relu", "relu_", "hardtanh", "hardtanh_", "clamp_min", "threshold")
_HALVINGS = 60


def units_of(axes: Axes, kind: str = "stages") -> tuple[str, ...]:
    """The unit of every axis. "axes": each is its own. "stages": axes whose names agree up to the first number are one (a stage of a
    residual network); an axis without a number in its name is its own."""
    return tuple(_stage(name) if kind == "stages" else name for name in axes.names)


def _stage(name: str) -> str:
    parts = name.split(".")
    return next((".".join(parts[: k + 1]) for k, part in enumerate(parts) if part.isdigit()), name)


@dataclass(frozen=True, eq=False)
class WidthScale:
    """The networks of one rule: unit j keeps the share clip((1 − A_j·log|l_j| / log max|l|)·γ, 0.01, 1) of its channels, where |l_j|
    counts its parameters. Without `apoz` every unit keeps clip(γ, 0.01, 1)."""

    reference: Reference
    units: tuple[str, ...]
    apoz: tuple[float, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The units, in the order of the network."""
        return tuple(dict.fromkeys(self.units))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The parameters of every unit: those of the layers that write its channels."""
        axes, total = self.reference.axes, dict.fromkeys(self.names, 0)
        for name in self.reference.parameters:
            written = _written(axes, name)
            if written is not None:
                total[self.units[written]] += math.prod(axes.shapes[name])
        return tuple(total.values())

    @cached_property
    def base(self) -> tuple[float, ...]:
        """The widths at γ = 1, before they are clipped."""
        if not self.apoz:
            return (1.0,) * len(self.names)
        largest = math.log(max(self.counts))
        return tuple(1 - a * math.log(max(count, 2)) / largest for a, count in zip(self.apoz, self.counts, strict=True))

    def ratios(self, scale: float) -> tuple[float, ...]:
        """The share of every unit's channels that is kept at γ = `scale`."""
        return tuple(min(1.0, max(LEAST, b * scale)) for b in self.base)

    def view(self, scale: float) -> View:
        """The first ⌊s_j·K_j⌋ channels of every axis, in whole groups where a group norm has them, and at least one."""
        axes, ratios = self.reference.axes, dict(zip(self.names, self.ratios(scale), strict=True))
        sizes = zip(axes.names, self.units, axes.sizes, axes.grains, strict=True)
        return by_index(axes, {n: range(max(1, math.floor(ratios[unit] * k / g + 1e-9)) * g) for n, unit, k, g in sizes})

    def largest(self, fits: Callable[[View], bool]) -> View:
        """The largest network that fits, found by halving: networks grow with γ. Where nothing fits, the smallest."""
        if fits(self.reference.full):
            return self.reference.full
        low, high = 0.0, 1 / max(min(self.base), 1e-3)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if fits(self.view(middle)) else (low, middle)
        return self.view(low)

    def first(self, share: float, within: float = 0.05) -> View:
        """The released code's search: the first of γ = 100/1, 100/2, …, 100/199 at which the network without its output layer is
        `within` of its share; coming from above, it stops at the upper edge."""
        whole = self.features(self.reference.full)
        for i in range(1, 200):
            view = self.view(100 / i)
            if abs(self.features(view) / whole - share) <= within:
                return view
        raise InputError(f"no width has {share:g} of the parameters", field="method.levels", fix='use method.compat = "paper"')

    def features(self, view: View) -> int:
        """How many parameters a view has, those of the output layer left out."""
        axes = self.reference.axes
        return sum(math.prod(view.shape(n)) for n in self.reference.parameters if _written(axes, n) is not None)


def _written(axes: Axes, name: str) -> int | None:
    """The axis whose channels a state tensor writes (its first dimension); None for what writes none, as the output layer."""
    first = axes.dims[name][0] if axes.dims[name] else None
    return None if first is None else int(np.searchsorted(axes.offsets, first.max(), side="right")) - 1


def measure_on_proxy(world: World, units: Sequence[str], method: str, share: float, epochs: int) -> tuple[float, ...]:
    """Trains a copy of the network on most of a share of the proxy and counts its zeros on the rest; the copy is thrown away."""
    fix = 'set it above 0, or preset method.apoz, or set method.ratios = "uniform"'
    x, y, rest, _ = labelled_proxy(world, method, fix, share)
    module = copy.deepcopy(world.main.module)
    train(module, Phase(optim=Optim("adam", 1e-3), batch=50, epochs=epochs), x, y, world.seed)
    return measure(world.main, units, module, rest)


@torch.no_grad()
def measure(reference: Reference, units: Sequence[str], module: nn.Module, x: Tensor, batch: int = 256) -> tuple[float, ...]:
    """The share of zeros behind the ReLUs of every unit of a trained network, in the order of `units`: mean over the ReLUs that read
    its channels, each of them the mean over samples and positions."""
    module = copy.deepcopy(module).eval()
    names = {tensor.data_ptr(): name for name, tensor in module.state_dict().items()}
    zeros: dict[int, Tensor] = {}
    for part in x.split(batch):
        watch = _Watch(reference.axes, names)
        with watch:
            module(part)
        for number, found in enumerate(watch.found):
            zeros[number] = zeros.get(number, 0.0) + found.zeros * (len(part) / len(x))
    by_unit: dict[str, list[float]] = {name: [] for name in dict.fromkeys(units)}
    for number, found in enumerate(watch.found):
        axis_of = np.searchsorted(reference.axes.offsets, found.channels, side="right") - 1
        for axis in np.unique(axis_of[found.channels >= 0]):
            by_unit[units[axis]].append(float(zeros[number].cpu().double().numpy()[axis_of == axis].mean()))
    known = {name: float(np.mean(values)) for name, values in by_unit.items() if values}
    if not known:
        raise InputError(
            "the network has no ReLU whose zeros could be counted", field="model.name", fix='set method.ratios = "uniform"'
        )
    # Nothing was counted for a unit without a ReLU of its own, so that it is taken for an average one.
    typical = float(np.mean(list(known.values())))
    return tuple(known.get(name, typical) for name in by_unit)


@dataclass
class _Found:
    """What one ReLU put out: which channels, and each one's share of zeros."""

    channels: np.ndarray
    zeros: Tensor


class _Watch(TorchDispatchMode):
    """Counts the zeros of every ReLU that runs inside the block, module or function. The channels it reads are those that the last
    layer before it wrote."""

    def __init__(self, axes: Axes, names: dict[int, str]) -> None:
        super().__init__()
        self.axes, self.names, self.found = axes, names, list[_Found]()
        self.last: np.ndarray | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in args:
            name = self.names.get(tensor.data_ptr()) if isinstance(tensor, Tensor) else None
            if name is not None and self.axes.dims[name]:
                self.last = self.axes.dims[name][0]
        if func.overloadpacket.__name__ in _RELUS and self.last is not None and out.shape[1] == len(self.last):
            others = [d for d in range(out.dim()) if d != 1]
            self.found.append(_Found(self.last, (out == 0).float().mean(others)))
        return out

"""Which part of a reference state a party owns.

A view keeps a set of channels on every axis, leaves out whole units (blocks, exits), may mask
single entries, and may keep some tensors private. The full model, a width prefix, a rolling window,
a depth prefix, a sparse mask and "only the head" are all views of one reference; two unrelated
architectures are simply two references.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestling.errors import InputError
from nestling.views.axes import Axes
from nestling.views.flat import Layout, Packed, layout

State = dict[str, Tensor]
Tensors = Mapping[str, Tensor]
"""Named tensors: a network's parameters and buffers, whole or sliced."""

Index = tuple[slice | np.ndarray, ...]


@dataclass(frozen=True, eq=False)
class View:
    """A part of the reference that `axes` describes.

    keep:    one flag per channel, all axes numbered through (see `Axes`).
    dropped: prefixes of names the view leaves out, e.g. `stages.3` (units and exits beyond its
             depth).
    masks:   per name, flags in the *reference* shape of the entries owned; extracted tensors are
             zero elsewhere.
    private: prefixes of names the party has but never sends or receives.
    """

    axes: Axes
    keep: np.ndarray
    dropped: frozenset[str] = frozenset()
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    private: frozenset[str] = frozenset()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The state tensors that travel, in the order of the reference."""
        if not self.dropped and not self.private:
            return tuple(self.axes.shapes)
        return tuple(
            n for n in self.axes.shapes if not _under(n, self.dropped) and not self._private(n)
        )

    def _private(self, name: str) -> bool:
        """A tensor with several names stays where it is as soon as one of them is private."""
        return any(_under(n, self.private) for n in (name, *self.axes.tied.get(name, ())))

    @cached_property
    def members(self) -> tuple[str, ...]:
        """The state tensors of the party's own network: what travels and what is private."""
        return tuple(n for n in self.axes.shapes if not _under(n, self.dropped))

    @cached_property
    def _where(self) -> dict[str, Index]:
        flags = np.append(self.keep, True)  # the last one answers for FREE = -1
        return {
            name: tuple(
                _positions(d, size, flags)
                for d, size in zip(dims, self.axes.shapes[name], strict=True)
            )
            for name, dims in self.axes.dims.items()
        }

    def where(self, name: str) -> Index:
        """The entries of tensor `name` inside the view: a slice or sorted positions for every
        dimension."""
        return self._where[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor `name` inside the view."""
        full = self.axes.shapes[name]
        return tuple(
            len(range(*p.indices(n))) if isinstance(p, slice) else len(p)
            for p, n in zip(self.where(name), full, strict=True)
        )

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors that travel."""
        return {name: self.shape(name) for name in self.names}

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The numbers of channels that modules keep as attributes, inside the view."""
        flags = np.append(self.keep, True)
        return {name: int(flags[line].sum()) for name, line in self.axes.counts.items()}

    def extract(self, state: Mapping[str, Tensor]) -> State:
        """The view's part of a reference state, as fresh tensors."""
        if isinstance(state, Packed) and state.flat is not None and state.layout is not None:
            part, index = self.packing(state.layout, state.flat.device)
            flat = state.flat.clone() if index is None else state.flat.index_select(0, index)
            flags = self.flags(part)
            flat = flat if flags is None else flat.mul_(flags)
            return Packed(part, flat, {name: self.cut(name, state[name]) for name in part.others})
        return {name: self.cut(name, state[name]) for name in self.names}

    def packing(self, whole: Layout, device: torch.device) -> tuple[Layout, Tensor | None]:
        """How the view lies in a flat reference state: its own layout, and where its entries stand
        in the reference's buffer (None: it is all of it, in order)."""
        key = (whole, str(device))
        if key not in self._packings:
            own = [name for name in whole.names if name in self.shapes]
            others = tuple(name for name in whole.others if name in self.shapes)
            part = layout(tuple(own), tuple(self.shape(name) for name in own), others)
            same = part.names == whole.names and part.shapes == whole.shapes
            self._packings[key] = (part, None if same else self._places(whole, own, device))
        return self._packings[key]

    def _places(self, whole: Layout, names: list[str], device: torch.device) -> Tensor:
        pieces = [np.zeros(0, dtype=np.int64)]
        for name in names:
            start, end, shape = whole.offsets[name]
            grid = np.arange(start, end).reshape(shape)
            pieces.append(
                grid[np.ix_(*(_line(p) for p in self.where(name)))].reshape(-1)
                if shape
                else grid.reshape(-1)
            )
        return torch.from_numpy(np.concatenate(pieces)).to(device)

    def flags(self, own: Layout) -> Tensor | None:
        """Which entries of its own state, as one vector, are owned; None where all are."""
        if not self.masks:
            return None
        if own not in self._flags:
            device = next(iter(self.masks.values())).device
            masks = [
                (self.mask(name), shape) for name, shape in zip(own.names, own.shapes, strict=True)
            ]
            whole = [
                torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask
                for mask, shape in masks
            ]
            self._flags[own] = torch.cat([mask.reshape(-1) for mask in whole])
        return self._flags[own]

    @cached_property
    def _flags(self) -> dict[Layout, Tensor]:
        return {}

    @cached_property
    def _packings(self) -> dict[Any, tuple[Layout, Tensor | None]]:
        return {}

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """The view's part of one tensor of the reference, as a fresh tensor."""
        part = take(tensor, self.where(name))
        if name in self.masks:
            return part * take(self.masks[name], self.where(name))
        return part.clone()

    def scatter(self, state: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> State:
        """A copy of the reference state in which the view's entries are those of `local`; the
        others keep their value."""
        result = {name: tensor.clone() for name, tensor in state.items()}
        for name in self.names:
            put(result[name], self.where(name), local[name], self.mask(name))
        return result

    def mask(self, name: str) -> Tensor | None:
        """Flags of the owned entries of `name` in the view's shape, or None where all are owned."""
        if name not in self.masks:
            return None
        if name not in self._own_masks:
            self._own_masks[name] = take(self.masks[name], self.where(name))
        return self._own_masks[name]

    def owned(self, name: str) -> Tensor | None:
        """Where the owned entries of `name` stand in the view's tensor as one line, or None where
        all are owned. Looked for once: on a GPU that waits for the device."""
        mask = self.mask(name)
        if mask is None:
            return None
        if name not in self._owned:
            self._owned[name] = mask.reshape(-1).nonzero()[:, 0]
        return self._owned[name]

    @cached_property
    def _own_masks(self) -> dict[str, Tensor]:
        return {}

    @cached_property
    def _owned(self) -> dict[str, Tensor]:
        return {}

    def numel(self) -> int:
        """How many entries travel."""
        return sum(self._count(name) for name in self.names)

    def _count(self, name: str) -> int:
        mask = self.mask(name)
        return int(mask.sum()) if mask is not None else math.prod(self.shape(name))

    def nbytes(self, itemsize: int = 4) -> int:
        """What the view's weights take on the wire: its entries, and one bit per entry where there
        is a mask."""
        bits = sum(
            math.ceil(math.prod(self.shape(name)) / 8) for name in self.names if name in self.masks
        )
        return self.numel() * itemsize + bits

    def contains(self, other: View) -> bool:
        """Whether every entry of `other` is in this view."""
        axes = bool((other.keep <= self.keep).all()) and set(other.names) <= set(self.names)
        return axes and all(
            name in other.masks and bool((other.masks[name] <= m).all())
            for name, m in self.masks.items()
        )

    def key(self) -> bytes:
        """Equal for equal views of one reference (masks aside): what caches are keyed by."""
        return self._key

    @cached_property
    def _key(self) -> bytes:
        return (
            np.packbits(self.keep).tobytes()
            + "|".join(sorted(self.dropped)).encode()
            + b"||"
            + "|".join(sorted(self.private)).encode()
        )

    def form(self) -> bytes:
        """Equal for views whose networks are built alike: the same tensors in the same shapes,
        whichever channels they hold."""
        return self._form

    @cached_property
    def _form(self) -> bytes:
        shapes = [(name, self.shape(name)) for name in self.members]
        sizes = f"|{self.sizes}" if self.sizes else ""
        return f"{shapes}|{sorted(self.dropped)}|{sorted(self.private)}{sizes}".encode()

    def indices(self, axis: str | int) -> np.ndarray:
        """The channels kept on one axis."""
        number = self.axes.number(axis) if isinstance(axis, str) else axis
        start = self.axes.offsets[number]
        return np.flatnonzero(self.keep[start : start + self.axes.sizes[number]])


def full(axes: Axes) -> View:
    """The whole reference."""
    return View(axes, np.ones(axes.channels, dtype=bool))


def prefix(axes: Axes, ratio: float | Mapping[str, float]) -> View:
    """The first ⌈ratio·K⌉ channels of every axis, rounded up to whole groups where a group norm has
    them; a mapping gives a ratio for each axis by name, others stay whole."""
    ratios = (
        dict.fromkeys(axes.names, ratio)
        if isinstance(ratio, (int, float))
        else {n: ratio.get(n, 1.0) for n in axes.names}
    )
    for name, r in ratios.items():
        if not 0 < r <= 1:
            raise InputError(
                f"a width ratio must be above 0 and at most 1, not {r}", field=f"ratio of {name}"
            )
    # The small tolerance keeps ⌈⌉ exact for ratios like 0.7 that binary fractions overshoot.
    sizes = zip(axes.names, axes.sizes, axes.grains, strict=True)
    return by_index(
        axes, {n: np.arange(math.ceil(ratios[n] * k / g - 1e-9) * g) for n, k, g in sizes}
    )


def rolling(axes: Axes, ratio: float | Mapping[str, float], step: int) -> View:
    """A window as large as `prefix`, moved on by `step` channels on every axis and around its end;
    where a group norm has groups it moves by whole groups. On each axis all windows of K steps
    together hold every one of its K channels equally often."""
    return rolled(prefix(axes, ratio), step)


def rolled(view: View, step: int) -> View:
    """The view with the channels of every axis moved on by `step` (see `rolling`)."""
    keep = np.empty_like(view.keep)
    for start, size, grain in zip(
        view.axes.offsets, view.axes.sizes, view.axes.grains, strict=False
    ):
        keep[start : start + size] = np.roll(view.keep[start : start + size], step * grain)
    return View(view.axes, keep, view.dropped, view.masks, view.private)


def by_index(axes: Axes, indices: Mapping[str, Iterable[int]]) -> View:
    """The given channels of the named axes; axes not named stay whole."""
    keep = np.ones(axes.channels, dtype=bool)
    for name, chosen in indices.items():
        number = axes.number(name)
        start, size = axes.offsets[number], axes.sizes[number]
        positions = np.asarray(list(chosen), dtype=np.int64)
        if len(positions) == 0 or positions.min() < 0 or positions.max() >= size:
            raise InputError(
                f"axis {name!r} has channels 0..{size - 1}; at least one of them must be kept"
            )
        keep[start : start + size] = False
        keep[start + positions] = True
    return View(axes, keep)


def without(view: View, units: Iterable[str]) -> View:
    """The view less whole units (blocks or exits, by the prefix of their names)."""
    units = frozenset(units)
    names = [*view.axes.shapes, *(n for others in view.axes.tied.values() for n in others)]
    for unit in units:
        if not any(_under(name, [unit]) for name in names):
            raise InputError(
                f"there is no unit {unit!r} in the network",
                fix="name a sub-module, e.g. 'stages.3'",
            )
    return View(view.axes, view.keep, view.dropped | units, view.masks, view.private)


def masked(view: View, masks: Mapping[str, Tensor]) -> View:
    """The view with only the flagged entries of the named tensors (flags in the reference's
    shape)."""
    for name, mask in masks.items():
        expected = view.axes.shapes.get(name)
        if expected != tuple(mask.shape) or mask.dtype != torch.bool:
            raise InputError(
                f"the mask of {name!r} must be bool of shape {expected}, not {mask.dtype} of "
                f"{tuple(mask.shape)}"
            )
    return View(view.axes, view.keep, view.dropped, {**view.masks, **masks}, view.private)


def keep_private(view: View, names: Iterable[str]) -> View:
    """The view with some tensors (by prefix of name) that never travel."""
    return View(view.axes, view.keep, view.dropped, view.masks, view.private | frozenset(names))


def to_spec(view: View) -> dict[str, Any]:
    """The view without its masks as plain JSON: a prefix as its length, any other index set as a
    list."""
    index: dict[str, Any] = {}
    for number, name in enumerate(view.axes.names):
        kept = view.indices(number)
        if len(kept) < view.axes.sizes[number]:
            index[name] = len(kept) if kept[-1] == len(kept) - 1 else kept.tolist()
    return {"index": index, "dropped": sorted(view.dropped), "private": sorted(view.private)}


def from_spec(axes: Axes, spec: Mapping[str, Any]) -> View:
    """The view that `to_spec` described."""
    index = {
        name: range(kept) if isinstance(kept, int) else kept for name, kept in spec["index"].items()
    }
    return keep_private(without(by_index(axes, index), spec["dropped"]), spec["private"])


def _under(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in prefixes)


def _positions(dim: np.ndarray | None, size: int, flags: np.ndarray) -> slice | np.ndarray:
    if dim is None:
        return slice(0, size)
    positions = np.flatnonzero(flags[dim])
    contiguous = len(positions) > 0 and positions[-1] - positions[0] == len(positions) - 1
    return slice(int(positions[0]), int(positions[-1]) + 1) if contiguous else positions


def _line(place: slice | np.ndarray) -> np.ndarray:
    return np.arange(place.start, place.stop) if isinstance(place, slice) else place


def take(tensor: Tensor, index: Index) -> Tensor:
    """The entries of a tensor that an index addresses."""
    part = tensor[tuple(p if isinstance(p, slice) else slice(None) for p in index)]
    for d, p in enumerate(index):
        if not isinstance(p, slice):
            part = part.index_select(d, torch.from_numpy(p).to(part.device))
    return part


def put(tensor: Tensor, index: Index, local: Tensor, mask: Tensor | None = None) -> None:
    """Writes `local` (where a mask flags it) to the entries that an index addresses."""
    if mask is not None:
        local = torch.where(mask, local, take(tensor, index))
    if all(isinstance(p, slice) for p in index):
        tensor[index] = local
    else:
        tensor[mesh(index, tensor.device)] = local


def mesh(index: Index, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    """Index tensors that address the outer product of the positions on all dimensions at once."""
    lines = [torch.from_numpy(_line(p)) for p in index]
    return tuple(
        line.reshape([-1 if k == d else 1 for k in range(len(lines))]).to(device)
        for d, line in enumerate(lines)
    )

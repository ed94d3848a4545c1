"""Sub-networks whose channels are tensors: drawn anew for every batch, yet one program for all
draws and all clients.

A view names its channels once and for all. Here only their number is fixed, by a view of that
shape; which ones they are arrives as index tensors, so that clients with other draws can be trained
as one stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from nestling.errors import InputError
from nestling.views.axes import FREE, Axes
from nestling.views.reference import Reference
from nestling.views.view import View


@dataclass(frozen=True, eq=False)
class _Line:
    """One dimension of some tensors: for every axis in it where each channel's entries stand, and
    the entries of every view."""

    places: dict[int, Tensor]  # axis → (channels, entries per channel)
    free: Tensor
    ordered: bool  # whether entries of rising channels rise

    def pick(self, kept: Mapping[int, Tensor]) -> Tensor | None:
        """The entries of the kept channels, in order; None where all are kept."""
        if not any(axis in kept for axis in self.places):
            return None
        parts = [
            (places[kept[axis]] if axis in kept else places).reshape(-1)
            for axis, places in self.places.items()
        ]
        if self.ordered:
            return parts[0]
        return torch.cat([*parts, self.free]).sort().values


class Picker:
    """Runs sub-networks of one reference by index tensors."""

    def __init__(self, reference: Reference, place: torch.device) -> None:
        """Finds out once, for every dimension of every tensor, where the channels stand; index
        tensors live on `place`."""
        self.reference, axes = reference, reference.axes
        self._lines: dict[bytes, _Line] = {}
        self._keys: dict[str, list[bytes | None]] = {}
        for name, dims in axes.dims.items():
            self._keys[name] = [None if line is None else line.tobytes() for line in dims]
            for line in dims:
                if line is not None and line.tobytes() not in self._lines:
                    self._lines[line.tobytes()] = _line(axes, line, place)

    def forward(
        self,
        view: View,
        state: Mapping[str, Tensor],
        kept: Mapping[int, Tensor],
        x: Tensor,
        *,
        rescale: bool = False,
    ) -> Tensor:
        """The output of the sub-network of the kept channels (axis → sorted numbers; axes left out
        stay whole), its weights cut out of `state` on the way. `view` has as many channels on every
        axis. With `rescale`, what a layer reads is scaled up by the share of its inputs that is
        left out."""
        picked = {key: line.pick(kept) for key, line in self._lines.items()}
        local = {}
        for name in view.members:
            tensor = state[name]
            for d, key in enumerate(self._keys[name]):
                index = picked[key] if key is not None else None
                if index is not None:
                    tensor = tensor.index_select(d, index)
                    if d == 1 and rescale:
                        tensor = tensor * (state[name].shape[1] / tensor.shape[1])
            local[name] = tensor
        return torch.func.functional_call(self.reference.network(view).train(), local, (x,))


@lru_cache(maxsize=16)
def picker(reference: Reference, place: torch.device) -> Picker:
    """The one picker of a reference: equal work is known by equal objects."""
    return Picker(reference, place)


def _line(axes: Axes, line: np.ndarray, place: torch.device) -> _Line:
    places = {}
    axis_of = np.searchsorted(axes.offsets, line, side="right") - 1
    for axis in np.unique(axis_of[line != FREE]).tolist():
        found = [np.flatnonzero(line == axes.offsets[axis] + c) for c in range(axes.sizes[axis])]
        if len({len(entries) for entries in found}) > 1:
            raise InputError(
                f"the channels of {axes.names[axis]} are read unequally often, so that no draw "
                "of them has a fixed shape",
                field="model.name",
                fix="use a network without split or sliced channels",
            )
        places[axis] = torch.from_numpy(np.stack(found)).to(place)
    free = np.flatnonzero(line == FREE)
    ordered = len(places) == 1 and len(free) == 0 and bool((np.diff(line) >= 0).all())
    return _Line(places, torch.from_numpy(free).to(place), ordered)

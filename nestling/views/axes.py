"""Channel axes of a network: what can be kept or left out, and which entries of which tensors that
is. They are found by tracing (`views.tracing`)."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from nestling.errors import InputError

FREE = -1
"""Marks an entry of a dimension that belongs to no axis: it is part of every view."""


@dataclass(frozen=True, eq=False)
class Axes:
    """The channel axes of one reference network.

    The channels of all axes are numbered through: channel `c` of axis `a` is `offsets[a] + c`.
    `dims[name][d]` holds that number for every entry of dimension `d` of the state tensor `name`
    (`FREE` where the entry belongs to every view), or None where no entry belongs to an axis.
    `grains[a]` is the number of neighbouring channels that a group norm on axis `a` normalises
    together: a prefix of whole grains behaves exactly as in the wide network. `tied` has the other
    names of tensors that have several. `counts["block.heads"]` is the attribute `heads` of the
    module `block`, a number that its forward uses: how many of these entries a view keeps. `notes`
    say what had to be left whole, and why.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    grains: tuple[int, ...]
    dims: dict[str, tuple[np.ndarray | None, ...]]
    shapes: dict[str, tuple[int, ...]]
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    counts: Mapping[str, np.ndarray] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where each axis begins in the numbering of all channels, and at last their number."""
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    @property
    def channels(self) -> int:
        """How many channels there are in all axes together."""
        return int(sum(self.sizes))

    def number(self, name: str) -> int:
        """The position of the axis called `name`."""
        if name not in self.names:
            raise InputError(f"there is no axis {name!r}", fix=f"axes: {', '.join(self.names)}")
        return self.names.index(name)

    def share(self, names: Container[str]) -> float:
        """The share of the entries of the named tensors that some view leaves out."""
        every = cut = 0
        for name, shape in self.shapes.items():
            if name in names:
                free = [
                    size if d is None else int((d == FREE).sum())
                    for d, size in zip(self.dims[name], shape, strict=True)
                ]
                every += int(np.prod(shape, dtype=np.int64))
                cut += int(np.prod(shape, dtype=np.int64) - np.prod(free, dtype=np.int64))
        return cut / every if every else 0.0


def no_axes(
    shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, tuple[str, ...]], note: str
) -> Axes:
    """The axes of a network that can only be used whole."""
    dims: dict[str, tuple[np.ndarray | None, ...]] = {
        name: (None,) * len(shape) for name, shape in shapes.items()
    }
    return Axes((), (), (), dims, dict(shapes), tied, notes=(note,))

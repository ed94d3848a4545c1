"""Networks inside networks: views of one reference, one in another.

`forward` runs an inner view's network on the outer one's parameters, so that gradients reach them. `nested_masks` cuts the weights
that lead from a level's outer channels back into inner ones: every level then computes the same inside a larger network as alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from nestling.views.axes import Axes
from nestling.views.reference import Reference
from nestling.views.view import Index, View, take


def prepare(reference: Reference, views: Iterable[View]) -> None:
    """Builds the networks of views now. A phase whose objective uses `forward` does so first: inside a batch of clients it is too
    late."""
    for view in views:
        reference.network(view)


def forward(reference: Reference, view: View, state: Mapping[str, Tensor], x: Tensor, inside: View | None = None) -> Tensor:
    """The output of the view's network, its weights cut out of `state` on the way. `inside` is the view that `state` is of (None:
    the whole reference); it must contain `view`."""
    local = {name: take(state[name], within(view, inside, name)) for name in view.members}
    # The inner network's running statistics are its own: the outer ones must not see its batches.
    local = {name: t if name in reference.parameters else t.clone() for name, t in local.items()}
    return torch.func.functional_call(reference.network(view).train(), local, (x,))


def within(view: View, outer: View | None, name: str) -> Index:
    """Where the view's entries of a tensor stand in the outer view's tensor."""
    if outer is None:
        return view.where(name)
    return tuple(_place(inner, around) for inner, around in zip(view.where(name), outer.where(name), strict=True))


def _place(inner: slice | np.ndarray, around: slice | np.ndarray) -> slice | np.ndarray:
    if isinstance(inner, slice) and isinstance(around, slice):
        return slice(inner.start - around.start, inner.stop - around.start)
    positions, every = (np.arange(p.start, p.stop) if isinstance(p, slice) else p for p in (inner, around))
    return np.searchsorted(every, positions)


def nested_masks(axes: Axes, levels: Sequence[View], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """For every weight between two axes, flags of the entries that may be used when each level must stand on its own: a channel
    reads no channel of a larger level. `levels` are nested, in any order."""
    smallest = np.full(axes.channels + 1, len(levels))
    for number, view in reversed(list(enumerate(sorted(levels, key=lambda v: int(v.keep.sum()))))):
        smallest[:-1][view.keep] = number
    smallest[-1] = 0  # answers for FREE: what belongs to every view
    masks = {}
    for name, dims in axes.dims.items():
        if len(dims) >= 2 and dims[0] is not None and dims[1] is not None:
            allowed = torch.from_numpy(smallest[dims[0]][:, None] >= smallest[dims[1]][None, :])
            masks[name] = allowed.reshape(*allowed.shape, *[1] * (len(dims) - 2)).expand(axes.shapes[name]).clone().to(device)
    return masks

"""Sparse states: masks and channels by magnitude, and what a masked view keeps of a state as it
travels.

A tensor with a mask travels as the line of its kept entries, any other as it is: a mask's zeros
cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from nestling.views.nested import within
from nestling.views.reference import Reference
from nestling.views.view import State, View, masked, mesh, put, take


def prunable(reference: Reference) -> tuple[str, ...]:
    """The tensors that masks are made for: trained weights, never biases or norms."""
    return tuple(
        n
        for n, shape in reference.axes.shapes.items()
        if n in reference.parameters and len(shape) >= 2
    )


def masks_of(view: View) -> State:
    """The view's masks in its own shape."""
    return {name: mask for name in view.names if (mask := view.mask(name)) is not None}


def survivors(view: View, state: Mapping[str, Tensor]) -> State:
    """What the view's masks keep of a state of the view: masked tensors as the line of their kept
    entries, others as they are."""
    places = {name: view.owned(name) for name in view.names}
    return {
        name: state[name] if at is None else state[name].reshape(-1).index_select(0, at)
        for name, at in places.items()
    }


def restored(view: View, packed: Mapping[str, Tensor]) -> State:
    """The state that `survivors` was given, zero where nothing was kept."""
    return {name: _restored(view, name, packed[name]) for name in view.names}


def _restored(view: View, name: str, values: Tensor) -> Tensor:
    places = view.owned(name)
    if places is None:
        return values
    shape = view.shapes[name]
    dense = torch.zeros(math.prod(shape), dtype=values.dtype, device=values.device)
    return dense.index_copy_(0, places, values).reshape(shape)


def like_survivors(view: View, state: Mapping[str, Tensor]) -> State:
    """Tensors of the shapes and types that `survivors` gives; `state` is one of the reference."""
    places = {name: view.owned(name) for name in view.names}
    return {
        name: torch.empty(view.shapes[name] if at is None else len(at), dtype=state[name].dtype)
        for name, at in places.items()
    }


def prune_lowest(
    view: View, state: Mapping[str, Tensor], names: Iterable[str], share: float
) -> dict[str, Tensor]:
    """The view's masks after a share (rounded down) of the kept entries of every named tensor went,
    the smallest first. `state` is one of the view; masks are in the reference's shape, and entries
    outside the view stay as they were."""
    masks = {}
    for name in names:
        if name in view.shapes:
            kept = lowest_off(state[name], view.mask(name), share)
            masks[name] = widened(view, name, kept)
    return masks


def lowest_off(weight: Tensor, mask: Tensor | None, share: float) -> Tensor:
    """The mask of one tensor without the smallest of its kept entries; of equal ones the first
    go."""
    kept = (
        torch.ones(weight.shape, dtype=torch.bool, device=weight.device)
        if mask is None
        else mask.clone()
    )
    # The small tolerance keeps ⌊⌋ exact for shares like 0.7 that binary fractions miss.
    going = int(share * int(kept.sum()) + 1e-9)
    size = torch.where(kept, weight.abs(), torch.inf).reshape(-1)
    kept.view(-1)[torch.sort(size, stable=True).indices[:going]] = False
    return kept


def widened(view: View, name: str, mask: Tensor) -> Tensor:
    """A mask in the view's shape as one in the reference's; what the view does not hold keeps its
    flag."""
    known = view.masks.get(name)
    whole = (
        torch.ones(view.axes.shapes[name], dtype=torch.bool, device=mask.device)
        if known is None
        else known.clone()
    )
    put(whole, view.where(name), mask)
    return whole


_SAME: WeakKeyDictionary[View, tuple[Mapping[str, Tensor], View]] = WeakKeyDictionary()


def flagged(view: View, masks: Mapping[str, Tensor]) -> View:
    """The view with only what masks in its own shape keep. Devices of one piece are given the same
    masks: while they are, it is the same view, which looks only once for where its entries
    stand."""
    known = _SAME.get(view)
    if (
        known is None
        or known[0].keys() != masks.keys()
        or any(known[0][name] is not mask for name, mask in masks.items())
    ):
        known = _SAME[view] = (
            dict(masks),
            masked(view, {name: widened(view, name, mask) for name, mask in masks.items()}),
        )
    return known[1]


def channel_norms(view: View, state: Mapping[str, Tensor]) -> np.ndarray:
    """Per channel, numbered through as in `Axes`, the L1 norm of the weights that produce it in a
    state of the view."""
    norms = np.zeros(view.axes.channels)
    for name, shape in view.shapes.items():
        channels = view.axes.dims[name][0] if len(shape) >= 2 else None
        if channels is not None:
            rows, found = (
                state[name].detach().double().abs().flatten(1).sum(1).cpu().numpy(),
                channels[view.where(name)[0]],
            )
            np.add.at(norms, found[found >= 0], rows[found >= 0])
    return norms


def whole_widths(view: View, widths: Sequence[float]) -> list[int]:
    """Widths, one per axis, rounded up to whole groups of a group norm; at least one, and no more
    than the view has."""
    have = [len(view.indices(number)) for number in range(len(view.axes.sizes))]
    every = zip(widths, have, view.axes.grains, strict=True)
    # The small tolerance keeps ⌈⌉ exact for products that binary fractions overshoot.
    return [min(n, max(1, math.ceil(width / grain - 1e-9)) * grain) for width, n, grain in every]


def strongest(view: View, norms: np.ndarray, widths: Sequence[float]) -> View:
    """The view with only the channels of the largest norms: so many on every axis, in whole groups
    of a group norm."""
    keep = np.zeros_like(view.keep)
    for number, width in enumerate(whole_widths(view, widths)):
        grain, channels = view.axes.grains[number], view.indices(number)
        of = np.unique(channels // grain, return_inverse=True)[1]
        strength = np.bincount(of, norms[view.axes.offsets[number] + channels])
        best = np.sort(np.argsort(-strength, kind="stable")[: -(-width // grain)])
        keep[view.axes.offsets[number] + channels[np.isin(of, best)]] = True
    return View(view.axes, keep, view.dropped, view.masks, view.private)


def overwritten(
    view: View, state: Mapping[str, Tensor], part: View, reference: Mapping[str, Tensor]
) -> State:
    """A state of the view in which the entries that `part`, a view inside it, holds too are those
    of a reference state."""
    result = {name: tensor.clone() for name, tensor in state.items()}
    for name in part.names:
        inside = mesh(within(part, view, name), result[name].device)
        if inside:
            result[name][inside] = take(reference[name], part.where(name))
        else:
            result[name].copy_(reference[name])
    return result


def inside_of(view: View, outer: View, state: Mapping[str, Tensor]) -> State:
    """The view's part of a state of the outer view."""
    return {name: take(state[name], within(view, outer, name)).clone() for name in view.names}

"""The one merge: a weighted mean over views.

Every entry of the reference becomes the weighted mean of the contributions whose view holds it;
entries that nobody trained keep their value. Sums run in float64, so that integer weights are exact
(identical contributions return themselves, bit for bit), view by view in the order in which views
first appear.

Contributions of one view are summed as flat vectors, in pieces that stay in the cache, and the sum
is put in its place once: the cost is one pass over what came in. Tensors of which only some entries
count in some contribution (`present`) go one by one.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from nestling.views.flat import Layout, Packed, Row, flat_of, layout_of
from nestling.views.view import Index, State, View, mesh, take

_PIECE = 2**17
_MANY = 256  # pieces from which several threads sum them faster than one
_PIECE_CUDA = 2**24


@dataclass(eq=False)
class Contribution:
    """One party's part of a merge.

    present: per tensor name, flags in the view's shape of the entries that count (HeteroFL: the
             classifier rows of the classes a
    client holds); entries not flagged are left to others.
    client:  whose it is, where it is one client's and its weight is what that client says.
    """

    view: View
    state: Mapping[str, Tensor]
    weight: float = 1.0
    present: Mapping[str, Tensor] = field(default_factory=dict)
    client: int | None = None


def merge(reference: Mapping[str, Tensor], contributions: Iterable[Contribution]) -> State:
    """The reference state after merging; the reference itself is not changed."""
    given = [c for c in contributions if c.weight > 0]
    layout = layout_of(reference)
    single = {*layout.others, *(name for c in given for name in c.present)}
    alone = {
        name: merge_tensor(name, reference[name], [c for c in given if name in c.view.shapes])
        for name in single
    }
    if single.issuperset(layout.names):
        return {name: alone[name] for name in reference}
    merged = Packed(
        layout, _merge_flat(reference, layout, given), {name: alone[name] for name in layout.others}
    )
    for name in single.difference(layout.others):
        merged[name].copy_(alone[name])
    return merged


def counted(reference: Mapping[str, Tensor], contributions: Iterable[Contribution]) -> Tensor:
    """Flags, as one vector in the order of the reference's layout, of the entries that a merge
    would not leave alone."""
    given: dict[Any, Contribution] = {}
    for number, c in enumerate(contributions):
        if c.weight > 0:
            given[number if c.view.masks or c.present else c.view.key()] = c
    ones = [
        replace(c, state={n: torch.ones_like(t) for n, t in c.state.items()}, weight=1.0)
        for c in given.values()
    ]
    return (
        flat_of(
            merge({n: torch.zeros_like(t) for n, t in reference.items()}, ones),
            layout_of(reference),
        )
        > 0
    )


def _merge_flat(
    reference: Mapping[str, Tensor], layout: Layout, given: Sequence[Contribution]
) -> Tensor:
    old = flat_of(reference, layout)
    views = _by_view(given)
    if (
        len(views) == 1
        and not views[0][0].view.masks
        and views[0][0].view.packing(layout, old.device)[1] is None
    ):
        stacked = _rows(given, layout) if old.is_cuda else None
        if stacked is not None and all(c.weight == given[0].weight for c in given):
            # One pass over memory: nothing has to be turned into float64 before it is summed.
            return stacked.mean(0, dtype=torch.float64).to(old.dtype)
        return _sum(given, layout, old.device).div_(sum(c.weight for c in given)).to(old.dtype)
    total = torch.zeros(layout.numel, dtype=torch.float64, device=old.device)
    weight: Tensor | float = 0.0
    for own in views:
        small, index = own[0].view.packing(layout, old.device)
        summed, share = _sum(own, small, old.device), sum(c.weight for c in own)
        flags = own[0].view.flags(small)
        # Where an entry does not count it may hold anything, so it is left out rather than
        # multiplied by zero.
        summed = summed if flags is None else torch.where(flags, summed, 0.0)
        counts = None if flags is None else flags.to(summed.dtype) * share
        if index is None:
            total += summed
            weight = weight + (share if counts is None else counts)
        else:
            total.index_add_(0, index, summed)
            weight = torch.full_like(total, weight) if isinstance(weight, float) else weight
            weight.index_add_(
                0, index, torch.full_like(summed, share) if counts is None else counts
            )
    if isinstance(weight, float):
        return (total / weight).to(old.dtype) if weight else old.clone()
    return torch.where(weight > 0, total / weight, old.to(torch.float64)).to(old.dtype)


def _by_view(given: Sequence[Contribution]) -> list[list[Contribution]]:
    groups: dict[Hashable, list[Contribution]] = {}
    for c in given:
        # Masks are not part of a view's key.
        groups.setdefault(id(c.view) if c.view.masks else c.view.key(), []).append(c)
    return list(groups.values())


def _sum(own: Sequence[Contribution], layout: Layout, device: torch.device) -> Tensor:
    """Σ weight · state in float64, as one vector."""
    stacked = _rows(own, layout) if device.type == "cuda" else None
    if stacked is not None:
        weights = _weights(tuple(c.weight for c in own), device)
        wide = max(1, _PIECE_CUDA // len(own))
        if stacked.shape[1] <= wide:
            return weights @ stacked.double()
        return torch.cat([weights @ piece.double() for piece in stacked.split(wide, 1)])
    total = torch.zeros(layout.numel, dtype=torch.float64, device=device)
    flats = [(flat_of(c.state, layout), c.weight) for c in own]
    starts = range(0, layout.numel, _PIECE)
    if len(starts) * len(flats) < _MANY:
        for start in starts:
            _sum_piece(total, flats, start)
    else:
        # The clients' cores are idle now. Every entry is still summed in the same order, so no bit
        # depends on their number.
        with ThreadPoolExecutor(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        ) as threads:
            list(threads.map(partial(_sum_piece, total, flats), starts))
    return total


def _sum_piece(total: Tensor, flats: Sequence[tuple[Tensor, float]], start: int) -> None:
    piece = total[start : start + _PIECE]
    for flat, weight in flats:
        piece.add_(flat[start : start + _PIECE], alpha=weight)


@lru_cache(maxsize=64)
def _weights(weights: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(weights, dtype=torch.float64, device=device)


def _rows(own: Sequence[Contribution], layout: Layout) -> Tensor | None:
    """The matrix of which the contributions are rows, where they are rows of one, in order and all
    of it."""
    first = own[0].state
    if (
        not isinstance(first, Row)
        or first.layout is not layout
        or len(own) != len(first.stack.flat)
    ):
        return None
    together = all(
        isinstance(c.state, Row) and c.state.stack is first.stack and c.state.number == k
        for k, c in enumerate(own)
    )
    return first.stack.flat if together else None


def merge_tensor(
    name: str, old: Tensor, given: Sequence[Contribution], most: Tensor | None = None
) -> Tensor:
    """One tensor after merging; nobody weighs more than `most` says of an entry, if it is given."""
    if not given:
        return old.clone()
    total = torch.zeros(old.shape, dtype=torch.float64, device=old.device)
    weight = torch.zeros_like(total)
    for c in given:
        counts = counting(c, name)
        local = c.state[name].to(torch.float64)
        own: Tensor | float = c.weight
        if most is not None:
            own = take(most, c.view.where(name)).clamp(max=c.weight)
        if counts is None:
            _add(total, c.view.where(name), local * own)
            _add(weight, c.view.where(name), torch.ones_like(local) * own)
        else:
            # Where an entry does not count it may hold anything, so it is left out rather than
            # multiplied by zero.
            _add(total, c.view.where(name), torch.where(counts, local * own, 0.0))
            _add(weight, c.view.where(name), counts.to(torch.float64) * own)
    mean = torch.where(weight > 0, total / weight, old.to(torch.float64))
    return mean.to(old.dtype) if old.is_floating_point() else mean.round().to(old.dtype)


def counting(c: Contribution, name: str) -> Tensor | None:
    """Flags, in the view's shape, of the entries of a tensor that count; None where all do."""
    mask, present = c.view.mask(name), c.present.get(name)
    if mask is None or present is None:
        return present if mask is None else mask
    return mask & present


def _add(total: Tensor, index: Index, value: Tensor) -> None:
    if all(isinstance(p, slice) for p in index):
        total[index] += value
    else:
        positions = mesh(index, total.device)
        total[positions] = total[positions] + value

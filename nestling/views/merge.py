"""The one merge: a weighted mean over views.

Every entry of the reference becomes the weighted mean of the contributions whose view holds it; entries that nobody trained keep
their value. Sums run in float64, so that integer weights are exact (identical contributions return themselves, bit for bit), in
the order given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestling.views.view import Index, State, View, mesh


@dataclass(frozen=True)
class Contribution:
    """One party's part of a merge.

    present: per tensor name, flags in the view's shape of the entries that count (HeteroFL: the classifier rows of the classes a
    client holds); entries not flagged are left to others.
    """

    view: View
    state: Mapping[str, Tensor]
    weight: float = 1.0
    present: Mapping[str, Tensor] = field(default_factory=dict)


def merge(reference: Mapping[str, Tensor], contributions: Iterable[Contribution]) -> State:
    """The reference state after merging; the reference itself is not changed."""
    given = [c for c in contributions if c.weight > 0]
    return {name: _merge_tensor(name, old, [c for c in given if name in c.view.shapes]) for name, old in reference.items()}


def _merge_tensor(name: str, old: Tensor, given: list[Contribution]) -> Tensor:
    if not given:
        return old.clone()
    total = torch.zeros(old.shape, dtype=torch.float64, device=old.device)
    weight = torch.zeros_like(total)
    for c in given:
        counts = _counting(c, name)
        local = c.state[name].to(torch.float64)
        if counts is None:
            _add(total, c.view.where(name), local * c.weight)
            _add(weight, c.view.where(name), torch.full_like(local, c.weight))
        else:
            # Where an entry does not count it may hold anything, so it is left out rather than multiplied by zero.
            _add(total, c.view.where(name), torch.where(counts, local * c.weight, 0.0))
            _add(weight, c.view.where(name), counts.to(torch.float64) * c.weight)
    mean = torch.where(weight > 0, total / weight, old.to(torch.float64))
    return mean.to(old.dtype) if old.is_floating_point() else mean.round().to(old.dtype)


def _counting(c: Contribution, name: str) -> Tensor | None:
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

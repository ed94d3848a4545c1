"""How much one client may weigh: no more than a share of any entry that enough clients hold.

A client's weight in a mean is mostly the number of rows that it says it has, and on a fleet nobody
else can count them. Where one would have more than its share of an entry's weight, its weight there
is brought down until it has just that share. The others' weights stay as they are, unless they too
are above what is then the most. Where too few hold an entry for the share (two, and a share of a
third) those who do count alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestling.views import Contribution, State, merge
from nestling.views.merge import counting, merge_tensor
from nestling.views.view import put

_SLACK = 1 + 1e-9  # equal weights have equal shares, whatever rounding makes of them
_BITS = 62  # groups of holders that one number tells apart


def fair_cap(weights: Sequence[float], most: float) -> float:
    """The largest weight that anybody may have of these, so that no share is above `most`; infinite
    where nobody's is."""
    if not weights:
        return float("inf")
    return float(fair_caps(torch.tensor(weights, dtype=torch.float64)[:, None], most)[0])


def fair_caps(weights: Tensor, most: float) -> Tensor:
    """The same for each column of (clients, entries); who does not hold an entry has no weight
    there."""
    count = len(weights)
    ordered = weights.sort(0, descending=True).values
    # rest[k] is what those after the k largest weigh
    rest = torch.cat([ordered.flip(0).cumsum(0).flip(0), torch.zeros_like(ordered[:1])])
    holders = (weights > 0).sum(0).clamp(min=1)
    share = (1.0 / holders).clamp(min=most)
    caps = torch.full_like(share, torch.inf)
    open_ = ordered[0] > share * rest[0] * _SLACK
    for k in range(1, count):
        # With the k largest at the cap it must be `share` of the whole, and the next one below it.
        left = 1 - share * k
        cap = share * rest[k] / left.clamp(min=1e-12)
        fits = open_ & (left > 1e-12) & (ordered[k] <= cap * _SLACK)
        caps, open_ = torch.where(fits, cap, caps), open_ & ~fits
    return caps


@dataclass
class Lowered:
    """In how many entries a client's weight was brought down in a mean, and to what part of what it
    says at the least."""

    entries: int = 0
    least: float = 1.0

    def add(self, entries: int, least: float) -> None:
        """A further tensor."""
        self.entries, self.least = self.entries + entries, min(self.least, least)


def merge_within(
    reference: Mapping[str, Tensor],
    contributions: Iterable[Contribution],
    most: float,
    lowered: dict[int, Lowered] | None = None,
) -> State:
    """The mean over views, in which nobody has more than the share `most` of an entry's weight.
    Where nobody would have, it is that of `merge`, bit for bit. Clients whose weight was brought
    down are noted in `lowered`."""
    given = [c for c in contributions if c.weight > 0]
    merged = merge(reference, given)
    if len({c.weight for c in given}) < 2:
        return merged
    for name, old in reference.items():
        own = [c for c in given if name in c.view.shapes]
        caps = _caps_by_entry(name, old, own, most, lowered) if own else None
        if caps is not None:
            merged[name].copy_(merge_tensor(name, old, own, caps))
    return merged


def _caps_by_entry(
    name: str,
    old: Tensor,
    own: Sequence[Contribution],
    most: float,
    lowered: dict[int, Lowered] | None,
) -> Tensor | None:
    """The most that anybody may weigh in each entry of a tensor; None where nobody weighs more.
    Many entries have the same holders, for whom it is found out once."""
    groups: dict[Hashable, int] = {}  # of contributions that hold the same
    member, words = [], list[Tensor]()
    for number, c in enumerate(own):
        flags = counting(c, name)
        key: Hashable = c.view.key() if flags is None else number
        if key not in groups:
            groups[key] = bit = len(groups)
            if bit % _BITS == 0:
                words.append(torch.zeros(old.shape, dtype=torch.int64, device=old.device))
            words[-1] += _held(name, old, c, flags).to(torch.int64) << bit % _BITS
        member.append(groups[key])
    kinds, which, many = torch.stack([w.flatten() for w in words], 1).unique(
        dim=0, return_inverse=True, return_counts=True
    )
    bits = torch.arange(_BITS, device=old.device)
    holds = ((kinds[:, :, None] >> bits) & 1).flatten(1)[:, member].to(torch.float64)
    weights = torch.tensor([c.weight for c in own], dtype=torch.float64, device=old.device)
    caps = fair_caps((holds * weights).T, most)
    if not bool(caps.isfinite().any()):
        return None
    if lowered is not None:
        _note(lowered, own, holds, weights, caps, many)
    return caps[which.flatten()].reshape(old.shape)


def _note(
    lowered: dict[int, Lowered],
    own: Sequence[Contribution],
    holds: Tensor,
    weights: Tensor,
    caps: Tensor,
    many: Tensor,
) -> None:
    """Writes down whose weight is above the cap, in how many entries. There are few kinds of
    holders, so that this costs little where it is needed, and nothing where no cap binds."""
    over = (holds > 0) & (weights > caps[:, None] * _SLACK)
    least = torch.where(over, caps[:, None] / weights, 1.0).amin(0)
    found = torch.stack([(over * many[:, None]).sum(0).to(least), least])
    for c, entries, part in zip(own, *found.tolist(), strict=True):
        if c.client is not None and entries:
            lowered.setdefault(c.client, Lowered()).add(int(entries), part)


def _held(name: str, old: Tensor, c: Contribution, flags: Tensor | None) -> Tensor:
    held = torch.zeros(old.shape, dtype=torch.bool, device=old.device)
    all_of_it = torch.ones(c.view.shapes[name], dtype=torch.bool, device=old.device)
    put(held, c.view.where(name), all_of_it if flags is None else flags)
    return held

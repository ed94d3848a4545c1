"""Merges that a few lying clients cannot ruin.

Each rule takes the place of the mean over views (`views.merge`): per entry it looks at the clients
that hold it, and an entry that nobody holds keeps its value. Every reply counts with weight one:
the number of rows that a client claims is one more thing that it can lie about.

How long a reply's step is, is its root mean square over the entries that it holds: a long step in a
small piece and one in a large piece are then compared by what they do to one entry, and neither
is long because there is more of it. A reply is clipped if its step, from the weights that it was
given, is longer than the median one: it is scaled down to that.

Where fewer than three clients hold an entry nobody can tell from it alone who of them lies. There
every rule gives the mean of the clipped replies: their word counts, within bounds. "krum" and
"aligned" judge replies as wholes, by the entries that enough others hold, so that who is found out
there has no say elsewhere either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestling.views import Contribution, State
from nestling.views.flat import pack
from nestling.views.merge import counting
from nestling.views.view import put

RULES = ("clipped", "median", "trimmed", "krum", "aligned")
"""The merges beside the mean."""

WHOLES = ("krum", "aligned")
"""Those that take or leave replies as wholes."""

ENOUGH = 3
"""How many must hold an entry for the honest ones among them to outvote one that lies."""


@dataclass
class Robust:
    """A rule and how it is set; remembers how many entries had too few holders, until it is told.

    rule: "clipped" (the mean of clipped replies), "median" (per entry), "trimmed" (per entry, the
          mean without the smallest and the largest values), "krum" (the mean of the replies that
          are nearest to the others; multi-krum), "aligned" (the mean of clipped replies without
          those whose step does not point the way of the median one).
    trim: the share of clients that "trimmed" leaves out at each end and that "krum" leaves out:
          rounded down, but at least one, since to leave out nobody protects from nobody.
    """

    rule: str
    trim: float = 0.2
    merges: int = 0
    _thin: int = field(default=0, repr=False)
    _held: int = field(default=0, repr=False)
    _told: bool = field(default=False, repr=False)

    def merge(
        self, reference: Mapping[str, Tensor], contributions: Iterable[Contribution]
    ) -> State:
        """The reference state after merging; the reference itself is not changed."""
        given = [c for c in contributions if c.weight > 0]
        self.merges += 1
        if not given:
            return {name: old.clone() for name, old in reference.items()}
        scales = clip_scales(reference, given)
        chosen = self._chosen(reference, given)
        return pack(
            {
                name: self._merge_tensor(name, old, given, scales, chosen)
                for name, old in reference.items()
            }
        )

    def combine(self, said: Tensor, held: Tensor, base: Tensor) -> Tensor:
        """What the rule makes of what clients say, one row of `said` each, where `held` flags what
        each of them tells of; where nobody tells anything, `base`. Steps go from there."""
        self.merges += 1
        values, start = said.to(torch.float64), base.to(torch.float64)
        steps, flags = torch.where(held, values - start, 0.0).flatten(1), held.flatten(1)
        lengths = (steps.square().sum(1) / flags.sum(1).clamp(min=1)).sqrt()
        scales = torch.tensor(_scales(lengths.tolist()), dtype=torch.float64, device=said.device)
        taken = held & _rowwise(self._told_stay(values.flatten(1), steps, flags), held)
        times = _rowwise(scales, values)
        clipped = torch.where(times == 1, values, start + times * (values - start))
        return self._decided(values, clipped, held, taken, start).to(base.dtype)

    def agree(self, said: Sequence[Tensor]) -> Tensor:
        """What the rule makes of what all clients say of the same things; steps go from zero."""
        values = torch.stack(list(said))
        return self.combine(values, torch.ones_like(values, dtype=torch.bool), values[0] * 0)

    def promise(self, replies: int) -> str:
        """How many may lie, of a round with so many replies, as a run's first lines say it."""
        out, half = _left_out(self.trim, replies), (replies - 1) // 2
        few = f"where fewer than {ENOUGH} hold an entry, the mean of clipped replies"
        return {
            "clipped": "no reply moves the weights further than the median one, whatever it is; "
            f"its direction is not looked at ({replies // 2} of {replies} replies may lie)",
            "median": "fewer than half of those that hold an entry may lie "
            f"({half} of {replies} where all do); {few}",
            "trimmed": f"a share {self.trim:g} of those that hold an entry may lie, at least one "
            f"({out} of {replies} where all do); {few}",
            "aligned": "fewer than half of those that hold an entry may lie "
            f"({half} of {replies} where all do): no reply moves the weights further than the "
            f"median one, and whose step does not point its way is left out; {few}",
            "krum": f"a share {self.trim:g} of the replies may lie, at least one ({out} of "
            f"{replies}, and more than twice as many and two must answer); {few}",
        }[self.rule]

    def news(self) -> list[str]:
        """After the first merges, once: the share of entries that too few held."""
        if self._told or not self._held or self.rule == "clipped":
            return []
        self._told = True
        return [
            f"server.merge = {self.rule}: {self._thin / self._held:.0%} of the entries that "
            f"somebody held were held by fewer than {ENOUGH}; for them it is the clipped mean"
        ]

    def _chosen(self, reference: Mapping[str, Tensor], given: Sequence[Contribution]) -> list[bool]:
        """Which replies count as wholes."""
        if self.rule not in WHOLES or len(given) < ENOUGH:
            return [True] * len(given)
        if self.rule == "aligned":
            return agreeing(alignment(reference, given))
        return nearest(distances(reference, given), _left_out(self.trim, len(given)))

    def _told_stay(self, values: Tensor, steps: Tensor, flags: Tensor) -> list[bool]:
        """Which rows count as wholes. Statistics and logits have a zero of their own: which way
        they point is seen from there, where the lie does not hide in how little others moved."""
        if self.rule not in WHOLES or len(steps) < ENOUGH:
            return [True] * len(steps)
        if self.rule == "aligned":
            zeroed = torch.where(flags, values, 0.0)
            return agreeing(_cosines(_products(zeroed, flags, _most_holders(flags))))
        apart = _mean_apart(*_apart(steps, flags.to(torch.float64)))
        return nearest(apart, _left_out(self.trim, len(apart)))

    def _merge_tensor(
        self,
        name: str,
        old: Tensor,
        given: Sequence[Contribution],
        scales: Sequence[float],
        chosen: Sequence[bool],
    ) -> Tensor:
        own = [k for k, c in enumerate(given) if name in c.view.shapes]
        if not own:
            return old.clone()
        base = old.to(torch.float64)
        values, held = spread_out(name, old, [given[k] for k in own])
        # An unclipped reply is taken as it is: from its step it would come back rounded.
        clipped = torch.stack(
            [
                v if scales[k] == 1 else base + scales[k] * (v - base)
                for k, v in zip(own, values, strict=True)
            ]
        )
        taken = held & _rowwise([chosen[k] for k in own], held)
        merged = self._decided(values, clipped, held, taken, base)
        return merged.to(old.dtype) if old.is_floating_point() else merged.round().to(old.dtype)

    def _decided(
        self, values: Tensor, clipped: Tensor, held: Tensor, taken: Tensor, base: Tensor
    ) -> Tensor:
        """The rule where enough clients hold an entry, the mean of what is clipped elsewhere."""
        merged = _mean(clipped, taken, base)
        if self.rule == "clipped":
            return merged
        if self.rule == "aligned":
            self._count(held.sum(0), held.sum(0) >= ENOUGH)
            return merged
        holders = held.sum(0)
        enough = holders >= ENOUGH
        self._count(holders, enough)
        return torch.where(enough, self._voted(values, held, taken, base), merged)

    def _voted(self, values: Tensor, held: Tensor, taken: Tensor, base: Tensor) -> Tensor:
        """What the rule makes of entries that enough clients hold."""
        if self.rule == "krum":
            return _mean(values, taken, base)
        holders = held.sum(0)
        most = (holders - 1).clamp(min=0) // 2
        if self.rule == "median":
            return middle(values, held, most)
        out = (holders * self.trim + 1e-9).floor().to(most.dtype)
        return middle(values, held, torch.minimum(out.clamp(min=1), most))

    def _count(self, holders: Tensor, enough: Tensor) -> None:
        if not self._told:
            self._held += int((holders > 0).sum())
            self._thin += int(((holders > 0) & ~enough).sum())


def clip_scales(reference: Mapping[str, Tensor], given: Sequence[Contribution]) -> list[float]:
    """What each reply's step is multiplied by: 1 up to the median length, of two middle ones the
    shorter."""
    return _scales([_length(reference, c) for c in given])


def _scales(lengths: Sequence[float]) -> list[float]:
    limit = sorted(lengths)[(len(lengths) - 1) // 2]
    return [1.0 if length <= limit else limit / length for length in lengths]


def _length(reference: Mapping[str, Tensor], c: Contribution) -> float:
    """The root mean square of a reply's step over the entries that count."""
    squares, entries = 0.0, 0
    for name, old in reference.items():
        if name in c.view.shapes and old.is_floating_point():
            step = c.state[name].to(torch.float64) - c.view.cut(name, old).to(torch.float64)
            flags = counting(c, name)
            step = step if flags is None else step[flags]
            squares, entries = squares + float(step.square().sum()), entries + step.numel()
    return (squares / max(entries, 1)) ** 0.5


def spread_out(name: str, old: Tensor, given: Sequence[Contribution]) -> tuple[Tensor, Tensor]:
    """What each contribution says of a tensor, in the reference's shape, and flags of what it
    holds."""
    values = torch.zeros((len(given), *old.shape), dtype=torch.float64, device=old.device)
    held = torch.zeros(values.shape, dtype=torch.bool, device=old.device)
    for k, c in enumerate(given):
        local, flags = c.state[name].to(torch.float64), counting(c, name)
        flags = torch.ones_like(local, dtype=torch.bool) if flags is None else flags
        # Where an entry does not count it may hold anything.
        put(values[k], c.view.where(name), torch.where(flags, local, 0.0))
        put(held[k], c.view.where(name), flags)
    return values, held


def middle(values: Tensor, held: Tensor, out: Tensor) -> Tensor:
    """Per entry, the mean of the values held without the `out` smallest and the `out` largest."""
    ordered = torch.where(held, values, torch.inf).sort(0).values
    rank = torch.arange(len(values), device=values.device).view(-1, *[1] * (values.dim() - 1))
    kept = (rank >= out) & (rank < held.sum(0) - out)
    return torch.where(kept, ordered, 0.0).sum(0) / kept.sum(0)


def distances(reference: Mapping[str, Tensor], given: Sequence[Contribution]) -> Tensor:
    """The mean squared difference of every two replies over the entries that both hold; infinite
    where they have none in common, and to oneself."""
    place = next((old.device for old in reference.values()), None)
    apart = torch.zeros((len(given), len(given)), dtype=torch.float64, device=place)
    common = torch.zeros_like(apart)
    for name, old in reference.items():
        own = [k for k, c in enumerate(given) if name in c.view.shapes]
        if own and old.is_floating_point():
            values, held = spread_out(name, old, [given[k] for k in own])
            # From the weights that were given: small numbers, of which little is lost in squares.
            steps = torch.where(held, values - old, 0.0).flatten(1)
            squares, both = _apart(steps, held.flatten(1).to(torch.float64))
            at = torch.tensor(own, device=place)
            apart[at[:, None], at] += squares
            common[at[:, None], at] += both
    return _mean_apart(apart, common)


def alignment(reference: Mapping[str, Tensor], given: Sequence[Contribution]) -> Tensor:
    """The cosine between every reply's step and the median one, over the entries that it and the
    most others hold: at least half as many as hold any entry of it, and three. Liars that are a
    few among all may be most of those with the largest pieces, and would be the median there."""
    place = next((old.device for old in reference.values()), None)
    most = torch.zeros(len(given), dtype=torch.float64, device=place)
    products = torch.zeros((3, len(given)), dtype=torch.float64, device=place)
    kept = []
    for name, old in reference.items():
        own = [k for k, c in enumerate(given) if name in c.view.shapes]
        if own and old.is_floating_point():
            values, held = spread_out(name, old, [given[k] for k in own])
            at = torch.tensor(own, device=place)
            kept.append((at, torch.where(held, values - old, 0.0), held))
            most[at] = torch.maximum(most[at], _most_holders(held))
    for at, steps, held in kept:
        products[:, at] += _products(steps, held, most[at])
    return _cosines(products)


def _most_holders(held: Tensor) -> Tensor:
    """Of every row, how many hold the entry of it that the most hold."""
    return (held * held.sum(0)).flatten(1).amax(1).to(torch.float64)


def _products(steps: Tensor, held: Tensor, most: Tensor) -> Tensor:
    """Of every row and the median one the product, and that of each with itself, where at least
    half of `most` hold an entry, and enough. What a row does not hold is zero."""
    holders = held.sum(0)
    way = torch.where(holders >= ENOUGH, middle(steps, held, (holders - 1).clamp(min=0) // 2), 0.0)
    judged = held & (2 * holders >= _rowwise(most, steps)) & (holders >= ENOUGH)
    ways = way.expand_as(steps)
    return torch.stack(
        [
            torch.where(judged, one * other, 0.0).flatten(1).sum(1)
            for one, other in ((steps, ways), (steps, steps), (ways, ways))
        ]
    )


def _cosines(products: Tensor) -> Tensor:
    both, own, way = products
    return both / (own * way).sqrt().clamp(min=1e-300)


def agreeing(cosines: Tensor) -> list[bool]:
    """Which replies point the way of the median one, and by at least a third as much as half of
    them do; all of them if none does."""
    stay = cosines > (cosines.median() / 3).clamp(min=0)
    return (stay if bool(stay.any()) else torch.ones_like(stay)).tolist()


def _apart(steps: Tensor, flags: Tensor) -> tuple[Tensor, Tensor]:
    """Of every two rows the squared difference, summed over what both hold, and how much that
    is. What a row does not hold is zero."""
    squares = steps.square() @ flags.T
    return squares + squares.T - 2 * steps @ steps.T, flags @ flags.T


def _mean_apart(squares: Tensor, common: Tensor) -> Tensor:
    mean = torch.where(common > 0, squares.clamp(min=0) / common, torch.inf)
    return ((mean + mean.T) / 2).fill_diagonal_(torch.inf)


def _rowwise(values: Sequence[bool] | Tensor, like: Tensor) -> Tensor:
    """One value per row, in a shape that spreads over the row."""
    return torch.as_tensor(values, device=like.device).view(-1, *[1] * (like.dim() - 1))


def nearest(apart: Tensor, out: int) -> list[bool]:
    """Multi-krum: which replies stay when the `out` are left out whose mean distance from their
    n − out − 2 nearest is greatest. Equal ones stay together."""
    count = len(apart)
    near = apart.sort(1).values[:, : max(1, count - out - 2)]
    known = near.isfinite()
    sums = torch.where(known, near, 0.0).sum(1) / known.sum(1)
    scores = torch.where(known.any(1), sums, torch.inf)
    limit = scores.sort().values[count - out - 1]
    return (scores <= limit * (1 + 1e-9)).tolist()


def _left_out(share: float, count: int) -> int:
    """So many of `count`, at least one, and never half of them."""
    return min(max(1, int(share * count + 1e-9)), max(0, (count - 1) // 2))


def _mean(values: Tensor, held: Tensor, base: Tensor) -> Tensor:
    total, count = torch.where(held, values, 0.0).sum(0), held.sum(0)
    return torch.where(count > 0, total / count, base)

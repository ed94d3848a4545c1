"""Who takes part: tiers of devices, who is reachable this round, and how much memory is free on it.

Nothing is stored for a device. Its tier follows from its number by arithmetic, and whatever is
random about it is a hash of (seed, purpose, device, round), so a fleet of a million costs what the
sampled ones cost.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, count
from statistics import NormalDist
from typing import ClassVar

import numpy as np

from nestling.devices.catalogue import REFERENCE, Profile
from nestling.devices.tiers import (
    DEFAULT_TIERS,
    FleetConfig,
    Tier,
    check_fleet,
    devices_of,
    read_fleet,
    size_of,
)
from nestling.errors import InputError, unknown
from nestling.seeds import derive, numbers, stream

GOLDEN = (math.sqrt(5) - 1) / 2
DRAWS = 200_000  # the most devices `choose` looks at beyond a multiple of what was asked for
CHUNK = 1024  # draws made at once
NORMAL = NormalDist()
FEW = 4096  # up to so many devices it is faster to shuffle all of them than to draw some


class Fleet:
    """`size` devices numbered from 0, laid out over the tiers. Make one with `make_fleet`."""

    # whether its devices are real and say themselves what memory is free
    live: ClassVar[bool] = False

    def __init__(
        self,
        tiers: Sequence[Tier],
        counts: Sequence[int],
        profiles: Sequence[Profile],
        deadline: float,
        seed: int,
    ) -> None:
        """Takes `counts` devices of each tier, and finds the stride that scatters the tiers over
        the numbers."""
        self.tiers, self.counts, self.profiles = tuple(tiers), tuple(counts), tuple(profiles)
        self.deadline, self.seed = deadline, seed
        self.size = sum(counts)
        self._any_drops, self._any_slow = any(t.dropout for t in tiers), any(t.slow for t in tiers)
        self._all_there = all(t.availability >= 1 for t in tiers)
        self._ends = list(accumulate(counts))
        # Steps of the golden ratio spread every tier evenly over the numbers, whatever the tiers'
        # sizes.
        near = max(1, round(self.size * GOLDEN))
        self._stride = next(step for step in count(near) if math.gcd(step, self.size) == 1)
        self._shift = derive(seed, "fleet layout") % self.size

    def __len__(self) -> int:
        """How many devices there are."""
        return self.size

    def tier_index(self, i: int) -> int:
        """The number of device `i`'s tier."""
        if not 0 <= i < self.size:
            raise IndexError(f"device {i} of a fleet of {self.size}")
        return bisect_right(self._ends, (self._stride * i + self._shift) % self.size)

    def tier_of(self, i: int) -> Tier:
        """Device `i`'s tier."""
        return self.tiers[self.tier_index(i)]

    def profile_of(self, i: int) -> Profile:
        """Device `i`'s hardware; the neutral reference where its tier names none."""
        return self.profiles[self.tier_index(i)]

    def count_of(self, tier: int | str | Tier) -> int:
        """How many devices a tier has."""
        return self.counts[self._place(tier)]

    def member(self, tier: int | str | Tier, k: int) -> int:
        """The k-th device of a tier, for picking from a tier without listing it."""
        place = self._place(tier)
        if not 0 <= k < self.counts[place]:
            raise IndexError(
                f"device {k} of the {self.counts[place]} of tier {self.tiers[place].name!r}"
            )
        position = self._ends[place] - self.counts[place] + k
        return (position - self._shift) * pow(self._stride, -1, self.size) % self.size

    def _place(self, tier: int | str | Tier) -> int:
        if isinstance(tier, int):
            return range(len(self.tiers))[tier]
        name = tier.name if isinstance(tier, Tier) else tier
        names = [one.name for one in self.tiers]
        if name not in names:
            raise unknown("tier", name, names, field="fleet.tiers")
        return names.index(name)

    def available(self, i: int, round: int) -> bool:
        """Whether device `i` can be reached in this round."""
        return self._all_there or self._happens("available", self.tier_of(i).availability, i, round)

    def drops(self, i: int, round: int) -> bool:
        """Whether device `i` vanishes in the middle of this round."""
        return self._any_drops and self._happens("drops", self.tier_of(i).dropout, i, round)

    def free_memory(self, i: int, round: int) -> float:
        """Percent free on device `i` now: of its RAM, or of the full model's size where its tier
        names no device."""
        tier = self.tier_of(i)
        kinds = tier.memory_std
        std = kinds[derive(self.seed, "memory std", i) % len(kinds)] if len(kinds) > 1 else kinds[0]
        return max(
            0.0, tier.memory_mean - (abs(std * self._normal("memory", i, round)) if std else 0.0)
        )

    @property
    def steady(self) -> bool:
        """Whether no device ever slows down by chance."""
        return not self._any_slow

    def slowdown(self, i: int, round: int) -> float:
        """The factor on device `i`'s time in this round: log-normal with median 1."""
        sigma = self._any_slow and self.tier_of(i).slow
        return math.exp(sigma * self._normal("slowdown", i, round)) if sigma else 1.0

    def choose(self, round: int, n: int) -> list[int]:
        """`n` distinct reachable devices, uniformly drawn, in order; fewer (or none) when no more
        were found."""
        if n < 0:
            raise InputError(f"{n} devices", field="n", fix="choose at least 0")
        found: list[int] = []
        if n == 0:
            return found
        for candidate in (
            self._few_shuffled(round) if self.size <= FEW else self._shuffled(round, n)
        ):
            if self.available(candidate, round):
                found.append(candidate)
                if len(found) == n:
                    break
        return sorted(found)

    def _few_shuffled(self, round: int) -> list[int]:
        """All numbers of a small fleet in random order."""
        return (
            numbers(derive(self.seed, "choose", round), np.arange(self.size, dtype=np.uint64))
            .argsort(kind="stable")
            .tolist()
        )

    def _shuffled(self, round: int, n: int) -> Iterator[int]:
        """All numbers in random order, of which only the touched ones ever exist; as many as `n`
        reachable ones may need."""
        rng, moved, limit = stream(self.seed, "choose", round), dict[int, int](), self._draws(n)
        for start in range(0, limit, CHUNK):
            steps = np.arange(start, min(start + CHUNK, limit))
            # Many draws in one call: the generator is the same, and a call costs as much as a
            # hundred draws.
            for step, other in zip(
                steps.tolist(), rng.integers(steps, self.size).tolist(), strict=True
            ):
                yield moved.get(other, other)
                moved[other] = moved.pop(step, step)

    def _draws(self, n: int) -> int:
        """How many devices to look at for `n` reachable ones: many times the expected number, but
        bounded."""
        reachable = (
            sum(
                many * tier.availability for many, tier in zip(self.counts, self.tiers, strict=True)
            )
            / self.size
        )
        if not n or not reachable:
            return 0
        return min(self.size, 8 * n + math.ceil(min(DRAWS, 8 * (n + 8) / reachable)))

    def _happens(self, purpose: str, probability: float, i: int, round: int) -> bool:
        # What is certain needs no hash, and most tiers are certain.
        return probability >= 1 or (
            probability > 0 and self._uniform(purpose, i, round) < probability
        )

    def _uniform(self, purpose: str, i: int, round: int) -> float:
        return derive(self.seed, purpose, i, round) / 2**63

    def _normal(self, purpose: str, i: int, round: int) -> float:
        return NORMAL.inv_cdf((derive(self.seed, purpose, i, round) + 0.5) / 2**63)


def make_fleet(config: FleetConfig, seed: int) -> Fleet:
    """The fleet a configuration describes, after checking it."""
    if config.path:
        if config.tiers:
            raise InputError(
                "both a file and tiers are given", field="fleet.path", fix="keep one of them"
            )
        config = read_fleet(config.path, config)
    check_fleet(config)
    tiers = config.tiers or DEFAULT_TIERS
    devices = devices_of(config)
    profiles = [devices[tier.device or REFERENCE] for tier in tiers]
    return Fleet(tiers, _counts(tiers, size_of(config)), profiles, float(config.deadline), seed)


def _counts(tiers: Sequence[Tier], size: int) -> list[int]:
    """Whole devices per tier: counts as given, or shares rounded down with the rest going to the
    largest remainders."""
    if any(tier.count for tier in tiers):
        return [tier.count for tier in tiers]
    shares = [tier.share for tier in tiers] if len(tiers) > 1 else [1.0]
    exact = [share / math.fsum(shares) * size for share in shares]
    counts = [math.floor(value + 1e-6) for value in exact]
    by_remainder = sorted(range(len(tiers)), key=lambda place: counts[place] - exact[place])
    for place in by_remainder[: size - sum(counts)]:
        counts[place] += 1
    return counts

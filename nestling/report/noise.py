"""Whether one setting is better than another, or whether their seeds merely fell that way.

Runs of two settings with the same seed are a pair: the split and the first weights are the same in
both, so that their difference is less noisy than either. If nothing but chance told the two apart,
each difference might as well have the other sign; the share of all such choices of signs whose mean
is as large as the one seen is the p of the exact test. With n seeds it cannot be below 2 / 2^n: six
are the fewest that can pass 5 %.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.05
FEWEST = 6
"""Fewer seeds cannot reach the level, whatever they find."""
_EXACT = 16
_DRAWS = 2**14
_Z_LEVEL, _Z_POWER = 1.959964, 0.841621  # 5 % on two sides, found four times in five

CLEAR, LIKELY, NOISE, UNKNOWN = "clear", "likely", "noise", "unknown"


@dataclass(frozen=True)
class Gap:
    """By how much one setting is above another, over the seeds that both have.

    verdict: clear (the exact test passes 5 %), likely (too few seeds for that, but all of them
             agree, by more than they differ), noise, or unknown (fewer than two seeds in common).
    needed:  seeds that would tell a gap like this in four cases of five; None where there is none.
    """

    seeds: int
    mean: float
    ahead: int
    p: float
    needed: int | None
    verdict: str


def gap(one: Mapping[int, float], other: Mapping[int, float]) -> Gap:
    """The gap between two settings, each a value by seed."""
    shared = sorted(set(one) & set(other))
    differences = [one[seed] - other[seed] for seed in shared]
    if not shared:
        return Gap(0, math.nan, 0, 1.0, None, UNKNOWN)
    mean = statistics.fmean(differences)
    ahead = sum(difference > 0 for difference in differences)
    p = exact_p(differences)
    needed = seeds_needed(differences) if len(shared) > 1 else None
    return Gap(len(shared), mean, ahead, p, needed, _verdict(differences, p))


def exact_p(differences: Sequence[float]) -> float:
    """The share of choices of signs whose mean is at least as far from zero as that of the
    differences; all choices of up to 16 signs, 16 384 drawn ones beyond, always the same."""
    seen = abs(sum(differences))
    sums = _all_sums(differences) if len(differences) <= _EXACT else _drawn_sums(differences)
    # sums of the same numbers in another order may differ by rounding
    return sum(abs(total) >= seen - 1e-9 for total in sums) / len(sums)


def _all_sums(differences: Sequence[float]) -> list[float]:
    sums = [0.0]
    for value in differences:
        sums = [total + value for total in sums] + [total - value for total in sums]
    return sums


def _drawn_sums(differences: Sequence[float]) -> list[float]:
    signs = random.Random(0)
    return [sum(signs.choice((-d, d)) for d in differences) for _ in range(_DRAWS)]


def seeds_needed(differences: Sequence[float]) -> int | None:
    """How many seeds would find a gap like this, with a spread like this, four times in five."""
    mean, spread = statistics.fmean(differences), statistics.stdev(differences)
    if mean == 0:
        return None
    ratio = spread / abs(mean)
    # the last term is what the spread's being unknown costs
    wanted = ((_Z_LEVEL + _Z_POWER) * ratio) ** 2 + _Z_LEVEL**2 / 2
    return max(FEWEST, math.ceil(wanted))


def _verdict(differences: Sequence[float], p: float) -> str:
    if len(differences) < 2:
        return UNKNOWN
    if p <= LEVEL:
        return CLEAR
    agree = all(d > 0 for d in differences) or all(d < 0 for d in differences)
    wide = abs(statistics.fmean(differences)) > statistics.stdev(differences)
    return LIKELY if len(differences) < FEWEST and agree and wide else NOISE


def sentence(found: Gap, better: str, worse: str) -> str:
    """What is to be said of a gap."""
    if not found.seeds:
        return f"{better} and {worse} have no seed in common: how far they are apart is not known."
    by = f"{better} is {100 * abs(found.mean):.2f} points above {worse}"
    if found.seeds == 1:
        return (
            f"{by} in the one seed that both have: one seed cannot tell a difference from noise "
            f"(run at least {FEWEST})."
        )
    p = f"exact test over {found.seeds} pairs, p = {found.p:.2g}"
    if found.verdict == CLEAR:
        return f"{by}, ahead in {found.ahead} of {found.seeds} seeds: more than noise ({p})."
    if found.verdict == LIKELY:
        return (
            f"{by} in all {found.seeds} seeds, which is more than these differ; so few seeds prove "
            f"nothing ({p}): about {found.needed} would."
        )
    if found.mean == 0:
        return f"{better} and {worse} are equal in the mean of {found.seeds} seeds."
    return (
        f"{by}, ahead in {found.ahead} of {found.seeds} seeds: inside the noise ({p}); to tell a "
        f"gap like this takes about {found.needed} seeds."
    )

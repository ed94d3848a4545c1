"""The Gaussian mechanism: how much noise a privacy budget (ε, δ) asks for, and what budget noise has spent.

A value whose L2 norm changes by at most S between neighbouring data sets, released with Gaussian noise of standard deviation σ·S, is
(ε, δ)-private exactly where δ ≥ Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) with μ = 1/σ (Balle and Wang, "Improving the Gaussian Mechanism for
Differential Privacy", ICML 2018). Unlike σ = √(2 ln(1.25/δ))/ε this holds for every ε. Releases add up in μ²: k of them with noise of
σ each, chosen in the light of one another or not, are one release with μ = √k/σ (Dong et al., "Gaussian Differential Privacy", 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


def multiplier(epsilon: float, delta: float) -> float:
    """σ: the smallest noise, in units of the sensitivity, with which one release is (ε, δ)-private."""
    return 1 / _last(lambda mu: leaks(mu, epsilon) <= delta)


def spent(sigma: float, delta: float, releases: int = 1) -> float:
    """ε: what so many releases with noise σ, in units of the sensitivity, have spent at δ."""
    if releases == 0:
        return 0.0
    if sigma <= 0:
        return math.inf
    mu = math.sqrt(releases) / sigma
    return _last(lambda epsilon: leaks(mu, epsilon) > delta)


def leaks(mu: float, epsilon: float) -> float:
    """δ: the smallest with which a release of μ is (ε, δ)-private."""
    first, second = torch.special.log_ndtr(
        torch.tensor([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu], dtype=torch.float64)
    ).tolist()
    return math.exp(first) - math.exp(min(epsilon + second, first))


def _last(holds: Callable[[float], bool]) -> float:
    """The largest number for which a condition holds that is true of small positive numbers and false of large ones."""
    low, high = 1e-9, 1.0
    while holds(high):
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low

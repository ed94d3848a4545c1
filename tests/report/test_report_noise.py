"""What two settings' seeds can and cannot tell."""

from __future__ import annotations

from itertools import product
from statistics import fmean

import numpy as np
import pytest

from nestling.report.noise import (
    CLEAR,
    LIKELY,
    NOISE,
    UNKNOWN,
    exact_p,
    gap,
    seeds_needed,
    sentence,
)


def by_seed(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


def test_the_exact_test_counts_all_choices_of_signs() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, 5, 8):
        values = rng.normal(0.3, 1, count).tolist()
        seen = abs(fmean(values))
        choices = [
            abs(fmean(s * v for s, v in zip(signs, values, strict=True)))
            for signs in product((1, -1), repeat=count)
        ]
        assert exact_p(values) == pytest.approx(
            sum(mean >= seen - 1e-12 for mean in choices) / len(choices)
        )
    assert exact_p([0.1] * 6) == pytest.approx(2 / 64) and exact_p([0.0, 0.0]) == 1


def test_many_seeds_are_tested_with_drawn_signs_the_same_way_every_time() -> None:
    values = np.random.default_rng(1).normal(0.5, 1, 24).tolist()
    assert exact_p(values) == exact_p(values)
    assert exact_p([1.0] * 24) < 1e-3 and exact_p([1.0, -1.0] * 12) == 1


def test_verdicts() -> None:
    base = by_seed(*[0.9] * 8)
    assert gap(by_seed(*[0.91, 0.92] * 4), base).verdict == CLEAR
    assert gap(by_seed(0.91, 0.92, 0.92), base).verdict == LIKELY
    assert gap(by_seed(0.91, 0.95, 0.89), base).verdict == NOISE
    assert gap(by_seed(0.901, 0.95, 0.901), base).verdict == NOISE
    assert gap(by_seed(0.99), base).verdict == UNKNOWN
    assert gap({7: 0.9}, {8: 0.9}).seeds == 0


def test_pairs_are_of_the_same_seed() -> None:
    one, other = {0: 0.5, 1: 0.9, 2: 0.7}, {2: 0.69, 1: 0.89, 0: 0.49, 9: 0.1}
    found = gap(one, other)
    assert found.seeds == 3 and found.mean == pytest.approx(0.01) and found.verdict == LIKELY


def test_so_many_seeds_find_the_gap_four_times_in_five() -> None:
    rng = np.random.default_rng(2)
    for ratio in (0.8, 1.2):
        shape = np.array([-1.0, 0.0, 1.0])  # of mean 0 and standard deviation 1
        needed = seeds_needed((shape * ratio + 1).tolist())
        assert needed is not None
        found = [exact_p(rng.normal(1, ratio, needed).tolist()) <= 0.05 for _ in range(400)]
        assert 0.7 < np.mean(found) < 0.92
    assert seeds_needed([0.1, -0.1]) is None and seeds_needed([0.1, 0.1]) == 6


def test_sentences_say_what_is_known() -> None:
    base = by_seed(0.9, 0.9, 0.9)
    noisy = sentence(gap(by_seed(0.91, 0.95, 0.89), base), "A", "B")
    assert "A is 1.67 points above B, ahead in 2 of 3 seeds: inside the noise" in noisy
    assert "p = 0.75" in noisy and "seeds." in noisy
    assert "so few seeds prove nothing" in sentence(gap(by_seed(0.91, 0.92, 0.92), base), "A", "B")
    assert "one seed cannot tell" in sentence(gap({0: 0.91}, base), "A", "B")
    assert "no seed in common" in sentence(gap({4: 0.91}, base), "A", "B")
    assert "are equal" in sentence(gap(base, base), "A", "B")

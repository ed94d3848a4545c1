from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from nestling.report.words import (
    DASH,
    duration,
    energy,
    in_a_sentence,
    memory,
    number,
    percent,
    plural,
    short,
    traffic,
    whole,
)


@pytest.mark.parametrize("value", [None, "12", True, math.nan, math.inf, [], 10**400])
def test_what_is_no_finite_number_is_a_dash(value: object) -> None:
    assert number(value) is None
    assert {form(value) for form in (percent, whole, short, traffic, memory, energy, duration)} == {
        DASH
    }


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (percent, 0.98123, "98.1%"),
        (whole, 60000, "60,000"),
        (short, 56_000, "56 k"),
        (short, 999_990, "1 M"),
        (traffic, 0, "0 B"),
        (traffic, 999, "999 B"),
        (traffic, 1_234_567, "1.2 MB"),
        (traffic, 999_999, "1 MB"),
        (memory, 131_072, "128 KB"),
        (memory, 4 * 2**30, "4 GB"),
        (energy, 0.0042, "4.2 mJ"),
        (energy, 0.31, "0.31 J"),
        (energy, 17_600, "17.6 kJ"),
        (duration, 0, "0 s"),
        (duration, 0.012, "12 ms"),
        (duration, 0.8, "0.8 s"),
        (duration, 59.97, "1 min"),
        (duration, 310, "5 min 10 s"),
        (duration, 3599.6, "1 h"),
        (duration, 11_100, "3 h 5 min"),
        (duration, 187_200, "2 d 4 h"),
    ],
)
def test_numbers_read_as_people_write_them(
    form: Callable[[object], str], value: float, text: str
) -> None:
    assert form(value) == text


def test_one_is_singular() -> None:
    assert (plural(1, "device"), plural(2, "device"), plural(0, "class", "classes")) == (
        "1 device",
        "2 devices",
        "0 classes",
    )


def test_abbreviations_stay_large() -> None:
    said = [in_a_sentence(words) for words in ("Test loss", "AUROC")]
    assert said == ["test loss", "AUROC"]

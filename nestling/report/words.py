"""Numbers as people read them. Every function takes what a JSON file may hold and answers a dash
for what is not a number."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from nestling.runfiles import number as as_it_is

DASH = "–"


def number(value: object) -> float | None:
    """`value` as a finite float; None for null, text, booleans, and the NaN of a run that
    diverged."""
    found = as_it_is(value)
    return None if found is None else float(found)


def capital(word: str) -> str:
    """A word with its first letter large and the others as they are."""
    return f"{word[:1].upper()}{word[1:]}"


def in_a_sentence(words: str) -> str:
    """A heading as it stands in the middle of a sentence: "Macro F1" as "macro F1", "AUROC" as it
    is."""
    return words if words[:2].isupper() else f"{words[:1].lower()}{words[1:]}"


def percent(value: object, places: int = 1) -> str:
    """0.9812 as "98.1%"."""
    found = number(value)
    return DASH if found is None else f"{100 * found:.{places}f}%"


def mean_and_spread(values: Sequence[float], sign: str = "") -> str:
    """Shares in points: their mean, with ± their standard deviation (n - 1) where there are
    several."""
    around = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):{sign}.2f}{around}"


def whole(value: object) -> str:
    """60000 as "60,000"."""
    found = number(value)
    return DASH if found is None else f"{found:,.0f}"


def decimal(value: object) -> str:
    """A plain figure with four significant digits: a loss, a factor."""
    found = number(value)
    return DASH if found is None else f"{found:.4g}"


def short(value: object) -> str:
    """56000 as "56 k"."""
    found = number(value)
    return DASH if found is None else _scaled(found, 1000, ("", "k", "M", "G", "T"))


def traffic(value: object) -> str:
    """Bytes on a wire, in powers of 1000: "1.2 MB"."""
    found = number(value)
    return DASH if found is None else _scaled(found, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))


def memory(value: object) -> str:
    """Bytes of RAM or flash, in powers of 1024 as datasheets have it: "128 KB"."""
    found = number(value)
    return DASH if found is None else _scaled(found, 1024, ("B", "KB", "MB", "GB", "TB"))


def energy(value: object) -> str:
    """Joules: "0.3 J", "42 mJ", "1.2 kJ"."""
    found = number(value)
    if found is None:
        return DASH
    if 0 < abs(found) < 0.1:
        return _scaled(found * 1e6, 1000, ("µJ", "mJ", "J"))
    return _scaled(found, 1000, ("J", "kJ", "MJ", "GJ"))


def duration(value: object) -> str:
    """Seconds: "12 ms", "1.2 s", "5 min 10 s", "3 h 5 min", "2 d 4 h"."""
    found = number(value)
    if found is None:
        return DASH
    if 0 < abs(found) < 0.1:
        return _scaled(found * 1e6, 1000, ("µs", "ms", "s"))
    if found < 59.95:
        return f"{_figures(found)} s"
    for big, small, step, name, rest in (
        (3600, 60, 60, "min", "s"),
        (86400, 3600, 60, "h", "min"),
        (math.inf, 86400, 24, "d", "h"),
    ):
        units = round(found / (small / step))
        if units * (small / step) < big:
            return f"{units // step:,} {name}" + (f" {units % step} {rest}" if units % step else "")
    return DASH


def plural(count: object, one: str, many: str | None = None) -> str:
    """`plural(2, "device")` is "2 devices"."""
    return f"{whole(count)} {one if number(count) == 1 else many or one + 's'}"


def _scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    size = 0
    while abs(round(value, 1)) >= step and size < len(units) - 1:
        value, size = value / step, size + 1
    return f"{_figures(value)} {units[size]}".rstrip()


def _figures(value: float) -> str:
    """At most one decimal, and none where it would be a zero or the number is large anyway."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}".removesuffix(".0") if abs(value) >= 0.95 or value == 0 else f"{value:.2g}"

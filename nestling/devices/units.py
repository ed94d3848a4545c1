"""Quantities as people write them ("128 KB", "64 MHz", "115.2 kbit/s") and back."""

from __future__ import annotations

import math

from nestling.errors import InputError

KB, MB, GB = 1024, 1024**2, 1024**3

UNITS: dict[str, dict[str, float]] = {
    "bytes": {"B": 1, "KB": KB, "MB": MB, "GB": GB},
    "hertz": {"Hz": 1, "kHz": 1e3, "MHz": 1e6, "GHz": 1e9},
    "bits a second": {"bit/s": 1, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9},
    "watts": {"W": 1, "mW": 1e-3, "uW": 1e-6},
    "MACs a second": {"MAC/s": 1, "kMAC/s": 1e3, "MMAC/s": 1e6, "GMAC/s": 1e9, "TMAC/s": 1e12},
    "number": {},
}


def quantity(raw: object, dimension: str, field: str) -> float:
    """`raw` in the base unit of `dimension` (a key of `UNITS`); a bare number is already in the
    base unit."""
    units = UNITS[dimension]
    example = f'write it like "2 {list(units)[-2]}"' if units else "write a number"
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise InputError(f"{raw!r} is not a quantity of {dimension}", field=field, fix=example)
    number, _, unit = raw.strip().partition(" ") if isinstance(raw, str) else (str(raw), "", "")
    unit = unit.strip()
    if unit and unit not in units:
        allowed = ", ".join(units) or "none"
        raise InputError(
            f"unknown unit {unit!r} in {raw!r}",
            field=field,
            fix=f"units of {dimension}: {allowed}; {example}",
        )
    try:
        value = float(number) * units.get(unit, 1)
    except ValueError:
        raise InputError(
            f"{raw!r} is not a quantity of {dimension}", field=field, fix=example
        ) from None
    if not math.isfinite(value) or value < 0:
        raise InputError(f"{raw!r} is not a finite number of at least 0", field=field, fix=example)
    return value


def show_bytes(count: float) -> str:
    """1536 -> "1.5 KB"."""
    for unit, size in (("GB", GB), ("MB", MB), ("KB", KB)):
        if abs(count) >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:.0f} B"


def show_number(value: float, unit: str) -> str:
    """Three significant digits and an SI prefix: 0.0123, "s" -> "12.3 ms"."""
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3), ("u", 1e-6)):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"

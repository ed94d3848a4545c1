"""What the dimensions of a sample are. Where type and shape leave two readings open the rows are
refused: a picture that is read as a sequence trains, and nobody sees why it learns so little."""

from __future__ import annotations

import numpy as np

from nestling.data.recipe import AUTO, RawRows
from nestling.errors import InputError

_DIMENSIONS = {"f": 2, "tokens": 2, "lc": 3, "cl": 3, "hw": 3, "hwc": 4, "chw": 4}
_PICTURE = (1, 3, 4)  # channels that pictures usually have


def arranged(raw: RawRows, layout: str) -> tuple[np.ndarray, str]:
    """The samples with their channels first, and the layout they were in. `layout` is the user's
    word; where that is auto the door's counts, and where there is none, type and shape."""
    x = raw.x
    if x.dtype.kind not in "biuf":
        raise raw.bad(f"x has type {x.dtype}", "give numbers")
    if x.ndim not in (2, 3, 4):
        raise raw.bad(
            f"x has shape {x.shape}",
            "give (N, F) vectors, (N, L, C) sequences, or (N, H, W) or (N, H, W, C) images",
        )
    if x.size == 0:
        raise raw.bad(f"x is empty: {x.shape}", "give at least one row with at least one value")
    chosen = next((one for one in (layout, raw.layout) if one != AUTO), "") or _guessed(raw)
    if _DIMENSIONS[chosen] != x.ndim:
        raise InputError(
            f"{raw.where}: x has shape {x.shape}, and {chosen!r} has {_DIMENSIONS[chosen]} "
            "dimensions, that of the rows included",
            field="data.layout",
            fix="name another layout, or leave it out",
        )
    if chosen == "hw":
        return x[:, None], chosen
    if chosen in ("lc", "hwc"):
        return np.moveaxis(x, -1, 1), chosen
    return (_ids(raw), chosen) if chosen == "tokens" else (x, chosen)


def _guessed(raw: RawRows) -> str:
    x = raw.x
    if x.ndim == 2:
        if x.dtype.kind in "iu" and x.dtype != np.uint8:
            raise _unclear(raw, "features (numbers to scale)", "f", "token ids", "tokens")
        return "f"
    return _guessed_3d(raw, *x.shape[1:]) if x.ndim == 3 else _guessed_4d(raw, *x.shape[1:])


def _guessed_3d(raw: RawRows, first: int, second: int) -> str:
    """Bytes are grey pictures; other numbers are sequences where there are far more steps than
    channels."""
    if raw.x.dtype == np.uint8:
        return "hw"
    if first >= 4 * second or (second <= 4 and first > second):
        return "lc"
    if second >= 4 * first:
        raise _unclear(raw, "sequences (channels, steps)", "cl", "grey pictures", "hw")
    raise _unclear(raw, "grey pictures", "hw", "sequences (steps, channels)", "lc")


def _guessed_4d(raw: RawRows, first: int, second: int, third: int) -> str:
    """A picture whose channels are last has few of them and is about as high as wide; one whose
    channels are first has fewer channels than pixels a side, or is a square."""
    if third in _PICTURE:
        last = min(first, second) > max(third, 4) and max(first, second) <= 2 * min(first, second)
        if last:
            return "hwc"
    elif first < min(second, third) or (second == third != first):
        return "chw"
    raise _unclear(
        raw, "pictures (height, width, channels)", "hwc", "(channels, height, width)", "chw"
    )


def _unclear(raw: RawRows, one: str, layout: str, other: str, its: str) -> InputError:
    return InputError(
        f"{raw.where}: x is {raw.x.dtype} {raw.x.shape}, which may be {one} or {other}",
        field="data.layout",
        fix=f'say which: data.layout = "{layout}" or "{its}"',
    )


def _ids(raw: RawRows) -> np.ndarray:
    """Token ids as whole numbers from 0."""
    x = raw.x
    whole = x.dtype.kind in "iub" or bool((np.isfinite(x) & (np.floor(x) == x)).all())
    if not whole or x.min() < 0 or x.max() >= 2**31:
        raise raw.bad("token ids are whole numbers from 0", "mend x, or name another data.layout")
    return x.astype(np.int64)

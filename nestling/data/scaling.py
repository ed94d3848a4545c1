"""Values as networks like them: bytes of pictures from 0 to 1, everything else standardised by the
training rows alone, unless the user says otherwise."""

from __future__ import annotations

import numpy as np

from nestling.data.lengths import Steps
from nestling.data.recipe import AUTO, NONE, RawRows, Recipe
from nestling.errors import InputError


def scaled(
    x: np.ndarray,
    test: np.ndarray,
    layout: str,
    recipe: Recipe,
    raw: RawRows,
    steps: Steps | None = None,
) -> tuple[np.ndarray, str]:
    """Contiguous float32 (token ids: int64) with the channels first, and in words what was done.
    What is no real step counts for nothing, and is zero in the end."""
    if layout == "tokens":
        if recipe.scale not in (AUTO, NONE):
            raise InputError(
                f"token ids are numbers of words, and {recipe.scale!r} would change them",
                field="data.scale",
                fix='leave it out, or set data.layout = "f"',
            )
        return np.ascontiguousarray(x), "left as they are"
    picture = x.dtype == np.uint8 and x.ndim == 4
    if x.dtype == np.uint8 and (recipe.scale == "unit" or (recipe.scale == AUTO and picture)):
        return np.ascontiguousarray(x, np.float32) / np.float32(255), "divided by 255"
    x = np.array(x, np.float64, order="C")
    axes = (0, *range(2, x.ndim))
    real = None if steps is None else steps.of_samples(x)
    filled = _fill_missing(x, ~test, axes, recipe.missing, raw, real)
    with np.errstate(over="ignore", invalid="ignore"):
        x, done = _changed(x, ~test, axes, recipe.scale, layout, real)
    if real is not None:
        np.copyto(x, 0, where=~real)
    if not np.isfinite(x).all():
        raise raw.bad(
            "x has values too large to standardise", "rescale them to the range of 32-bit floats"
        )
    return x, done + filled


def _changed(
    x: np.ndarray,
    train: np.ndarray,
    axes: tuple[int, ...],
    scale: str,
    layout: str,
    real: np.ndarray | None,
) -> tuple[np.ndarray, str]:
    if scale == NONE:
        return x.astype(np.float32), "left as they are"
    seen, counted = x[train], True if real is None else real[train]
    if scale == "unit":
        low = seen.min(where=counted, initial=np.inf)
        high = seen.max(where=counted, initial=-np.inf)
        size = high - low if high > low else 1.0
        return ((x - low) / size).astype(np.float32), "moved to 0..1 by the training rows"
    mean, std = (f(axes, keepdims=True, where=counted) for f in (seen.mean, seen.std))
    # Rounding leaves a constant feature a deviation just above zero; dividing by that would
    # blow the noise up.
    std[std <= 1e-10 * np.abs(mean)] = 1
    # An infinite deviation would make finite nonsense of everything.
    std[~np.isfinite(std)] = np.nan
    each = "feature" if layout == "f" else "channel"
    return ((x - mean) / std).astype(np.float32), f"standardised per {each}"


def _fill_missing(
    x: np.ndarray,
    train: np.ndarray,
    axes: tuple[int, ...],
    missing: str,
    raw: RawRows,
    real: np.ndarray | None,
) -> str:
    if np.isinf(x).any():
        raise raw.bad("x has infinite values", "replace them; only NaN counts as missing")
    gaps = np.isnan(x)
    if not gaps.any():
        return ""
    count = int(gaps.sum())
    if missing == "refuse":
        fix = 'set data.missing to "mean" or "zero", or fill them in'
        raise raw.bad(f"x has {count} missing values (NaN)", fix)
    fill = np.zeros(())
    if missing == "mean":
        there = (~gaps if real is None else ~gaps & real)[train]
        known = np.where(there, x[train], 0).sum(axes, keepdims=True)
        fill = known / np.maximum(there.sum(axes, keepdims=True), 1)
    np.copyto(x, fill, where=gaps)
    return f" ({count:,} missing ones filled with {'the mean' if missing == 'mean' else 'zero'})"

"""Sequences of unequal length: filled up to one, with what is real known to the end.

A door hands over the real steps first and filling behind them, with `length` saying how many are
real. Where a network reads the last step, or the middle of all, the real ones are moved to the end.
Texts whose next token is learned keep them at the beginning, since no step sees a later one: what
is said of real steps is then what would be said of the unfilled text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nestling.data.recipe import RawRows
from nestling.errors import InputError


@dataclass(frozen=True)
class Steps:
    """Which steps of which rows are real, (N, L); `told` is what was done, in words."""

    real: np.ndarray
    told: str

    def of_samples(self, x: np.ndarray) -> np.ndarray:
        """The same for every value of (N, L) or (N, C, L) samples."""
        return np.broadcast_to(self.real if x.ndim == 2 else self.real[:, None], x.shape)


def stacked(samples: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, str]:
    """Samples of unequal length as one array with its steps in the second dimension, their lengths,
    and the layout: (steps,) of whole numbers are token ids, of others sequences of one channel;
    (steps, channels) are sequences."""
    first = samples[0]
    odd = next((one for one in samples if one.ndim != first.ndim), None)
    if first.ndim not in (1, 2) or odd is not None or any(not one.size for one in samples):
        raise _unlike("samples have several dimensions of unequal size, or hold nothing")
    if first.ndim == 2 and any(one.shape[1] != first.shape[1] for one in samples):
        raise _unlike("samples differ in more than their first dimension")
    kind = np.result_type(*{one.dtype for one in samples})
    layout = "tokens" if first.ndim == 1 and kind.kind in "iu" else "lc"
    length = np.array([len(one) for one in samples])
    x = np.zeros((len(samples), int(length.max()), *first.shape[1:]), kind)
    for row, one in zip(x, samples, strict=True):
        row[: len(one)] = one
    return (x[..., None] if layout == "lc" and first.ndim == 1 else x), length, layout


def alike(train: RawRows, test: RawRows) -> tuple[RawRows, RawRows]:
    """Both filled up to the steps of the longer one; as they are where neither has lengths."""
    if train.length is None and test.length is None:
        return train, test
    steps = max(rows.x.shape[1] for rows in (train, test) if rows.x.ndim > 1)
    return _to(train, steps), _to(test, steps)


def _to(rows: RawRows, steps: int) -> RawRows:
    if rows.x.ndim < 2:
        return rows
    length = np.full(len(rows.x), rows.x.shape[1]) if rows.length is None else rows.length
    more = [(0, 0), (0, steps - rows.x.shape[1]), *[(0, 0)] * (rows.x.ndim - 2)]
    return replace(rows, x=np.pad(rows.x, more), length=length)


def placed(
    x: np.ndarray, layout: str, raw: RawRows, at_end: bool
) -> tuple[np.ndarray, Steps | None]:
    """The arranged samples with their filling zero and where it belongs, and what is real; None
    where nothing is filled."""
    length = raw.length
    if length is None:
        return x, None
    if layout not in ("tokens", "lc", "cl"):
        raise InputError(
            f"{raw.where}: rows have lengths, and {layout!r} has no steps",
            field="data.layout",
            fix='leave it out, or take "lc", "cl" or "tokens"',
        )
    steps = x.shape[-1]
    if length.shape != x.shape[:1] or length.dtype.kind not in "iu":
        raise raw.bad(
            f"length is {length.dtype} {length.shape}", "give a whole number for every row of x"
        )
    if length.min() < 1 or length.max() > steps:
        raise raw.bad(
            f"lengths run from {length.min()} to {length.max()}, and rows have {steps} steps",
            "say how many steps of a row are real: the first ones",
        )
    if length.min() == steps:
        return x, None
    at = np.arange(steps)
    if not at_end:
        back = (at - (steps - length[:, None])) % steps
        x = np.take_along_axis(x, back if x.ndim == 2 else back[:, None], -1)
    real = at < length[:, None] if at_end else at >= steps - length[:, None]
    own = layout == "tokens" and not at_end  # or filling would be taken for a word
    blank = 1 + int(x.max(where=real, initial=0)) if own else 0
    filled = Steps(real, _words(length, steps, at_end, f" with id {blank}" if own else ""))
    return np.where(filled.of_samples(x), x, np.asarray(blank, x.dtype)), filled


def as_silence(raw: RawRows) -> RawRows:
    """Signals of unequal length with zeros behind them, as rows of one length."""
    if raw.length is None or (raw.x.ndim == 3 and 1 not in raw.x.shape[1:]):
        return raw
    x, filled = placed(raw.x.reshape(len(raw.x), -1), "tokens", raw, at_end=True)
    few = 0 if filled is None else int((~filled.real[:, -1]).sum())
    return replace(raw, x=x, length=None).told(f"{few:,} filled with silence")


def _words(length: np.ndarray, steps: int, at_end: bool, blank: str) -> str:
    few, where = int((length < steps).sum()), "end" if at_end else "front"
    return (
        f"{few:,} of {len(length):,} sequences, which have {length.min()} to {length.max()} steps, "
        f"filled up at the {where}{blank}"
    )


def _unlike(message: str) -> InputError:
    fix = "bring them to one shape, or give sequences (steps,) or (steps, channels)"
    return InputError(message, field="data", fix=fix)

"""Sound as pictures: the logarithm of the energy in bands of the mel scale, frame by frame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from nestling.data.recipe import RawRows, Recipe
from nestling.errors import InputError

OPTIONS: dict[str, Any] = {
    "rate": 0.0,
    "bands": 32,
    "window": 0.032,
    "step": 0.016,
    "low": 20.0,
    "high": 0.0,
}
"""Samples a second (0: as the files say), bands, seconds of a frame and from one frame to the next,
the lowest and the highest frequency (0: half the rate)."""

_AT_ONCE = 2**22  # samples turned at a time, so that memory is bounded
_FLOOR = 1e-6  # energy that silence has: its logarithm exists


def options_of(recipe: Recipe) -> dict[str, Any]:
    """The options that the recipe's transform has."""
    return OPTIONS if recipe.transform == "log-mel" else {}


def log_mel(raw: RawRows, options: Mapping[str, Any]) -> RawRows:
    """Rows of one signal each as pictures of bands by frames."""
    x = raw.x
    if x.ndim == 3 and 1 in x.shape[1:]:
        x = x.reshape(len(x), -1)
    if x.ndim != 2 or x.dtype.kind not in "iuf":
        raise raw.bad(
            f"log-mel takes one signal a row, and x is {x.dtype} {raw.x.shape}",
            "give x as (N, samples), or leave data.transform out",
        )
    rate = float(options["rate"] or raw.rate)
    size, step = round(options["window"] * rate), round(options["step"] * rate)
    bands, high = int(options["bands"]), float(options["high"] or rate / 2)
    for name, good, wanted in (
        ("rate", rate > 0, "samples a second, which only sound files say themselves"),
        ("window", 2 <= size <= x.shape[1], f"at least 2 samples, at most {x.shape[1]}"),
        ("step", step >= 1, "at least one sample"),
        ("bands", bands >= 1, "at least 1"),
        ("high", options["low"] < high <= rate / 2, f"above low, at most {rate / 2:g}"),
    ):
        if not good:
            raise InputError(
                f"{options[name]} is out of range for {x.shape[1]} samples at {rate:g} a second",
                field=f"data.options.{name}",
                fix=f"give {wanted}",
            )
    weights = mel_filters(bands, size, rate, float(options["low"]), high)
    few = max(1, _AT_ONCE // x.shape[1])
    found = [_energy(x[at : at + few], size, step, weights) for at in range(0, len(x), few)]
    told = f"log-mel of {bands} bands, frames of {size} samples every {step} at {rate:g} Hz"
    return replace(raw, x=np.concatenate(found), layout="hw").told(told)


def mel_filters(bands: int, size: int, rate: float, low: float, high: float) -> np.ndarray:
    """(bands, frequencies) triangles, evenly spaced on the mel scale. A band narrower than the
    frequencies are apart takes the nearest of them."""
    edges = _hertz(np.linspace(_mel(low), _mel(high), bands + 2))
    at = np.fft.rfftfreq(size, 1 / rate)
    up = (at - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    down = (edges[2:, None] - at) / (edges[2:] - edges[1:-1])[:, None]
    weights = np.clip(np.minimum(up, down), 0, None)
    empty = weights.sum(1) == 0
    weights[empty, np.abs(at - edges[1:-1, None]).argmin(1)[empty]] = 1
    return weights


def _energy(x: np.ndarray, size: int, step: int, weights: np.ndarray) -> np.ndarray:
    frames = np.lib.stride_tricks.sliding_window_view(x, size, axis=1)[:, ::step]
    power = np.abs(np.fft.rfft(frames * np.hanning(size))) ** 2
    return np.log(weights @ power.transpose(0, 2, 1) + _FLOOR).astype(np.float32)


def _mel(hertz: float) -> float:
    return 2595.0 * float(np.log10(1 + hertz / 700))


def _hertz(mel: np.ndarray) -> np.ndarray:
    return 700 * (10 ** (mel / 2595) - 1)

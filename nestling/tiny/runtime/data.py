"""A client's data as it lies in a board's flash.

Little-endian: magic, rows, channels, height, width, kind, scale, offset, bytes of everything,
CRC-32 of what follows; then the targets; then the samples. The kind's low byte is 0 for samples of
float32 and 1 for uint8, where x = q · scale + offset in float32; above it stands how many values a
target has. With 0 of them targets are labels, 16 bits per row, padded to 4 bytes; else values of
float32; and nothing at all where every sample is its own target (`SELF`).
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nestling.errors import InputError

MAGIC = 0x4454534E  # "NSTD"
FLOAT32, UINT8 = 0, 1
SELF = 0xFFFFFF
"""In the place of the number of values: a target is the sample itself."""
_HEADER = struct.Struct("<6I2f2I")


def pack(x: Tensor | np.ndarray, y: Tensor | np.ndarray) -> bytes:
    """Samples (rows, and their shape: one to three dimensions) and their targets, labels or rows of
    values, as one blob; samples of a byte per entry where that gives back the same floats, else of
    four."""
    samples = _samples(x)
    values, targets = _targets(_array(y), samples)
    coded = _as_bytes(samples)
    kind, scale, offset, entries = (
        (FLOAT32, 1.0, 0.0, samples) if coded is None else (UINT8, *coded)
    )
    body = targets + bytes(-len(targets) % 4) + np.ascontiguousarray(entries).tobytes()
    rows, channels, height, width = samples.shape
    return (
        _HEADER.pack(
            MAGIC,
            rows,
            channels,
            height,
            width,
            kind | values << 8,
            scale,
            offset,
            _HEADER.size + len(body),
            zlib.crc32(body),
        )
        + body
    )


@dataclass(frozen=True)
class BlobHead:
    """What the first bytes of data say; `values` is how many a target has (0: it is a label)."""

    rows: int
    shape: tuple[int, int, int]
    values: int
    crc: int


def head_of(blob: bytes) -> BlobHead:
    """The head of data that the runtime has found right."""
    _, rows, *shape, kind, _, _, _, crc = _HEADER.unpack_from(blob)
    channels, height, width = shape
    values = kind >> 8
    size = channels * height * width if values == SELF else values
    return BlobHead(rows, (channels, height, width), size, crc)


def labels_of(blob: bytes) -> np.ndarray:
    """The labels of such data; none where their targets are values."""
    head = head_of(blob)
    return np.frombuffer(blob, "<u2", 0 if head.values else head.rows, _HEADER.size)


def _targets(y: np.ndarray, samples: np.ndarray) -> tuple[int, bytes]:
    """How many values a target has, and all of them as bytes."""
    of_values = y.ndim == 2 and y.dtype.kind == "f"
    count = len(y) if of_values else y.size
    if count != len(samples) or not samples.size:
        fix = "one target a sample, at least one"
        raise InputError(f"{len(samples)} samples and {count} targets", field="data", fix=fix)
    if not of_values:
        return 0, _labels(y).tobytes()
    values = np.ascontiguousarray(y, "<f4")
    if not np.isfinite(values).all():
        fix = "give numbers, and sequences of one length: a board fills nothing up"
        raise InputError("targets that are not finite", field="data", fix=fix)
    if not 0 < values.shape[1] < SELF:
        raise InputError(f"{values.shape[1]} values a target", field="data", fix="give at least 1")
    if np.array_equal(values, samples.reshape(len(samples), -1)):
        return SELF, b""
    return values.shape[1], values.tobytes()


def _samples(x: Tensor | np.ndarray) -> np.ndarray:
    """(rows, channels, height, width) as the runtime sees it: a sequence has height 1, a vector is
    all channels."""
    given = _array(x)
    if given.dtype.kind not in "biuf":
        raise InputError(f"samples of type {given.dtype}", field="data", fix="give numbers")
    values = given.astype("<f4")
    if values.ndim == 4:
        return values
    if values.ndim == 3:
        return values[:, :, None, :]
    if values.ndim == 2:
        return values[:, :, None, None]
    raise InputError(
        f"samples of {values.ndim - 1} dimensions", field="data", fix="one, two or three"
    )


def _labels(y: np.ndarray) -> np.ndarray:
    labels = y.reshape(-1)
    if labels.dtype.kind not in "biuf":
        raise InputError(
            f"labels of type {labels.dtype}", field="data", fix="give whole numbers 0 to 65535"
        )
    if len(labels) and not (labels.min() >= 0 and labels.max() <= 0xFFFF):  # a NaN is neither
        raise InputError(f"a label of {labels.max()}", field="data", fix="labels are 0 to 65535")
    return labels.astype("<u2")


def _array(values: Tensor | np.ndarray) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def _as_bytes(samples: np.ndarray) -> tuple[float, float, np.ndarray] | None:
    """Scale, offset and bytes that give back exactly these floats, where there are such."""
    few = np.unique(samples.reshape(-1)[:4096])  # most data that is not of bytes shows it here
    levels = np.unique(samples) if len(few) <= 256 else few
    if len(levels) > 256 or not np.isfinite(levels).all():
        return None
    low = levels[0]
    for scale in _scales(levels):
        places = np.rint((levels.astype(np.float64) - low) / scale)
        if places[-1] <= 255 and np.array_equal(_decoded(places, scale, low), levels):
            return (
                float(scale),
                float(low),
                places.astype(np.uint8)[np.searchsorted(levels, samples)],
            )
    return None


def _decoded(places: np.ndarray, scale: np.float32, offset: np.float32) -> np.ndarray:
    """What the board computes: two roundings to float32."""
    return (places.astype(np.float32) * scale).astype(np.float32) + offset


def _scales(levels: np.ndarray) -> list[np.float32]:
    """Candidates for the step between levels: the smallest gap, the range in 255 steps, and their
    neighbours among the floats."""
    if len(levels) == 1:
        return [np.float32(1.0)]
    levels = levels.astype(np.float64)
    gap, width = np.diff(levels).min(), levels[-1] - levels[0]
    found = []
    for step in (width / max(round(width / gap), 1), width / 255):
        near = np.float32(step)
        found += [near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))]
    return [scale for scale in found if scale > 0]

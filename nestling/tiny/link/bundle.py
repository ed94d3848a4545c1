"""Named arrays and plain facts as bytes, without pickle and without torch: what the gateway is sent
and what its journal keeps.

A length, a JSON header, the arrays one after the other, and the CRC-32 of it all. What is read is
checked before it is used.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from nestling.errors import InputError

MOST_BYTES = 2**30
_LENGTH = struct.Struct("<I")
_TYPES = {
    "float32": "<f4",
    "float64": "<f8",
    "uint8": "|u1",
    "int8": "|i1",
    "uint16": "<u2",
    "uint32": "<u4",
}


def pack(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of facts (what JSON can say) and arrays; the same ones always give the same
    bytes."""
    shapes = {name: (str(array.dtype), list(array.shape)) for name, array in arrays.items()}
    strange = [name for name, (kind, _) in shapes.items() if kind not in _TYPES]
    if strange:
        raise ValueError(f"arrays of another type than {', '.join(_TYPES)}: {', '.join(strange)}")
    head = json.dumps({"facts": dict(facts), "arrays": shapes}, sort_keys=True).encode()
    raw = [
        np.ascontiguousarray(arrays[name], _TYPES[kind]).tobytes()
        for name, (kind, _) in sorted(shapes.items())
    ]
    data = b"".join([_LENGTH.pack(len(head)), head, *raw])
    return data + _LENGTH.pack(zlib.crc32(data))


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What `pack` wrote; anything else is refused with an `InputError`."""
    try:
        return _unpack(data)
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise InputError(f"not a readable bundle: {type(error).__name__}: {error}") from error


def _unpack(data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    body = data[: -_LENGTH.size]
    if len(data) > MOST_BYTES or _LENGTH.unpack(data[-_LENGTH.size :])[0] != zlib.crc32(body):
        raise ValueError("damaged or too long")
    (length,) = _LENGTH.unpack_from(body)
    place = _LENGTH.size + length
    if place > len(body):
        raise ValueError("the header is longer than the whole")
    head = json.loads(body[_LENGTH.size : place])
    facts, shapes, arrays = dict(head["facts"]), dict(head["arrays"]), {}
    for name in sorted(shapes):
        arrays[name], place = _array(body, place, *shapes[name])
    if place != len(body):
        raise ValueError("bytes are left over")
    return facts, arrays


def _array(body: bytes, place: int, kind: str, shape: list[int]) -> tuple[np.ndarray, int]:
    dtype = np.dtype(_TYPES[kind])
    if any(not isinstance(side, int) or side < 0 for side in shape) or len(shape) > 4:
        raise ValueError("a shape that cannot be")
    size = math.prod(shape)
    if size * dtype.itemsize > len(body) - place:
        raise ValueError("an array is longer than what is there")
    found = np.frombuffer(body, dtype, size, place).reshape(shape)
    return found, place + size * dtype.itemsize

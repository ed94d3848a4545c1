"""Good bytes made wrong. Chance comes from a `Random` that is handed in: the same seed gives the
same bytes."""

from __future__ import annotations

import copy
import json
import math
import struct
from random import Random
from typing import Any

MOST = 2**16
"""Bytes of the longest input: whatever is read from one must stay in proportion."""

DEEP, DIGITS = "@deep@", "@digits@"
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**40, 2**63, 2**64, 10**400, -(10**400)),
    *(0.5, -1e308, math.nan, math.inf, "", "a", "a/b", "x" * 3000, "\ud800", "\x1b[2J\n\0"),
    *([], [[]], [0], [-1, -8], [2**40, 0], [2**64, 0], [0] * 70, [1e300], {}, {"a": 1}),
    *(DEEP, DIGITS),
)
"""Values of every type, among them those that break arithmetic: too large for a float or for 64
bits, lists too deep to walk, numbers too long to read, half characters."""

_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def bent(draw: Random, data: bytes, other: bytes) -> bytes:
    """`data` with a few changes; `other` is good too, and lends pieces."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        place = draw.randrange(len(found) + 1)
        length = min(draw.choice((1, 2, 4, 8, 40, 1000)), len(found) - place)
        what = draw.randrange(8)
        if what == 0 and length:
            found[place] ^= 1 << draw.randrange(8)
        elif what == 1 and length:
            found[place] = draw.randrange(256)
        elif what == 2:
            del found[place:]
        elif what == 3:
            del found[place : place + length]
        elif what == 4:
            found[place:place] = found[place : place + length] * draw.choice((1, 1, 50))
        elif what == 5:
            found[place:place] = draw.randbytes(length)
        elif what == 6:
            start = draw.randrange(len(other) + 1)
            found[place : place + length] = other[start : start + draw.choice((4, 60, 5000))]
        else:
            number = draw.choice(_NUMBERS) + draw.choice((0, 0, 1))
            code = draw.choice(("<I", ">I", "<Q", "<H"))
            size = struct.calcsize(code)
            found[place : place + size] = struct.pack(code, number & (256**size - 1))
    return bytes(found[:MOST])


def bent_tree(draw: Random, tree: Any) -> Any:
    """A copy of tables and lists with something in it replaced, taken away, doubled or moved."""
    found = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        places = _places(found)
        if not places:
            return copy.deepcopy(draw.choice(ODD))
        inside, key = draw.choice(places)
        what = draw.randrange(6)
        if what == 0:
            del inside[key]
        elif what == 1 and isinstance(inside, list):
            inside[key:key] = [copy.deepcopy(inside[key])] * draw.choice((1, 3, 70))
        elif what == 1:
            inside[draw.choice(("", "a", "bits:a", str(key) + "x"))] = copy.deepcopy(inside[key])
        elif what == 2:
            holder, name = draw.choice(places)
            if name in holder if isinstance(holder, dict) else name < len(holder):
                inside[key] = copy.deepcopy(holder[name])
        else:
            inside[key] = copy.deepcopy(draw.choice(ODD))
    return found


def put(tree: Any, place: int, value: Any) -> Any:
    """A copy of a tree with a value at one of its places, whatever their number."""
    found = copy.deepcopy(tree)
    places = _places(found)
    inside, key = places[place % len(places)]
    inside[key] = value
    return found


def text_of(tree: Any) -> bytes:
    """The tree in JSON, with what JSON's own writer cannot write."""
    text = json.dumps(tree)
    text = text.replace(f'"{DEEP}"', "[" * 20000 + "]" * 20000)
    return text.replace(f'"{DIGITS}"', "9" * 5000).encode()


def _places(tree: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting and len(found) < 2000:
        inside = waiting.pop()
        keys = range(len(inside)) if isinstance(inside, list) else list(inside)
        found += [(inside, key) for key in keys]
        waiting += [inside[key] for key in keys if isinstance(inside[key], (dict, list))]
    return found

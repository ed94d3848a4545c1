"""ELF files of 32 bits, as far as firmware needs them: what is loaded where, and the places that
the linker named."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct("<16sHHIIIIIHHHHHH")
_SEGMENT = struct.Struct("<8I")
_SECTION = struct.Struct("<10I")
_SYMBOL = struct.Struct("<IIIBBH")
_LOAD, _SYMBOL_TABLE = 1, 2
_ARM = 40
_IDENTITY = b"\x7fELF\x01\x01\x01" + bytes(9)


@dataclass(frozen=True)
class Segment:
    """Bytes that lie at `address` of the flash (`run` while the program runs), of which the first
    `len(data)` are given."""

    address: int
    run: int
    data: bytes
    bytes: int


@dataclass(frozen=True)
class Image:
    """A linked program."""

    segments: list[Segment]
    symbols: dict[str, int]
    sections: dict[str, int]  # name -> bytes


def read(path: str | Path) -> Image:
    """The program in a file."""
    raw = Path(path).read_bytes()
    (
        identity,
        _,
        machine,
        _,
        _,
        segments_at,
        sections_at,
        _,
        _,
        size,
        count,
        section_size,
        sections,
        names,
    ) = _HEADER.unpack_from(raw)
    if identity[:7] != _IDENTITY[:7] or machine != _ARM:
        raise ValueError(f"{path} is not a 32-bit ARM program")
    segments = [_SEGMENT.unpack_from(raw, segments_at + k * size) for k in range(count)]
    headers = [_SECTION.unpack_from(raw, sections_at + k * section_size) for k in range(sections)]
    strings = headers[names]
    return Image(
        [
            Segment(s[3], s[2], raw[s[1] : s[1] + s[4]], s[5])
            for s in segments
            if s[0] == _LOAD and s[4]
        ],
        _symbols(raw, headers),
        {_name(raw, strings[4] + h[0]): h[5] for h in headers},
    )


def wrap(data: bytes, address: int) -> bytes:
    """`data` as a program that is nothing but these bytes at `address`: every version of QEMU loads
    it into any memory."""
    at = _HEADER.size + _SEGMENT.size
    header = _HEADER.pack(
        _IDENTITY,
        2,
        _ARM,
        1,
        address,
        _HEADER.size,
        0,
        0x05000000,
        _HEADER.size,
        _SEGMENT.size,
        1,
        0,
        0,
        0,
    )
    return header + _SEGMENT.pack(_LOAD, at, address, address, len(data), len(data), 4, 4) + data


def _symbols(raw: bytes, headers: list[tuple[int, ...]]) -> dict[str, int]:
    found = {}
    for header in headers:
        if header[1] == _SYMBOL_TABLE:
            strings = headers[header[6]][4]
            for at in range(header[4], header[4] + header[5], _SYMBOL.size):
                name, value, *_ = _SYMBOL.unpack_from(raw, at)
                found[_name(raw, strings + name)] = value
    return found


def _name(raw: bytes, at: int) -> str:
    return raw[at : raw.index(b"\0", at)].decode()

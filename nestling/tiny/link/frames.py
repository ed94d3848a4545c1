"""Frames on a byte stream; `runtime/link.c` is the other end.

A frame is a head, up to 256 bytes of payload and the CRC-32 of both, COBS-encoded, so that a zero
byte is found between frames and nowhere else: whatever a noisy line did to one frame, the next zero
is a fresh start.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

MOST_PAYLOAD = 256
_HEAD = struct.Struct("<BBHHH")
_CRC = struct.Struct("<I")
_LONGEST = _HEAD.size + MOST_PAYLOAD + _CRC.size
_LONGEST_ENCODED = _LONGEST + _LONGEST // 254 + 1
_RUN = 254  # bytes that one COBS block holds


class FrameKind(IntEnum):
    """What a frame is: a request, or (ANSWER added) the answer to one; BEACON: a board has started;
    AGAIN: it could not read that."""

    HELLO = 1
    LOAD = 2
    WRITE = 3
    READ = 4
    BEGIN = 5
    START = 6
    STEP = 7
    ANSWER = 0x80
    BEACON = 0xF0
    AGAIN = 0xF1


class Status(IntEnum):
    """What an answer says."""

    DONE = 0
    SESSION = 1
    TYPE = 2
    LENGTH = 3
    ORDER = 4
    RANGE = 5
    NUMBER = 6
    ENGINE = 7


@dataclass(frozen=True)
class Frame:
    """One frame. `status` is 0 in a request."""

    kind: int
    session: int
    sequence: int
    payload: bytes = b""
    status: int = 0


def encode(frame: Frame) -> bytes:
    """The bytes of a frame, a zero in front (it ends whatever noise was there before) and one
    behind."""
    if len(frame.payload) > MOST_PAYLOAD:
        raise ValueError(f"a payload of {len(frame.payload)} bytes; {MOST_PAYLOAD} at most")
    body = (
        _HEAD.pack(frame.kind, frame.status, len(frame.payload), frame.session, frame.sequence)
        + frame.payload
    )
    return b"\0" + cobs(body + _CRC.pack(zlib.crc32(body))) + b"\0"


def decode(data: bytes) -> Frame | None:
    """The frame between two zeros, or None if it is damaged."""
    raw = uncobs(data)
    if raw is None or not _HEAD.size + _CRC.size <= len(raw) <= _LONGEST:
        return None
    body, (crc,) = raw[: -_CRC.size], _CRC.unpack(raw[-_CRC.size :])
    kind, status, length, session, sequence = _HEAD.unpack_from(body)
    if length != len(body) - _HEAD.size or crc != zlib.crc32(body):
        return None
    return Frame(kind, session, sequence, body[_HEAD.size :], status)


def cobs(raw: bytes) -> bytes:
    """`raw` without zero bytes: blocks that each begin with the distance to the next zero."""
    out = bytearray()
    for piece in raw.split(b"\0"):
        while len(piece) >= _RUN:
            out += b"\xff" + piece[:_RUN]
            piece = piece[_RUN:]
        out += bytes([len(piece) + 1]) + piece
    return bytes(out)


def uncobs(data: bytes) -> bytes | None:
    """What `cobs` was given, or None if that cannot be."""
    out, place = bytearray(), 0
    while place < len(data):
        code = data[place]
        if code == 0 or place + code > len(data):
            return None
        out += data[place + 1 : place + code]
        place += code
        if code != _RUN + 1 and place < len(data):
            out.append(0)
    return bytes(out)


class Reader:
    """Takes a stream in pieces and gives its frames; None stands for a damaged one."""

    def __init__(self) -> None:
        """Starts at the beginning of a frame."""
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Frame | None]:
        """The frames that these bytes complete; an unfinished rest waits for more."""
        *whole, rest = (self._rest + data).split(b"\0")
        # Without a zero for longer than any frame it is noise: keep enough to know that it was
        # damaged.
        self._rest = rest[: _LONGEST_ENCODED + 1]
        return [decode(bytes(piece)) for piece in whole if piece]

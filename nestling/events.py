"""Event files for TensorBoard, written directly: records of a few protobuf fields, each with its
checksums."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_POLYNOMIAL = 0x82F63B78


def _table() -> list[int]:
    rows = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
        rows.append(byte)
    return rows


_CRC = _table()


class EventFile:
    """One event file in `folder`. Steps from `purge_from` on that an earlier file holds are shown
    as replaced."""

    def __init__(self, folder: Path, purge_from: int = 1) -> None:
        """Creates the file and writes its version and, after a resume, from which step on earlier
        files are replaced."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(folder / name, "ab")  # noqa: SIM115 (held until close)
        self._record(_event(0, _text(3, b"brain.Event:2")))
        if purge_from > 1:
            # SessionLog START tells TensorBoard to forget what a crashed run wrote after this step.
            self._record(_event(purge_from, _text(7, _number(1, 1))))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """The values of one step."""
        summary = b"".join(
            _text(1, _text(1, name.encode()) + b"\x15" + struct.pack("<f", value))
            for name, value in values.items()
        )
        self._record(_event(step, _text(5, summary)))
        self._file.flush()

    def image(self, name: str, png: bytes, step: int) -> None:
        """A picture, as the bytes of a PNG file."""
        width, height = struct.unpack(">II", png[16:24])  # where the format has them
        picture = _number(1, height) + _number(2, width) + _number(3, 4) + _text(4, png)
        value = _text(1, name.encode()) + _text(4, picture)
        self._record(_event(step, _text(5, _text(1, value))))
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _record(self, data: bytes) -> None:
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked_crc(length) + data + _masked_crc(data))


def _event(step: int, content: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", time.time()) + _number(2, step) + content


def _number(field: int, value: int) -> bytes:
    return bytes([field << 3]) + _varint(value)


def _text(field: int, data: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

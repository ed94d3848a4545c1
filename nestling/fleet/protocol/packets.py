"""Bytes of any length over a channel of small messages that may be lost, doubled or come late: what
devices and their gateway say over MQTT. Nothing heavy is imported here.

A packet, little-endian: version, kind (a byte each), index, count, length of the payload (16 bits
each), number of the job, CRC-32 of all before it and of the payload (32 bits each), then the
payload, 1024 bytes at most:

    JOB     gateway → device   the part `index` of `count` of a job: a bundle (`tiny.link.bundle`)
                               of `tiny.link.orders`
    RESULT  device → gateway   the same for what came of it: a bundle
    ACK     the other way      the first `index` of `count` parts have arrived

At most WINDOW parts are on their way without an ACK, so that no queue of a broker overflows;
without progress they are sent again.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field

from nestling.errors import InputError

VERSION = 1
JOB, RESULT, ACK = 1, 2, 3
PART = 1024
MOST_PARTS = 2**16 - 1
WINDOW = 16
ASK_AFTER = WINDOW // 2  # parts between two ACKs

FIRST_PAUSE, LONGEST_PAUSE = 3.0, 60.0
"""Seconds without progress after which parts are sent again; twice as long each time."""

_HEAD = struct.Struct("<2B3HI")
_CRC = struct.Struct("<I")


@dataclass(frozen=True)
class Packet:
    """One message."""

    kind: int
    job: int
    index: int
    count: int
    payload: bytes = b""

    def to_bytes(self) -> bytes:
        """The head, the CRC of head and payload, and the payload."""
        head = _HEAD.pack(VERSION, self.kind, self.index, self.count, len(self.payload), self.job)
        return head + _CRC.pack(zlib.crc32(head + self.payload)) + self.payload

    @staticmethod
    def from_bytes(data: bytes) -> Packet:
        """The packet in some bytes; an `InputError` where they are damaged or of no form given
        above."""
        start = _HEAD.size + _CRC.size
        if not start <= len(data) <= start + PART:
            raise InputError(f"a packet of {len(data)} bytes")
        version, kind, index, count, length, job = _HEAD.unpack_from(data)
        payload = data[start:]
        if version != VERSION or kind not in (JOB, RESULT, ACK):
            raise InputError(f"a packet of version {version}, kind {kind}")
        if length != len(payload) or _CRC.unpack_from(data, _HEAD.size)[0] != zlib.crc32(
            data[: _HEAD.size] + payload
        ):
            raise InputError("a damaged packet")
        if kind == ACK:
            if index > count or payload:
                raise InputError(f"an ACK of {index} of {count} parts, with {length} bytes")
        # Every part but the last is full: what has arrived is then known by its number alone.
        elif index >= count or not payload or (index < count - 1 and length < PART):
            raise InputError(f"part {index} of {count}, with {length} bytes")
        return Packet(kind, job, index, count, payload)


@dataclass
class Sender:
    """Sends one thing. `due` says what to send now, `acknowledge` is told what arrived."""

    kind: int
    job: int
    data: bytes
    arrived: int = 0
    again: int = 0  # parts that were sent more than once
    _sent: int = 0
    _since: float = 0.0
    _pause: float = FIRST_PAUSE

    def __post_init__(self) -> None:
        """Refuses empty data, and data of more than `MOST_PARTS` parts."""
        if not self.data or self.count > MOST_PARTS:
            raise InputError(
                f"{len(self.data)} bytes do not travel over MQTT",
                fix=f"at most {MOST_PARTS * PART}",
            )

    @property
    def count(self) -> int:
        """How many parts the data has."""
        return -(-len(self.data) // PART)

    @property
    def finished(self) -> bool:
        """Whether all parts were acknowledged."""
        return self.arrived == self.count

    def due(self, now: float) -> list[bytes]:
        """The packets to send now."""
        if self._sent > self.arrived and now - self._since >= self._pause:
            self.again += self._sent - self.arrived
            self._sent, self._pause = self.arrived, min(LONGEST_PAUSE, 2 * self._pause)
        end = min(self.count, self.arrived + WINDOW)
        found = [self._packet(index) for index in range(self._sent, end)]
        if found:
            self._sent, self._since = end, now
        return found

    def acknowledge(self, packet: Packet, now: float) -> None:
        """Takes an ACK in; one of something else, or an old one, changes nothing."""
        if packet.job == self.job and packet.count == self.count and packet.index > self.arrived:
            self.arrived, self._sent = packet.index, max(self._sent, packet.index)
            self._since, self._pause = now, FIRST_PAUSE

    def restart(self) -> None:
        """The other side has forgotten everything, or may have."""
        self.arrived = self._sent = 0
        self._pause = FIRST_PAUSE

    def _packet(self, index: int) -> bytes:
        return Packet(
            self.kind, self.job, index, self.count, self.data[index * PART : (index + 1) * PART]
        ).to_bytes()


@dataclass
class Receiver:
    """Puts one thing together. `most`: bytes of the largest that is taken."""

    job: int
    count: int
    most: int
    _parts: dict[int, bytes] = field(default_factory=dict)
    _arrived: int = 0

    def __post_init__(self) -> None:
        """Refuses what is announced as larger than `most`."""
        if self.count * PART > self.most + PART:
            raise InputError(
                f"{self.count} parts are announced, the most is {-(-self.most // PART)}"
            )

    def take(self, packet: Packet) -> Packet | None:
        """Takes a part in; gives the ACK to send, where one is due."""
        if packet.count != self.count:
            raise InputError(
                f"{packet.count} parts and {self.count} parts are announced for the same job"
            )
        new = packet.index == self._arrived
        if packet.index >= self._arrived:
            self._parts[packet.index] = packet.payload
        while self._arrived in self._parts and self._arrived < self.count:
            self._arrived += 1
        # One that was not expected next means that something was lost, or that an ACK was.
        return self.ack() if not new or self.complete or self._arrived % ASK_AFTER == 0 else None

    @property
    def complete(self) -> bool:
        """Whether all parts have arrived."""
        return self._arrived == self.count

    def ack(self) -> Packet:
        """The ACK that tells how many parts have arrived without a gap."""
        return Packet(ACK, self.job, self._arrived, self.count)

    def data(self) -> bytes:
        """The whole; nothing before it is complete."""
        return b"".join(self._parts[index] for index in range(self.count)) if self.complete else b""

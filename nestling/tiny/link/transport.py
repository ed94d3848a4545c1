"""Byte streams to boards: a Unix socket, TCP, a serial port; and a stream that is made worse on
purpose."""

from __future__ import annotations

import random
import select
import socket
from dataclasses import dataclass
from typing import Any, Protocol

from nestling.errors import InputError

_BAUD = 115200


class Broken(ConnectionError):
    """The stream has ended; whoever needs it opens it again."""


class Stream(Protocol):
    """Bytes to and from a board."""

    def read(self, timeout: float) -> bytes:
        """What has arrived, after at most `timeout` seconds; nothing is b"". Raises `Broken` at the
        end of the stream."""

    def write(self, data: bytes) -> None:
        """Sends all of `data`; raises `Broken` when the other side is gone."""

    def close(self) -> None:
        """Gives the stream back."""


def open_stream(address: str, timeout: float = 5.0) -> Stream:
    """The stream at `unix:PATH`, `tcp:HOST:PORT` or `serial:PORT[:BAUD]`; raises `Broken` when
    nobody is there."""
    kind, _, rest = address.partition(":")
    try:
        if kind == "unix" and rest:
            return _Socket(_unix(rest, timeout))
        if kind == "tcp" and rest.rpartition(":")[2].isdigit():
            host, _, port = rest.rpartition(":")
            return _Socket(_tcp(host, int(port), timeout))
        if kind == "serial" and rest:
            return _serial(rest)
    except OSError as error:
        raise Broken(f"{address}: {error}") from error
    raise InputError(
        f"{address!r} is no address of a board",
        field="transport",
        fix="unix:PATH, tcp:HOST:PORT or serial:PORT:BAUD",
    )


def _unix(path: str, timeout: float) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.settimeout(timeout)
        link.connect(path)
    except OSError:
        link.close()
        raise
    return link


def _tcp(host: str, port: int, timeout: float) -> socket.socket:
    link = socket.create_connection((host, port), timeout)
    # Every frame waits for its answer: held back to be sent with the next one it would wait for
    # ever.
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


class _Socket:
    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def read(self, timeout: float) -> bytes:
        try:
            ready, _, _ = select.select([self._link], [], [], max(0.0, timeout))
            if not ready:
                return b""
            data = self._link.recv(65536)
        except (OSError, ValueError) as error:
            raise Broken(str(error)) from error
        if not data:
            raise Broken("the other side has hung up")
        return data

    def write(self, data: bytes) -> None:
        try:
            self._link.sendall(data)
        except OSError as error:
            raise Broken(str(error)) from error

    def close(self) -> None:
        self._link.close()


def _serial(place: str) -> Stream:
    try:
        import serial
    except ImportError:
        raise InputError(
            "pyserial is not installed", field="transport", fix="pip install nestling[tiny]"
        ) from None
    port, _, baud = place.rpartition(":")
    if not port or not baud.isdigit():
        port, baud = place, str(_BAUD)
    return _Serial(serial.Serial(port, int(baud), timeout=0, write_timeout=10))


class _Serial:
    def __init__(self, port: Any) -> None:
        self._port = port

    def read(self, timeout: float) -> bytes:
        try:
            self._port.timeout = max(0.0, timeout)
            first = self._port.read(1)
            return bytes(first + self._port.read(self._port.in_waiting)) if first else b""
        except OSError as error:  # pyserial's own errors are of this kind
            raise Broken(str(error)) from error

    def write(self, data: bytes) -> None:
        try:
            self._port.write(data)
        except OSError as error:
            raise Broken(str(error)) from error

    def close(self) -> None:
        self._port.close()


# -- faults ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noise:
    """Spoils this share of the frames, each way: a byte changed, or lost, or the whole frame lost,
    doubled, or noise put before it."""

    rate: float
    seed: int = 0


class Noisy:
    """A stream with `noise` on it. The faults depend on the seed, how often it was opened before,
    and the order of the frames."""

    def __init__(self, stream: Stream, noise: Noise, opened: int = 0) -> None:
        """Each way has a generator of its own, seeded by the noise's seed and `opened`."""
        self._stream = stream
        self._rate = noise.rate
        self._up, self._down = (
            random.Random(f"{noise.seed}/{opened}/{way}") for way in ("up", "down")
        )
        self._rest = b""
        self.spoilt = 0

    def read(self, timeout: float) -> bytes:
        """Whole frames only, some of them spoilt; what is left of the last one waits for the
        rest."""
        *frames, self._rest = (self._rest + self._stream.read(timeout)).split(b"\0")
        return b"".join(self._spoil(frame, self._down) for frame in frames if frame)

    def write(self, data: bytes) -> None:
        """Sends the frames, some of them spoilt or left out."""
        spoilt = b"".join(self._spoil(frame, self._up) for frame in data.split(b"\0") if frame)
        if spoilt:
            self._stream.write(spoilt)

    def close(self) -> None:
        """Closes the stream underneath."""
        self._stream.close()

    def _spoil(self, frame: bytes, draw: random.Random) -> bytes:
        whole = b"\0" + frame + b"\0"
        if draw.random() >= self._rate:
            return whole
        self.spoilt += 1
        place = draw.randrange(len(frame))
        fault = draw.randrange(5)
        if fault == 0:
            return (
                b"\0"
                + frame[:place]
                + bytes([frame[place] ^ draw.randrange(1, 256)])
                + frame[place + 1 :]
                + b"\0"
            )
        if fault == 1:
            return b"\0" + frame[:place] + frame[place + 1 :] + b"\0"
        if fault == 2:
            return b""
        if fault == 3:
            return whole + whole
        return b"\0" + draw.randbytes(draw.randrange(1, 40)) + frame + b"\0"

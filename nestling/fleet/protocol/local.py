"""Letters between processes of one device, over a socket that only its owner can open. Nothing
heavy is imported here: the process that Flower starts for every message relays its letter through
it, and is gone again."""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from nestling.errors import InputError

MAX_BYTES = 2**31
START_SECONDS = 60.0
"""How long a letter waits for the worker to come up."""

ANSWER_SECONDS = 6 * 3600.0
"""How long it waits for the answer: a round on a small device can take its time."""

_LENGTH = struct.Struct("<Q")
_LONGEST = 100  # bytes of a path that every system takes for a socket
_TROUBLE = b"\x00nestling error\x00"


class LocalError(RuntimeError):
    """The worker did not answer, or said that it could not."""


def ask(
    path: str | Path, letter: bytes, start: float = START_SECONDS, patience: float = ANSWER_SECONDS
) -> bytes:
    """Gives a letter to the worker behind a socket; its answer."""
    with _connected(path, start) as line:
        line.settimeout(patience)
        try:
            _send(line, letter)
            answer = _receive(line)
        except (OSError, EOFError) as error:
            raise LocalError(f"the worker behind {path} did not answer: {error}") from error
    if answer.startswith(_TROUBLE):
        raise LocalError(answer.removeprefix(_TROUBLE).decode(errors="replace"))
    return answer


def serve(
    path: str | Path, handle: Callable[[bytes], bytes], ready: Callable[[], None] = lambda: None
) -> None:
    """Answers letters at a socket until the process ends. `handle` may be called from several
    threads."""
    with serving(path, handle) as server:
        ready()
        server.serve_forever(poll_interval=0.5)


@contextlib.contextmanager
def serving(
    path: str | Path, handle: Callable[[bytes], bytes]
) -> Iterator[socketserver.BaseServer]:
    """A server of letters, bound and not yet answering. The socket is its owner's alone, and goes
    when the block ends."""
    place = _checked(path)
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    place.unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        server = _Server(str(place), _handler(handle))
    finally:
        os.umask(before)
    try:
        yield server
    finally:
        server.server_close()
        place.unlink(missing_ok=True)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 32


def _handler(handle: Callable[[bytes], bytes]) -> type[socketserver.BaseRequestHandler]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            # Whoever asked may be gone by the time there is an answer; the result is on the disk,
            # and the next one gets it.
            with contextlib.suppress(OSError, EOFError):
                self.request.settimeout(START_SECONDS)
                letter = _receive(self.request)
                try:
                    answer = handle(letter)
                except Exception as error:
                    answer = _TROUBLE + f"{type(error).__name__}: {error}"[:2000].encode()
                _send(self.request, answer)

    return Handler


def _connected(path: str | Path, start: float) -> socket.socket:
    until = time.monotonic() + start
    while True:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.connect(str(_checked(path)))
            return line
        except OSError as error:
            line.close()
            if time.monotonic() >= until:
                raise LocalError(f"there is no worker behind {path}: {error.strerror}") from error
            time.sleep(0.1)


def _checked(path: str | Path) -> Path:
    if len(os.fsencode(str(path))) > _LONGEST:
        raise InputError(
            f"{path} is too long for a socket", field="--socket", fix=f"at most {_LONGEST} bytes"
        )
    return Path(path)


def _send(line: socket.socket, data: bytes) -> None:
    line.sendall(_LENGTH.pack(len(data)))
    line.sendall(data)


def _receive(line: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(line, _LENGTH.size))
    if length > MAX_BYTES:
        raise EOFError(f"{length} bytes are over the limit of {MAX_BYTES}")
    return bytes(_exactly(line, length))


def _exactly(line: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view, got = memoryview(data), 0
    while got < length:
        read = line.recv_into(view[got:])
        if not read:
            raise EOFError("the line was closed")
        got += read
    return data

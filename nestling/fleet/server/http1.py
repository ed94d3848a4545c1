"""HTTP/1.1 on a stream, spoken by h11. Heads that two readers might understand differently are
refused before h11 sees them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncIterator
from http import HTTPStatus

import h11

HEAD_LIMIT, CHUNK = 16 * 1024, 64 * 1024
HEAD_SECONDS, PIECE_SECONDS = 20.0, 60.0
"""Patience: for a head that has begun, for the next piece of a body."""

Head = h11.Request | h11.Response


class BadHead(Exception):
    """A head that is not read any further, with the status that says why."""

    def __init__(self, status: int, reason: str) -> None:
        """Made from the status to answer with and the reason in words."""
        super().__init__(reason)
        self.status, self.reason = status, reason


class HttpLine:
    """One connection, as its server or as its client (`h11.SERVER`, `h11.CLIENT`)."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        role: type[h11.CLIENT | h11.SERVER],
    ) -> None:
        """Made from both directions of an open stream and our part in it."""
        self.reader, self.writer = reader, writer
        self.http = h11.Connection(role)

    async def head(self, patience: float) -> Head | None:
        """The head of what comes next, for whose first byte there is `patience`; None at the end of
        the connection."""
        try:
            first = await asyncio.wait_for(self.reader.readexactly(1), patience)
            raw = first + await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), HEAD_SECONDS)
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError:
            raise BadHead(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head of the request is too long"
            ) from None
        _refuse_ambiguous(raw)
        try:
            self.http.receive_data(raw)
            event = self.http.next_event()
        except h11.RemoteProtocolError as error:
            raise BadHead(error.error_status_hint, str(error)) from None
        if isinstance(event, h11.InformationalResponse):
            return await self.head(patience)
        return event if isinstance(event, Head) else None

    async def body(self) -> AsyncIterator[bytes]:
        """The body that follows the head, piece by piece as it comes."""
        while True:
            try:
                event = self.http.next_event()
            except h11.RemoteProtocolError as error:
                raise ConnectionError(str(error)) from None
            if event is h11.NEED_DATA:
                self.http.receive_data(
                    await asyncio.wait_for(self.reader.read(CHUNK), PIECE_SECONDS)
                )
            elif isinstance(event, h11.Data):
                yield bytes(event.data)
            else:
                return

    async def send(self, event: h11.Event) -> None:
        """Writes a head, a piece of a body, or its end."""
        if data := self.http.send(event):
            self.writer.write(data)
            await asyncio.wait_for(self.writer.drain(), PIECE_SECONDS)

    def again(self) -> bool:
        """Whether the connection can carry another request, and makes it ready for it; one that
        came too early is not read."""
        if (
            self.http.our_state is not h11.DONE
            or self.http.their_state is not h11.DONE
            or self.http.trailing_data[0]
        ):
            return False
        self.http.start_next_cycle()
        return True

    def whole(self) -> bool:
        """Whether all of what the other side sends now has come."""
        return self.http.their_state is h11.DONE

    def usable(self) -> bool:
        """Whether neither side has ended it."""
        return not self.reader.at_eof() and not self.writer.is_closing()

    async def close(self) -> None:
        """Ends the connection, whatever state it is in."""
        self.writer.close()
        with contextlib.suppress(OSError, asyncio.TimeoutError, ssl.SSLError):
            await asyncio.wait_for(self.writer.wait_closed(), 5)


def headers_of(head: Head) -> dict[str, str]:
    """The headers by name in small letters."""
    return {name.decode(): value.decode("latin-1") for name, value in head.headers}


def _refuse_ambiguous(raw: bytes) -> None:
    """What h11 mends, as the standard allows, others may mend differently: bare line ends, folded
    lines, lists of lengths."""
    lines = raw[:-4].split(b"\r\n")
    if any(b"\n" in line or b"\r" in line or b"\0" in line for line in lines):
        raise BadHead(HTTPStatus.BAD_REQUEST, "bad line ends")
    names = [line.partition(b":")[0].lower() for line in lines[1:]]
    if any(not name or name[:1] in b" \t" for name in names):
        raise BadHead(HTTPStatus.BAD_REQUEST, "bad header")
    twice = {name for name in names if names.count(name) > 1} - {b"set-cookie"}
    if twice:
        raise BadHead(
            HTTPStatus.BAD_REQUEST, f"the header {min(twice).decode('latin-1')} comes twice"
        )
    sizes = [
        line.partition(b":")[2].strip(b" \t")
        for name, line in zip(names, lines[1:], strict=True)
        if name == b"content-length"
    ]
    if any(not re.fullmatch(rb"[0-9]{1,15}", size) for size in sizes):
        raise BadHead(HTTPStatus.BAD_REQUEST, "bad content-length")

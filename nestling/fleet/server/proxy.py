"""The only door to the server: a small reverse proxy that lets devices reach the fleet's paths and
nothing else.

Flower's SuperLink serves three interfaces on one port. Devices need one of them (/v1/fleet/); the
other two start runs and hand out the server's own task, and ask nobody who they are. So the
SuperLink listens on loopback only, and this stands in front of it:

- TLS ends here (a node's signature is inside the request, so that it passes on unharmed), and a new
  one begins to the SuperLink;
- a request passes if its path is one that a node needs, its body is small enough, and its key is
  registered and not revoked. The SuperLink checks whether the signature is right. Keys are looked
  up in folders, which may change at any time;
- what the SuperLink would store passes within the quota of the key (`quota`); whose key it is, is
  proven by the signature before anything is taken off the quota;
- everything else is refused with a reason, which the log repeats.

    python -m nestling.fleet.server.proxy FILE.json
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from email.utils import formatdate
from pathlib import Path

import h11

from nestling.fleet.care import certs
from nestling.fleet.care.disk import Room
from nestling.fleet.care.enclosure import Enclosure
from nestling.fleet.care.status import CLONED
from nestling.fleet.server.http1 import (
    CHUNK,
    HEAD_LIMIT,
    HEAD_SECONDS,
    BadHead,
    Head,
    HttpLine,
    headers_of,
)
from nestling.fleet.server.quota import Quotas
from nestling.fleet.server.sessions import Sessions
from nestling.harmless import harmless

log = logging.getLogger("nestling.fleet.server.proxy")

SWALLOWED = 256 * 1024
BODY_LIMIT = 16 * 1024 * 1024
"""Flower cuts what it sends into pieces of 5 MB."""
SMALL = 64 * 1024
"""The body of a request by which nothing is stored."""
IDLE, ANSWER_SECONDS, ALL_SECONDS = 90.0, 120.0, 900.0
"""Patience: between requests, for the SuperLink to answer, for all of a request."""
FRESH = 3.0
"""A connection to the SuperLink idle for longer is not used again: its server ends it after 5 s,
perhaps just then."""
PER_ADDRESS, CONNECTIONS = 256, 4096

FLEET = "/v1/fleet/"
CALLS = frozenset(
    [
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    ]
)
STORING = frozenset({"push-messages", "push-object"})
# only where keys are not asked for
SELF_REGISTERING = frozenset({"register-node", "unregister-node"})
ENTRIES = frozenset({"register-node", "activate-node"})
PASSED_ON = ("content-type", "accept", "user-agent", "traceparent", "tracestate")
HOP_BY_HOP = ("connection", "keep-alive", "server")
KEY, SIGNATURE, SIGNED = "flwr-public-key", "flwr-signature", "flwr-timestamp"

NO_KEY, UNKNOWN_KEY, REVOKED_KEY, CLONED_KEY = 9401, 9403, 9410, 9409
NO_PATH, TOO_MUCH = 9404, 9413
"""Codes in the refusals, in the form Flower's nodes print."""


@dataclass(frozen=True)
class Config:
    """Where the proxy listens, what stands behind it, and who may pass. Without `certificate` it
    speaks no TLS, without `devices` every key passes: both only ever on loopback. Without `quota`,
    the file of what devices may send, they may send what they like. Nothing is stored while less
    than `disk_floor` bytes are free at `disk`."""

    host: str
    port: int
    upstream: int  # the SuperLink's port on 127.0.0.1
    network: tuple[int, ...] = ()  # descriptors of the network in which that is
    certificate: str = ""
    key: str = ""
    upstream_ca: str = ""  # empty: no TLS to the SuperLink
    devices: str = ""
    revoked: str = ""
    body_limit: int = BODY_LIMIT
    quota: str = ""
    disk: str = "/"
    disk_floor: int = 0

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self), indent=1)


class ClosedDoor(Exception):
    """A request that does not pass."""

    def __init__(self, status: int, code: int, reason: str, who: str = "") -> None:
        """Takes the HTTP status, the code and reason that the node prints, and who it was, where
        known."""
        super().__init__(reason)
        # it may quote the request
        self.status, self.code, self.reason, self.who = status, code, harmless(reason), who


@dataclass
class Keys:
    """Who may pass: keys to names, read again whenever one of the folders changes."""

    devices: Path
    revoked: Path
    allowed: dict[str, str] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    _seen: object = None

    def refresh(self) -> bool:
        """Reads the folders where they have changed."""
        found = [
            (str(p), p.stat().st_mtime_ns)
            for folder in (self.devices, self.revoked)
            for p in sorted(folder.glob("*.pub"))
        ]
        if found == self._seen:
            return False
        self._seen = found
        self.gone = {key: holder.name for key, holder in certs.public_keys(self.revoked).items()}
        self.allowed = {
            key: holder.name
            for key, holder in certs.public_keys(self.devices).items()
            if key not in self.gone
        }
        return True

    def check(self, key: str | None, status: int) -> str:
        """The name of the device a key belongs to, or a refusal with this status."""
        if not key:
            raise ClosedDoor(
                status, NO_KEY, "the device shows no key, and this server asks for one"
            )
        if key in self.allowed:
            return self.allowed[key]
        if key in self.gone:
            raise ClosedDoor(
                status,
                REVOKED_KEY,
                f"the key of {self.gone[key]} is revoked",
                certs.fingerprint(key),
            )
        raise ClosedDoor(
            status,
            UNKNOWN_KEY,
            "the key is not registered with this server",
            certs.fingerprint(key),
        )


class Quiet:
    """Says a thing once a minute however often it happens."""

    def __init__(self, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes how many seconds a text is not repeated, and the clock to tell them by."""
        self.seconds, self.clock = seconds, clock
        self._last: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def say(self, text: str) -> None:
        """Logs it, with how often it was left out since."""
        now = self.clock()
        if now - self._last.get(text, -self.seconds) < self.seconds:
            self._left_out[text] += 1
            return
        more = self._left_out.pop(text, 0)
        if len(self._last) > 10_000:  # many addresses may knock
            self._last.clear()
        self._last[text] = now
        log.warning("%s%s", text, f" ({more} more like it)" if more else "")


class Proxy:
    """The proxy. `start`, then `serve_forever` of what it returns."""

    def __init__(self, config: Config) -> None:
        """Takes the configuration; keys are read and connections accepted from `start` on."""
        self.config = config
        self.keys = Keys(Path(config.devices), Path(config.revoked)) if config.devices else None
        self.quotas = Quotas(Path(config.quota)) if config.quota else None
        self.room = Room((Path(config.disk),), config.disk_floor)
        self.quiet, self.sessions = Quiet(), Sessions()
        self._idle: list[tuple[HttpLine, float]] = []
        self._open: dict[str, dict[HttpLine, bool]] = {}
        self._inner = _client_context(config.upstream_ca)
        self._outer: ssl.SSLContext | None = None
        self._stamps: list[int] = []

    async def start(self) -> asyncio.Server:
        """Listens."""
        if self.keys:
            self.keys.refresh()
        context = self._outer = _server_context(self.config)
        self._stamps = self._changed()
        patience = {"ssl_handshake_timeout": HEAD_SECONDS} if context else {}
        return await asyncio.start_server(
            self._guarded,
            _numbers(self.config.host),
            self.config.port,
            ssl=context,
            limit=HEAD_LIMIT,
            backlog=512,
            **patience,
        )

    async def watch_keys(self, seconds: float = 1.0) -> None:
        """Follows the folders of keys, and the server's own certificate."""
        while self.keys:
            await asyncio.sleep(seconds)
            self._renew()
            try:
                if self.keys.refresh():
                    log.info(
                        "keys: %d devices may join, %d are revoked",
                        len(self.keys.allowed),
                        len(self.keys.gone),
                    )
            except OSError as error:
                self.quiet.say(f"cannot read the keys: {error}")

    def _renew(self) -> None:
        """Takes a new certificate for the connections to come. It is tried out first: while the
        files are being copied, certificate and key may not fit."""
        try:
            stamps = self._changed()
            if self._outer is None or stamps == self._stamps:
                return
            _server_context(self.config)
            self._outer.load_cert_chain(self.config.certificate, self.config.key)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            self.quiet.say(f"cannot take the new certificate: {error}")
            return
        self._stamps = stamps
        log.info("the server's certificate was renewed, and is in use")

    def _changed(self) -> list[int]:
        files = (self.config.certificate, self.config.key)
        return [os.stat(file).st_mtime_ns for file in files if file]

    async def _guarded(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line, address = (
            HttpLine(reader, writer, h11.SERVER),
            str((writer.get_extra_info("peername") or ["?"])[0]),
        )
        lines = self._open.setdefault(address, {})
        lines[line] = False
        try:
            await self._serve(line, address)
        except ClosedDoor as refusal:
            self._tell(refusal, address)
            with contextlib.suppress(OSError, asyncio.TimeoutError, h11.LocalProtocolError):
                await _refuse(line, refusal)
        except (OSError, EOFError, asyncio.TimeoutError, ssl.SSLError, h11.LocalProtocolError):
            pass  # the other side went away, or stood still for too long
        finally:
            lines.pop(line, None)
            if not lines:
                self._open.pop(address, None)
            await line.close()

    async def _serve(self, line: HttpLine, address: str) -> None:
        """Requests of one connection, one after the other."""
        if not self._has_room(line, address):
            raise ClosedDoor(503, NO_PATH, "too many connections")
        while (request := await _head(line, IDLE)) is not None:
            await self._one(request, line, address)
            if not line.again():
                return

    def _has_room(self, line: HttpLine, address: str) -> bool:
        """Whether one more connection may stay. Where there are too many, the oldest over which no
        device was served has to go: of its address, or of the one that has the most of these. Who
        has no key, and holds connections open, does not keep others out."""
        mine = self._open[address]
        if len(mine) > PER_ADDRESS:
            return _ended_one(mine, line)
        if sum(map(len, self._open.values())) > CONNECTIONS:
            return _ended_one(max(self._open.values(), key=_unserved), line)
        return True

    async def _one(self, request: Head, line: HttpLine, address: str) -> None:
        """One request and its answer."""
        assert isinstance(request, h11.Request)  # noqa: S101 (what h11 gives a server)
        headers = headers_of(request)
        try:
            call, device = self._admit(request, headers)
            size = self._measure(call, device, headers)
        except ClosedDoor:
            await _swallow(line, headers)
            raise
        asked = self.sessions.clock()
        try:
            status = await asyncio.wait_for(
                self._forward(request, headers, line, address), ALL_SECONDS
            )
        finally:
            if self.quotas and call in STORING and not line.whole():
                self.quotas.give_back(device, size)  # of half a body nothing is stored
        if call != "health" and status == 200:
            self._open.get(address, {})[line] = True
        if call == "deactivate-node" and status == 200:
            self.sessions.left(device)
        elif call not in ENTRIES and status == 200:
            self.sessions.inside(device, asked)
        elif call == "activate-node":
            self.sessions.entering(device, status)
            log.info(
                "%s: %s from %s",
                "joined" if status == 200 else f"not let in ({status})",
                device,
                address,
            )

    def _admit(self, request: h11.Request, headers: dict[str, str]) -> tuple[str, str]:
        """What is called, and by which device; or a refusal."""
        method, path = request.method.decode(), request.target.decode()
        if request.http_version != b"1.1":
            raise ClosedDoor(400, NO_PATH, "not a request of HTTP/1.1")
        if (method, path) == ("GET", "/health"):
            return "health", ""
        call = path.removeprefix(FLEET)
        if method != "POST" or not path.startswith(FLEET) or call not in CALLS | SELF_REGISTERING:
            raise ClosedDoor(403, NO_PATH, f"{method} {path[:80]!r} is not for devices")
        if self.keys is None:
            return call, "a device"
        # A node prints the reason of a 400 and ends, where it is about to enter; later on it is a
        # 401 that makes it end, and begin again. A 403 it takes for the end of the run.
        status = 400 if call in ENTRIES else 401
        if call in SELF_REGISTERING:
            raise ClosedDoor(
                status,
                NO_KEY,
                "a device brings a key that is registered here; none registers itself",
            )
        name = self.keys.check(headers.get(KEY), status)
        if call in ENTRIES and self.sessions.cloned(name):
            raise ClosedDoor(
                status,
                CLONED_KEY,
                f"{CLONED}: another device uses the key of {name} at this moment",
                certs.fingerprint(headers[KEY]),
            )
        return call, name

    def _measure(self, call: str, device: str, headers: dict[str, str]) -> int:
        """The size of a body that may pass, taken off the device's quota; or a refusal."""
        size, most = _length(headers), self.config.body_limit if call in STORING else SMALL
        if size > most:
            raise ClosedDoor(413, TOO_MUCH, f"more than {most:,} bytes in one request", device)
        if call in STORING and self.room.trouble():
            # a node tries again until it passes
            raise ClosedDoor(503, NO_PATH, "the server's disk is full; try again")
        if self.quotas and call in STORING:
            if not certs.signed_by(headers[KEY], headers.get(SIGNED), headers.get(SIGNATURE)):
                raise ClosedDoor(401, NO_KEY, "the signature is not that of the key", device)
            if not self.quotas.take(device, size):
                most = self.quotas.allowed(device)
                raise ClosedDoor(
                    413, TOO_MUCH, f"it sends more than the {most:,} bytes a letter allows", device
                )
        return size

    async def _forward(
        self, request: h11.Request, headers: dict[str, str], line: HttpLine, address: str
    ) -> int:
        """Passes a request on and its answer back; the answer's status."""
        try:
            up = await self._connect()
        except OSError:
            raise ClosedDoor(503, NO_PATH, "the server is starting or gone; try again") from None
        try:
            kept = {k: v for k, v in headers.items() if k in PASSED_ON or k.startswith("flwr-")}
            kept |= {"host": f"127.0.0.1:{self.config.upstream}", "x-forwarded-for": address}
            kept |= {"content-length": headers.get("content-length", "0")}
            await up.send(
                h11.Request(method=request.method, target=request.target, headers=_encoded(kept))
            )
            await _copy(line, up)
            answer = await _head(up, ANSWER_SECONDS)
            if answer is None:
                raise ClosedDoor(502, NO_PATH, "the server went away; try again")
            assert isinstance(answer, h11.Response)  # noqa: S101 (what h11 gives a client)
            passed = {k: v for k, v in headers_of(answer).items() if k not in HOP_BY_HOP}
            await line.send(
                h11.Response(
                    status_code=answer.status_code, headers=_encoded(passed), reason=answer.reason
                )
            )
            await _copy(up, line)
        except BaseException:
            up.writer.close()
            raise
        if up.again():
            self._idle.append((up, time.monotonic()))
        else:
            await up.close()
        return answer.status_code

    async def _connect(self) -> HttpLine:
        """A connection to the SuperLink: one that was just used, or a new one."""
        now, stale = time.monotonic(), []
        while self._idle:
            line, since = self._idle.pop()
            if now - since < FRESH and line.usable():
                return line
            stale.append(line)
        for line in stale:
            line.writer.close()
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.config.upstream, ssl=self._inner, limit=CHUNK
        )
        return HttpLine(reader, writer, h11.CLIENT)

    def _tell(self, refusal: ClosedDoor, address: str) -> None:
        who = f" {refusal.who}" if refusal.who else ""
        self.quiet.say(f"refused {address}{who}: {refusal.reason} ({refusal.status})")


def _unserved(lines: Mapping[HttpLine, bool]) -> int:
    """Over how many of the connections no device was served."""
    return sum(not served for served in lines.values())


def _ended_one(lines: dict[HttpLine, bool], newest: HttpLine) -> bool:
    """Ends the oldest of them, but the newest, over which no device was served, if there is one."""
    for line, served in lines.items():
        if not served and line is not newest:
            del lines[line]
            line.writer.transport.abort()
            return True
    return False


async def _head(line: HttpLine, patience: float) -> Head | None:
    """The head of what comes next; None at the end of the connection."""
    try:
        return await line.head(patience)
    except BadHead as bad:
        raise ClosedDoor(bad.status, NO_PATH, bad.reason) from None


def _length(headers: dict[str, str]) -> int:
    """The announced size of the body; a body of unknown size is refused."""
    if "transfer-encoding" in headers:
        raise ClosedDoor(411, NO_PATH, "a body must announce its length")
    return int(headers.get("content-length", "0"))


async def _copy(source: HttpLine, sink: HttpLine) -> None:
    """A body, as it comes, and its end."""
    async for piece in source.body():
        await sink.send(h11.Data(data=piece))
    await sink.send(h11.EndOfMessage())


async def _swallow(line: HttpLine, headers: dict[str, str]) -> None:
    """Reads the start of a refused body: a connection that ends with bytes unread may take the
    refusal with it."""
    size = headers.get("content-length", "")
    with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
        await asyncio.wait_for(
            line.reader.readexactly(min(int(size) if size.isdigit() else 0, SWALLOWED)), 2
        )


async def _refuse(line: HttpLine, refusal: ClosedDoor) -> None:
    """Says no in the form that Flower's nodes know how to print."""
    body = json.dumps({"code": refusal.code, "detail": refusal.reason}).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    headers["date"] = formatdate(usegmt=True)
    await line.send(
        h11.Response(status_code=refusal.status, headers=_encoded(headers), reason=b"Refused")
    )
    await line.send(h11.Data(data=body))
    await line.send(h11.EndOfMessage())


def _encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


def _server_context(config: Config) -> ssl.SSLContext | None:
    if not config.certificate:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(config.certificate, config.key)
    return context


def _client_context(ca: str) -> ssl.SSLContext | None:
    return ssl.create_default_context(cafile=ca) if ca else None


def _numbers(host: str) -> list[str]:
    """A host's addresses; asked for here, since asyncio would ask in a thread, and a process that
    has had one cannot enter a network."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return sorted({str(info[4][0]) for info in found})


async def serve(config: Config) -> None:
    """Runs until it is cancelled."""
    proxy = Proxy(config)
    server = await proxy.start()
    # It listens where others are, and goes on to where the SuperLink is.
    Enclosure(tuple(config.network)).enter()
    kind = "TLS and keys" if proxy.keys else "neither TLS nor keys: this machine only"
    log.info("listening on %s:%d (%s)", config.host, config.port, kind)
    async with server:
        await asyncio.gather(server.serve_forever(), proxy.watch_keys())


def main() -> None:
    """The command: one argument, a file with the configuration."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    config = Config(**json.loads(Path(sys.argv[1]).read_text()))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # where the most there may be has no number
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor a connection
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(config))


if __name__ == "__main__":
    main()

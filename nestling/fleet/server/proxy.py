"""The only door to the server: a small reverse proxy that lets devices reach the fleet's paths and nothing else.

Flower's SuperLink serves three interfaces on one port. Devices need one of them (/v1/fleet/); the other two start runs and hand out
the server's own task, and ask nobody who they are. So the SuperLink listens on loopback only, and this stands in front of it:

- TLS ends here (a node's signature is inside the request, so that it passes on unharmed), and a new one begins to the SuperLink;
- a request passes if its path is one that a node needs, its body is small enough, and its key is registered and not revoked.
  The SuperLink checks whether the signature is right. Keys are looked up in folders, which may change at any time;
- everything else is refused with a reason, which the log repeats.

    python -m nestling.fleet.server.proxy FILE.json
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from email.utils import formatdate
from pathlib import Path

from nestling.fleet.care import certs

log = logging.getLogger("nestling.fleet.server.proxy")

HEAD_LIMIT, CHUNK = 16 * 1024, 64 * 1024
SWALLOWED = 256 * 1024
BODY_LIMIT = 16 * 1024 * 1024
"""Flower cuts what it sends into pieces of 5 MB."""
IDLE, HEAD_SECONDS, PIECE_SECONDS, ANSWER_SECONDS, ALL_SECONDS = 90.0, 20.0, 60.0, 120.0, 900.0
"""Patience: between requests, for a head, for the next piece of a body, for the SuperLink to answer, for all of a request."""
FRESH = 3.0
"""A connection to the SuperLink idle for longer is not used again: its server ends it after 5 s, perhaps just then."""
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
SELF_REGISTERING = frozenset({"register-node", "unregister-node"})  # only where keys are not asked for
ENTRIES = frozenset({"register-node", "activate-node"})
PASSED_ON = ("content-type", "accept", "user-agent", "traceparent", "tracestate")
KEY = "flwr-public-key"

NO_KEY, UNKNOWN_KEY, REVOKED_KEY, NO_PATH = 9401, 9403, 9410, 9404
"""Codes in the refusals, in the form Flower's nodes print."""

TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
PEER = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Config:
    """Where the proxy listens, what stands behind it, and who may pass. Without `certificate` it speaks no TLS, without `devices`
    every key passes: both only ever on loopback."""

    host: str
    port: int
    upstream: int  # the SuperLink's port on 127.0.0.1
    certificate: str = ""
    key: str = ""
    upstream_ca: str = ""  # empty: no TLS to the SuperLink
    devices: str = ""
    revoked: str = ""
    body_limit: int = BODY_LIMIT

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self), indent=1)


class ClosedDoor(Exception):
    """A request that does not pass."""

    def __init__(self, status: int, code: int, reason: str, who: str = "") -> None:
        """Takes the HTTP status, the code and reason that the node prints, and who it was, where known."""
        super().__init__(reason)
        self.status, self.code, self.reason, self.who = status, code, reason, who


@dataclass
class Head:
    """The first lines of a request or an answer."""

    first: str
    headers: dict[str, str]

    def length(self) -> int:
        """The announced size of the body; a body of unknown size is refused."""
        if "transfer-encoding" in self.headers:
            raise ClosedDoor(411, NO_PATH, "a body must announce its length")
        text = self.headers.get("content-length", "0")
        if not re.fullmatch(r"[0-9]{1,15}", text):
            raise ClosedDoor(400, NO_PATH, "bad content-length")
        return int(text)


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
        found = [(str(p), p.stat().st_mtime_ns) for folder in (self.devices, self.revoked) for p in sorted(folder.glob("*.pub"))]
        if found == self._seen:
            return False
        self._seen = found
        self.gone = certs.public_keys(self.revoked)
        self.allowed = {key: name for key, name in certs.public_keys(self.devices).items() if key not in self.gone}
        return True

    def check(self, key: str | None, status: int) -> str:
        """The name of the device a key belongs to, or a refusal with this status."""
        if not key:
            raise ClosedDoor(status, NO_KEY, "the device shows no key, and this server asks for one")
        if key in self.allowed:
            return self.allowed[key]
        if key in self.gone:
            raise ClosedDoor(status, REVOKED_KEY, f"the key of {self.gone[key]} is revoked", certs.fingerprint(key))
        raise ClosedDoor(status, UNKNOWN_KEY, "the key is not registered with this server", certs.fingerprint(key))


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
        self.quiet = Quiet()
        self._idle: list[tuple[PEER, float]] = []
        self._open: Counter[str] = Counter()
        self._inner = _client_context(config.upstream_ca)

    async def start(self) -> asyncio.Server:
        """Listens."""
        if self.keys:
            self.keys.refresh()
        context = _server_context(self.config)
        patience = {"ssl_handshake_timeout": HEAD_SECONDS} if context else {}
        return await asyncio.start_server(
            self._guarded, self.config.host, self.config.port, ssl=context, limit=HEAD_LIMIT, backlog=512, **patience
        )

    async def watch_keys(self, seconds: float = 1.0) -> None:
        """Follows the folders of keys."""
        while self.keys:
            await asyncio.sleep(seconds)
            try:
                if self.keys.refresh():
                    log.info("keys: %d devices may join, %d are revoked", len(self.keys.allowed), len(self.keys.gone))
            except OSError as error:
                self.quiet.say(f"cannot read the keys: {error}")

    async def _guarded(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = str((writer.get_extra_info("peername") or ["?"])[0])
        self._open[address] += 1
        try:
            if self._open[address] > PER_ADDRESS or self._open.total() > CONNECTIONS:
                raise ClosedDoor(503, NO_PATH, "too many connections")
            while await self._one(reader, writer, address):
                pass
        except ClosedDoor as refusal:
            self._tell(refusal, address)
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await _answer(writer, refusal)
        except (OSError, EOFError, asyncio.TimeoutError, ssl.SSLError):
            pass  # the other side went away, or stood still for too long
        finally:
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]
            await _close(writer)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> bool:
        """One request and its answer; False where the connection ends."""
        head = await _read_head(reader, IDLE)
        if head is None:
            return False
        try:
            call, device = self._admit(head)
            size = head.length()
            if size > self.config.body_limit:
                raise ClosedDoor(413, NO_PATH, f"{size:,} bytes are too many", device)
        except ClosedDoor:
            await _swallow(reader, head)
            raise
        status, keep = await asyncio.wait_for(self._forward(head, size, reader, writer, address), ALL_SECONDS)
        if call == "activate-node":
            log.info("%s: %s from %s", "joined" if status == 200 else f"not let in ({status})", device, address)
        return keep and head.headers.get("connection", "").lower() != "close"

    def _admit(self, head: Head) -> tuple[str, str]:
        """What is called, and by which device; or a refusal."""
        method, path, version = [*head.first.split(" "), "", ""][:3]
        if version != "HTTP/1.1" or head.first.count(" ") != 2:
            raise ClosedDoor(400, NO_PATH, "not a request of HTTP/1.1")
        if (method, path) == ("GET", "/health"):
            return "health", "-"
        call = path.removeprefix(FLEET)
        if method != "POST" or not path.startswith(FLEET) or call not in CALLS | SELF_REGISTERING:
            raise ClosedDoor(403, NO_PATH, f"{method} {path[:80]!r} is not for devices")
        if self.keys is None:
            return call, "a device"
        # A node prints the reason of a 400 and ends, where it is about to enter; later on it is a 401 that makes it end, and begin
        # again. It takes a 403 for the end of the run.
        status = 400 if call in ENTRIES else 401
        if call in SELF_REGISTERING:
            raise ClosedDoor(status, NO_KEY, "a device brings a key that is registered here; none registers itself")
        return call, self.keys.check(head.headers.get(KEY), status)

    async def _forward(
        self, head: Head, size: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str
    ) -> tuple[int, bool]:
        try:
            up_reader, up_writer = await self._connect()
        except OSError:
            raise ClosedDoor(503, NO_PATH, "the server is starting or gone; try again") from None
        try:
            kept = {k: v for k, v in head.headers.items() if k in PASSED_ON or k.startswith("flwr-")}
            kept |= {"host": f"127.0.0.1:{self.config.upstream}", "content-length": str(size), "x-forwarded-for": address}
            up_writer.write(_head_bytes(head.first, kept))
            await _copy(reader, up_writer, size, PIECE_SECONDS)
            answer = await _read_head(up_reader, ANSWER_SECONDS)
            if answer is None:
                raise ClosedDoor(502, NO_PATH, "the server went away; try again")
            again = await _relay(answer, up_reader, writer)
        except BaseException:
            up_writer.close()
            raise
        if again:
            self._idle.append(((up_reader, up_writer), time.monotonic()))
        else:
            await _close(up_writer)
        return int(answer.first.split(" ")[1]), again

    async def _connect(self) -> PEER:
        """A connection to the SuperLink: one that was just used, or a new one."""
        now, stale = time.monotonic(), []
        while self._idle:
            (reader, writer), since = self._idle.pop()
            if now - since < FRESH and not reader.at_eof() and not writer.is_closing():
                return reader, writer
            stale.append(writer)
        for writer in stale:
            writer.close()
        return await asyncio.open_connection("127.0.0.1", self.config.upstream, ssl=self._inner, limit=CHUNK)

    def _tell(self, refusal: ClosedDoor, address: str) -> None:
        who = f" {refusal.who}" if refusal.who else ""
        self.quiet.say(f"refused {address}{who}: {refusal.reason} ({refusal.status})")


async def _read_head(reader: asyncio.StreamReader, patience: float) -> Head | None:
    """The head of what comes next; None at the end of the connection. Whatever two readers might understand differently is refused."""
    try:
        first = await asyncio.wait_for(reader.readexactly(1), patience)
        raw = first + await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_SECONDS)
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError:
        raise ClosedDoor(431, NO_PATH, "the head of the request is too long") from None
    lines = raw[:-4].split(b"\r\n")
    if any(b"\n" in line or b"\r" in line or b"\0" in line for line in lines):
        raise ClosedDoor(400, NO_PATH, "bad line ends")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not TOKEN.fullmatch(name):
            raise ClosedDoor(400, NO_PATH, "bad header")
        word = name.decode().lower()
        if word in headers and word != "set-cookie":
            raise ClosedDoor(400, NO_PATH, f"the header {word} comes twice")
        headers[word] = value.strip(b" \t").decode("latin-1")
    return Head(lines[0].decode("latin-1"), headers)


async def _relay(answer: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Passes an answer on; whether both connections may be used again."""
    chunked = answer.headers.get("transfer-encoding", "").lower() == "chunked"
    size = answer.headers.get("content-length", "")
    again = (chunked or size.isdigit()) and answer.headers.get("connection", "").lower() != "close"
    dropped = ("connection", "keep-alive", "server")
    kept = {k: v for k, v in answer.headers.items() if k not in dropped} | {"connection": "keep-alive" if again else "close"}
    writer.write(_head_bytes(answer.first, kept))
    if chunked:
        await _copy_chunks(reader, writer)
    elif size.isdigit():
        await _copy(reader, writer, int(size), PIECE_SECONDS)
    else:
        while piece := await reader.read(CHUNK):
            writer.write(piece)
            await writer.drain()
    await writer.drain()
    return again


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, size: int, patience: float) -> None:
    """`size` bytes, as they come: `patience` is for each piece, not for the whole."""
    while size:
        piece = await asyncio.wait_for(reader.read(min(CHUNK, size)), patience)
        if not piece:
            raise ConnectionError("ended in the middle")
        writer.write(piece)
        await asyncio.wait_for(writer.drain(), patience)
        size -= len(piece)


async def _swallow(reader: asyncio.StreamReader, head: Head) -> None:
    """Reads the start of a refused body: a connection that ends with bytes unread may take the refusal with it."""
    size = head.headers.get("content-length", "")
    with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
        await asyncio.wait_for(reader.readexactly(min(int(size) if size.isdigit() else 0, SWALLOWED)), 2)


async def _copy_chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A body in chunks, up to the last one, which is empty."""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        writer.write(line)
        await _copy(reader, writer, size + 2, PIECE_SECONDS)
        if size == 0:
            return


async def _answer(writer: asyncio.StreamWriter, refusal: ClosedDoor) -> None:
    """Says no in the form that Flower's nodes know how to print."""
    body = json.dumps({"code": refusal.code, "detail": refusal.reason}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    writer.write(_head_bytes(f"HTTP/1.1 {refusal.status} Refused", headers | {"date": formatdate(usegmt=True)}) + body)
    await asyncio.wait_for(writer.drain(), HEAD_SECONDS)


def _head_bytes(first: str, headers: dict[str, str]) -> bytes:
    return "\r\n".join([first, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode("latin-1")


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError, asyncio.TimeoutError, ssl.SSLError):
        await asyncio.wait_for(writer.wait_closed(), 5)


def _server_context(config: Config) -> ssl.SSLContext | None:
    if not config.certificate:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(config.certificate, config.key)
    return context


def _client_context(ca: str) -> ssl.SSLContext | None:
    return ssl.create_default_context(cafile=ca) if ca else None


async def serve(config: Config) -> None:
    """Runs until it is cancelled."""
    proxy = Proxy(config)
    server = await proxy.start()
    kind = "TLS and keys" if proxy.keys else "neither TLS nor keys: this machine only"
    log.info("listening on %s:%d (%s)", config.host, config.port, kind)
    async with server:
        await asyncio.gather(server.serve_forever(), proxy.watch_keys())


def main() -> None:
    """The command: one argument, a file with the configuration."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    config = Config(**json.loads(Path(sys.argv[1]).read_text()))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(config))


if __name__ == "__main__":
    main()

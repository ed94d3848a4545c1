"""`nestling watch` of a simulation: its page on this machine, brought up to date while it runs.

    /           the page, as `nestling report` writes it
    /parts      what is on it now, as JSON; 204 where that is what the asker has seen

Nothing can be changed through it, and the run does not know of it: it reads what the run writes.
"""

from __future__ import annotations

import hashlib
import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from nestling.errors import InputError
from nestling.fleet.protocol.addresses import is_loopback
from nestling.report.page import PageParts, live_page, page_parts
from nestling.runfiles import (
    ANALYSIS,
    BOARDS,
    COVERAGE,
    EXPERIMENT,
    FEDERATION,
    METRICS,
    ROSTER,
    SUMMARY,
)

HOST, PORT = "127.0.0.1", 8445
_READ = (EXPERIMENT, FEDERATION, METRICS, BOARDS, SUMMARY, ANALYSIS, COVERAGE)
_SECONDS = 10.0
"""For one request: who trickles does not keep a thread."""


def is_simulation(target: str) -> bool:
    """Whether what is to be watched is the folder of a simulation, and not a fleet."""
    folder = Path(target)
    return (folder / EXPERIMENT).is_file() and not (folder / ROSTER).exists()


class LiveServer(ThreadingHTTPServer):
    """Shows the run in one folder."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        """Binds to this machine's own address."""
        super().__init__((HOST, port), _Handler)
        self.folder = folder
        self._lock = threading.Lock()
        self._made: tuple[str, PageParts] | None = None

    def server_bind(self) -> None:
        """Binds without looking up this machine's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, int(self.server_address[1])

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{HOST}:{self.server_port}/"

    def parts(self) -> tuple[str, PageParts]:
        """The parts of the page, made anew where a file has changed, and a stamp of those files."""
        with self._lock:
            stamp = stamp_of(self.folder)
            if self._made is None or self._made[0] != stamp:
                self._made = (stamp, page_parts(self.folder))
            return self._made

    def handle_error(self, _request: object, _client_address: object) -> None:
        """Nothing: whoever asked has gone away."""


def stamp_of(folder: Path) -> str:
    """Changes with every file that the page is made of."""
    digest = hashlib.sha256()
    for name in _READ:
        try:
            found = (folder / name).stat()
            digest.update(f"{name} {found.st_mtime_ns} {found.st_size};".encode())
        except OSError:  # noqa: PERF203 (a file that is not there yet is no error)
            continue
    return digest.hexdigest()[:16]


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = _SECONDS
    server_version, sys_version = "nestling", ""

    def do_GET(self) -> None:
        # A web page that gives its own name the address of this machine must not read along.
        told = self.headers.get("Host", "")
        if not is_loopback(told.rpartition(":")[0] or told):
            return self._say(403, "text/plain", "this is for this machine only\n")
        asked = urlsplit(self.path)
        if asked.path not in ("/", "/parts"):
            return self._say(404, "text/plain", "/ is the page\n")
        stamp, parts = self.server.parts()
        if asked.path == "/":
            return self._say(200, "text/html", live_page(parts, stamp))
        if parse_qs(asked.query).get("seen") == [stamp]:
            return self._say(204, "application/json", "")
        return self._say(200, "application/json", json.dumps({"stamp": stamp, **parts.told()}))

    def _refuse(self) -> None:
        self._say(405, "text/plain", "this can only be looked at\n")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

    def _say(self, code: int, kind: str, text: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            *([("Allow", "GET")] if code == 405 else []),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the page asks every other second."""


@contextmanager
def showing(folder: Path, port: int = 0) -> Iterator[LiveServer]:
    """While the block lasts, the run in a folder is shown; port 0 is any that is free."""
    server = _bound(folder, port)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=_SECONDS)


def _bound(folder: Path, port: int) -> LiveServer:
    try:
        return LiveServer(folder, port)
    except OSError as error:
        if port == PORT:  # the usual one is another's; any will do
            return LiveServer(folder, 0)
        raise InputError(
            f"cannot listen on {HOST}:{port}: {error.strerror}", field="--port", fix="name another"
        ) from None

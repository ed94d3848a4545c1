"""Whether a fleet is well: a verdict on how a run stands, and a small server on loopback that tells
it.

    /health     ok, waiting or stalled, with the reason (503 where stalled)
    /metrics    counts for Prometheus
    /status     everything that `nestling watch` shows, as JSON

It runs in the process that supervises the run, and reads what the run writes: it answers whatever
becomes of the run. Nothing can be changed through it.

    python -m nestling.fleet.care.health [URL]              exit code 0: well
    python -m nestling.fleet.care.health --worker FOLDER    the same of a device that joined
"""

from __future__ import annotations

import argparse
import json
import logging
import socket
import socketserver
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from nestling.errors import InputError
from nestling.fleet.care import status
from nestling.fleet.protocol.addresses import is_loopback, join_address

log = logging.getLogger("nestling.fleet")

OK, WAITING, STALLED = "ok", "waiting", "stalled"
PORT = 8444
STALE, BUSY = 60.0, 900.0
"""Seconds without a word of a run that waits for others, and of one that computes, after which
something is wrong with it."""
SILENCE, TIMES = 60.0, 5.0
"""A round is slow when nobody has answered for this long, and for so many times what a round
usually takes."""
REMEMBERED = 3600.0
"""Seconds for which a cloned key is warned of after it was last refused."""
ASKERS, PER_ADDRESS, PATIENCE = 16, 8, 5.0
"""Requests at once, in all and of one address; seconds for all of one."""
LARGEST = 2**24

Parts = Mapping[str, Any]
"""What the supervisor knows: "trouble", in words, where the run cannot go on now, "programs",
"warnings", "greedy": the devices that sent more than they may, how many "times" that was told, and
why, and "disk": the bytes that are "free", and the "floor" below which no round begins."""


@dataclass(frozen=True)
class Verdict:
    """How a run is. `since` is a time (seconds since 1970), `missing` who has not answered in this
    round, `warnings` what a person should see to, whatever the state, `greedy` which devices sent
    more than they may, `disk` the bytes that are free and those that must be."""

    state: str
    reason: str
    round: int = 0
    since: float | None = None
    missing: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    greedy: dict[str, dict[str, Any]] = field(default_factory=dict)
    disk: dict[str, int] = field(default_factory=dict)


def judge(table: Mapping[str, Any], parts: Parts | None = None) -> Verdict:
    """The verdict on what `status.snapshot` found."""
    phase, since, doing = table["phase"], table["since"], table["doing"]
    round = int(doing.get("round") or table["round"])
    quiet = table["time"] - (table["written"] or table["time"])
    if phase == status.DONE or (phase is None and table["summary"]):
        return Verdict(OK, f"done: {table['round']} rounds", round, since)
    if parts and parts.get("trouble"):
        return Verdict(STALLED, str(parts["trouble"]), round, table["written"])
    if phase is None:
        return Verdict(WAITING, "the run has not begun", round)
    if phase == status.STOPPED:
        return Verdict(STALLED, str(doing.get("reason", "the run stopped")), round, since)
    if quiet > (BUSY if phase == status.MERGING else STALE):
        return Verdict(
            STALLED,
            f"the run has written nothing for {quiet:.0f} s (it was {phase})",
            round,
            table["written"],
        )
    if phase == status.GATHERING:
        return Verdict(
            WAITING, f"{doing['here']} of {doing['needed']} clients are there", round, since
        )
    if phase == status.MERGING:
        return Verdict(OK, f"after round {table['round']} of {table['rounds']}", round, since)
    return _of_round(table, doing, quiet)


def _of_round(table: Mapping[str, Any], doing: Mapping[str, Any], quiet: float) -> Verdict:
    seconds, silent, typical = (
        doing["seconds"] + quiet,
        doing["silent"] + quiet,
        table["totals"]["typical_seconds"],
    )
    began = table["time"] - seconds
    missing = [{**one, "since": began} for one in doing["missing"]]
    stands = (
        f"round {doing['round']} of {table['rounds']}: {doing['answered']} of "
        f"{len(doing['chosen'])} replies"
    )
    usual = max(SILENCE, TIMES * typical) if typical else doing["deadline"]
    if seconds >= doing["deadline"] and doing["answered"] < doing["needed"]:
        why = f"{stands} after {seconds:.0f} s, {doing['needed']} are needed; {_names(missing)}"
    elif silent >= min(usual, doing["deadline"]):
        why = f"{stands}, nobody answered for {silent:.0f} s; {_names(missing)}"
    else:
        return Verdict(OK, stands, doing["round"], began, missing)
    return Verdict(STALLED, why, doing["round"], began, missing)


def _names(missing: list[dict[str, Any]], most: int = 10) -> str:
    """Who has not answered, and which of them cannot be reached."""
    names = [f"{one['name']}{' (away)' if one['node'] is None else ''}" for one in missing]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"no reply from {', '.join(names[:most])}{more}"


def run_status(folder: Path, parts: Parts | None = None, begun: bool = False) -> dict[str, Any]:
    """What a folder tells, with the verdict on it."""
    table, parts = status.snapshot(folder, begun=begun), parts or {}
    seen = {name: parts[name] for name in ("greedy", "disk") if name in parts}
    warnings = [*parts.get("warnings", ()), *_clones(table)]
    verdict = replace(judge(table, parts), warnings=warnings, **seen)
    return {**table, "health": asdict(verdict), "programs": dict(parts.get("programs", {}))}


def _clones(table: Mapping[str, Any]) -> list[str]:
    """The keys that were used twice not long ago, each named once."""
    recent = (row for row in table["refusals"] if table["time"] - row["time"] < REMEMBERED)
    said = (str(row["reason"]) for row in recent)
    return sorted({reason for reason in said if reason.startswith(status.CLONED)})


class HealthServer(ThreadingHTTPServer):
    """Tells of the run in one folder. `parts` is asked every time."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, folder: Path, host: str, port: int, parts: Callable[[], Parts] = dict
    ) -> None:
        """Binds to an address, IPv6 where it has a colon, and answers at most `ASKERS` requests at
        once, and at most `PER_ADDRESS` of one address."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.folder, self.parts, self.host = folder, parts, host
        self._open: dict[Any, str] = {}  # request → address, the oldest first
        self._asked: set[Any] = set()  # those that were read, and are being answered
        self._lock = threading.Lock()

    def server_bind(self) -> None:
        """Binds without looking up this machine's name."""
        # The usual way asks the network for this machine's name, and waits where there is none.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = (
            str(self.server_address[0]),
            int(self.server_address[1]),
        )

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{join_address(self.host, self.server_port)}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a request. Where an address has too many, or all have, one must go:
        so many at once is no monitoring, and who trickles keeps nobody out."""
        with self._lock:
            same = [one for one, who in self._open.items() if who == client_address[0]]
            if len(same) >= PER_ADDRESS:
                self._end(min(same, key=self._asked.__contains__))
            elif len(self._open) >= ASKERS:
                self._end(self._silent())
            free = len(self._open) < ASKERS
            if free:
                self._open[request] = client_address[0]
        if free:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def _silent(self) -> Any:
        """Of those that have not asked yet the oldest one of the address that has most open; None
        where all have asked."""
        open_at = Counter(self._open.values())
        silent = [one for one in self._open if one not in self._asked]
        return max(silent, key=lambda one: open_at[self._open[one]], default=None)

    def _end(self, request: Any) -> None:
        """Hangs up on somebody, and frees the place."""
        if self._open.pop(request, None) is not None:
            _hang_up(request)

    def asked(self, request: Any) -> None:
        """A request was read."""
        with self._lock:
            self._asked.add(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers a request, within `PATIENCE`, and frees its place however that ends."""
        late = threading.Timer(PATIENCE, _hang_up, [request])
        late.daemon = True
        late.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            late.cancel()
            with self._lock:
                self._open.pop(request, None)
                self._asked.discard(request)

    def handle_error(self, _request: Any, _client_address: Any) -> None:
        """Writes a failed request to the debug log only: whoever asked may have gone away."""
        log.debug("health: a request failed", exc_info=True)


def _hang_up(request: socket.socket) -> None:
    """Ends a connection; whoever reads from it sees its end."""
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: HealthServer
    timeout = PATIENCE
    server_version, sys_version = "nestling", ""

    def do_GET(self) -> None:
        self.server.asked(self.request)
        try:
            code, kind, text = self._answer(self.path.partition("?")[0])
        except (OSError, ValueError, KeyError, TypeError) as error:
            code, kind, text = (
                500,
                "text/plain",
                f"cannot read the run: {type(error).__name__}: {error}\n",
            )
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def _answer(self, path: str) -> tuple[int, str, str]:
        # A web page that gives its own name the address of this machine must not read along.
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if is_loopback(self.server.host) and not is_loopback(name):
            return 403, "text/plain", "this is for this machine only\n"
        if path not in ("/health", "/metrics", "/status"):
            return 404, "text/plain", "/health, /metrics or /status\n"
        table = run_status(self.server.folder, self.server.parts())
        if path == "/metrics":
            from nestling.fleet.care.metrics import exposition

            return 200, "text/plain; version=0.0.4", exposition(table)
        well = 503 if path == "/health" and table["health"]["state"] == STALLED else 200
        return (
            well,
            "application/json",
            json.dumps(table["health"] if path == "/health" else table, indent=1) + "\n",
        )

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: somebody looks every few seconds."""


@contextmanager
def telling(
    folder: Path, address: str, parts: Callable[[], Parts] = dict
) -> Iterator[HealthServer | None]:
    """While the block lasts, the run in a folder is told of at "HOST:PORT"; empty or "off":
    nowhere. Where the usual port is taken by another server of this machine, it is a free one."""
    if address in ("", "off"):
        yield None
        return
    host, port = parse_health(address)
    server = _bound(folder, host, port, parts)
    if not is_loopback(host):
        log.warning("health: %s can be read by everybody who reaches it", server.url)
    log.info("health: %s/health, /metrics; nestling watch %s", server.url, server.url)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=PATIENCE)


def parse_health(address: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT" or "PORT"; port 0 is any that is free."""
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535) or "/" in host:
        raise InputError(
            f"cannot read {address!r}", field="--health", fix="write HOST:PORT, a port, or off"
        )
    return host.strip("[]") or "127.0.0.1", int(port)


def _bound(folder: Path, host: str, port: int, parts: Callable[[], Parts]) -> HealthServer:
    try:
        return HealthServer(folder, host, port, parts)
    except OSError as error:
        if port == PORT and is_loopback(host):
            return HealthServer(folder, host, 0, parts)
        raise InputError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            field="--health",
            fix="name another, or off",
        ) from None


def fetch(url: str, seconds: float = PATIENCE) -> dict[str, Any]:
    """The table that a server tells at /status; `InputError` where there is none."""
    place = (
        url.rstrip("/").removesuffix("/status").removesuffix("/health").removesuffix("/metrics")
        + "/status"
    )
    fix = "use the address that `nestling serve` names as health"
    try:
        with _open(place, seconds) as answer:
            table = json.loads(answer.read(LARGEST + 1)[:LARGEST])
    except (OSError, ValueError) as error:
        raise InputError(
            f"{place} does not tell: {getattr(error, 'reason', error)}", field="RUN", fix=fix
        ) from None
    if not isinstance(table, dict) or "health" not in table or "doing" not in table:
        raise InputError(f"{place} is not the health address of a fleet", field="RUN", fix=fix)
    return table


def _open(url: str, seconds: float) -> Any:
    # No proxy of the environment: what is asked is this machine, or one that a person named.
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=seconds)


def check(url: str) -> tuple[bool, str]:
    """Whether a server is well, and what it says."""
    try:
        with _open(url.rstrip("/").removesuffix("/health") + "/health", PATIENCE) as answer:
            table = json.loads(answer.read(LARGEST))
    except urllib.error.HTTPError as error:
        return False, error.read(LARGEST).decode(errors="replace")
    except (OSError, ValueError) as error:
        return False, str(getattr(error, "reason", error))
    return table["state"] != STALLED, f"{table['state']}: {table['reason']}"


def check_worker(folder: Path) -> tuple[bool, str]:
    """Whether the worker of a device that joined is there."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.settimeout(PATIENCE)
    try:
        line.connect(str(folder / "socket"))
    except OSError as error:
        return False, f"no worker behind {folder / 'socket'}: {error.strerror or error}"
    finally:
        line.close()
    return True, "ok: the worker is there"


def main() -> int:
    """The command, for container engines and scripts."""
    parser = argparse.ArgumentParser(
        prog="python -m nestling.fleet.care.health",
        description="Whether a fleet is well: exit code 0.",
    )
    parser.add_argument(
        "url", nargs="?", default=f"http://127.0.0.1:{PORT}", help="the health address of a server"
    )
    parser.add_argument("--worker", type=Path, help="instead: the folder of a device that joined")
    given = parser.parse_args()
    well, said = check_worker(given.worker) if given.worker else check(given.url)
    print(said.strip())
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())

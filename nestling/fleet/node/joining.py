"""`nestling join`: a device's processes, kept alive: the worker, with torch and the data, and
Flower's node, which carries letters.

The node starts a new small process for every letter, which hands it to the worker over a socket
that only this user can reach. The first thing a device does is look at the server itself, because
what is usually wrong (a name, a port, a certificate, a clock) can be said much more clearly here
than by what comes later.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import secrets
import shutil
import ssl
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

from nestling.errors import InputError
from nestling.files import writing
from nestling.fleet.care import certs, logs
from nestling.fleet.care.expiry import trust_ending_soon
from nestling.fleet.care.processes import (
    Keeper,
    Program,
    flower_command,
    flower_env,
    free_port,
    need_flower,
    stopped_by_signals,
)
from nestling.fleet.node import profile
from nestling.fleet.node.data_files import EXPERIMENT, check_data
from nestling.fleet.protocol.addresses import is_loopback, join_address
from nestling.fleet.server.proxy import CLONED_KEY, NO_KEY, REVOKED_KEY, UNKNOWN_KEY

log = logging.getLogger("nestling.fleet")

TICK = 0.2
AHEAD, BEHIND = 5.0, 300.0
"""Seconds that a device's clock may differ from the server's before its signatures are refused."""
LOOK_FIRST, LOOK_LONGEST = 1.0, 30.0
WARN_SECONDS = 86400.0
SOCKET_PATH = 80
"""Characters: a socket's path may have about a hundred."""
LOOP_DAYS = 3650
"""How long the certificate lasts that the device's own processes know each other by."""
TASK_POLL = 0.3
"""Seconds between a node's looks for a new letter to start a process for: it is part of every
round's time."""

ADVICE = {
    f"[code: {NO_KEY}]": "the server wants a key: join with --certs",
    f"[code: {UNKNOWN_KEY}]": "refused: the server does not know this device's key (was its "
    "public half copied there?)",
    f"[code: {REVOKED_KEY}]": "refused: this device's key is revoked",
    f"[code: {CLONED_KEY}]": "refused: a cloned key: another device uses this device's key at this "
    "moment, or `nestling join` runs twice",
    "[code: 2001]": "the server wants a key: join with --certs",
    "[code: 2004]": "the server still holds this device's last session, which was cut off; it "
    "lets go within a minute",
    "[code: 1001]": "refused: this device's version of Flower does not fit the server's",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not one of the authority this "
    "device trusts",
    "Errno 98": "a port is taken",
    "terminated gracefully": "the server does not accept this device any more (a revoked key, or "
    "a wrong clock)",
}


@dataclass(frozen=True)
class JoinOptions:
    """What was asked for. `certs` None: neither TLS nor keys, to this machine only. `devices`: the
    file of the small devices that it speaks for as a gateway, instead of working itself."""

    host: str
    port: int
    device: str
    data: str
    name: str
    folder: Path
    certs: certs.DeviceFiles | None
    client: int | None = None
    memory: str = "100%"
    devices: Path | None = None


def join(options: JoinOptions) -> None:
    """Serves the server until it is stopped."""
    need_flower()
    if options.certs is None and not is_loopback(options.host):
        raise InputError(
            "without TLS and keys a device may only join a server on its own machine, not "
            f"{options.host}",
            field="--insecure",
            fix="get this device's keys from whoever runs the server (`nestling certs`), and "
            "name them with --certs",
        )
    profile.Allowance.parse(options.memory)
    with writing(options.folder, "--folder"):
        for part in (options.folder, options.folder / "log", options.folder / "flower"):
            certs.private_folder(part)
    found = profile.measure()
    log.info(
        "%s: %.2f GB of memory, %.2f GB free, %.1f GMAC/s on one of %d cores",
        *(
            options.name,
            found.ram / 2**30,
            found.available / 2**30,
            found.macs_per_second / 1e9,
            found.cores,
        ),
    )
    lines = logs.written_to(options.folder / "log" / logs.DEVICE_LOG)
    with lines, stopped_by_signals(), _sockets(options.folder) as place, Keeper() as keeper:
        ending = _Ending(options)
        ending.tell()
        if options.devices is None and options.data != EXPERIMENT:
            check_data(options.data)
        keeper.add(_worker(options, place))
        _wait_for_server(options, keeper)
        port = free_port()
        keeper.add(_node(options, place, port))
        keeper.add(_executor(options, port))
        trust = _Trust(options)
        while True:
            keeper.tick()
            ending.tell()
            if trust.changed():
                log.info("the authority's certificate was renewed: the node starts again with it")
                keeper.children["node"].ask_to_stop()
            time.sleep(TICK)


def default_folder(name: str) -> Path:
    """Where a device keeps what it must not forget."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "nestling" / name


def obstacle(options: JoinOptions, timeout: float = 10.0) -> str | None:
    """What stands between this device and the server, in words; None: nothing."""
    made: http.client.HTTPConnection
    if options.certs is None:
        made = http.client.HTTPConnection(options.host, options.port, timeout=timeout)
    else:
        trust = ssl.create_default_context(
            cafile=str(options.certs.ca) if options.certs.ca else None
        )
        made = http.client.HTTPSConnection(
            options.host, options.port, timeout=timeout, context=trust
        )
    where = join_address(options.host, options.port)
    try:
        made.request("GET", "/health")
        answer = made.getresponse()
        answer.read()
    except ssl.SSLCertVerificationError as error:
        return (
            f"{where} shows a certificate that this device does not trust: {error.verify_message}"
        )
    except (ssl.SSLError, http.client.HTTPException) as error:
        return (
            f"{where} does not speak {'TLS' if options.certs else 'plain HTTP'} as expected "
            f"({type(error).__name__})"
        )
    except OSError as error:
        return f"{where} cannot be reached: {error.strerror or error}"
    finally:
        made.close()
    if answer.status != 200:
        return f"{where} is not ready ({answer.status})"
    return _clock_trouble(answer.headers.get("date"))


def _clock_trouble(date: str | None) -> str | None:
    if date is None:
        return None
    # The date has whole seconds only, and took a moment to travel.
    ahead = time.time() - parsedate_to_datetime(date).timestamp()
    if -BEHIND < ahead < AHEAD + 1.5:
        return None
    word = "ahead of" if ahead > 0 else "behind"
    return (
        f"this device's clock is {abs(ahead):.0f} s {word} the server's, which then refuses "
        "its signatures; set it (NTP)"
    )


def _wait_for_server(options: JoinOptions, keeper: Keeper) -> None:
    told, delay = "", LOOK_FIRST
    while True:
        trouble = obstacle(options)
        if trouble is None:
            return
        if trouble != told:
            log.warning("%s; waiting", trouble)
            told = trouble
        until = time.monotonic() + delay
        while time.monotonic() < until:
            keeper.tick()
            time.sleep(TICK)
        delay = min(LOOK_LONGEST, delay * 2)


def _worker(options: JoinOptions, place: Path) -> Program:
    part = "worker" if options.devices is None else "gateway"
    command = [
        sys.executable,
        "-m",
        f"nestling.fleet.node.{part}",
        "--folder",
        str(options.folder / "worker"),
    ]
    command += ["--socket", str(place / "socket"), "--name", options.name]
    if options.devices is not None:
        command += ["--devices", str(options.devices)]
    else:
        command += ["--device", options.device, "--data", options.data, "--memory", options.memory]
        command += ["--client", str(options.client)] if options.client is not None else []
    return Program(
        "worker",
        command,
        options.folder / "log" / "worker.log",
        dict(os.environ),
        show=lambda _: True,
    )


def _node(options: JoinOptions, place: Path, port: int) -> Program:
    settings = options.folder / "node.toml"
    certs.write_private(
        settings,
        f"socket = {json.dumps(str(place / 'socket'))}\nname = "
        f"{json.dumps(options.name)}\n".encode(),
    )
    command = [
        flower_command("flower-supernode"),
        "--superlink",
        join_address(options.host, options.port),
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--node-config", str(settings)]
    command += ["--isolation", "process", "--superexec-auth-secret-file", str(_secret(options))]
    own = _own_loop(options)
    command += ["--ssl-certfile", str(own.certificate), "--ssl-keyfile", str(own.key)]
    command += ["--ssl-ca-certfile", str(own.ca)]
    if options.certs is None:
        command += ["--insecure"]
    else:
        command += ["--auth-supernode-private-key", str(options.certs.key)]
        command += ["--root-certificates", str(options.certs.ca)] if options.certs.ca else []
    env = flower_env(options.folder / "flower")
    return Program(
        "node",
        command,
        options.folder / "log" / "node.log",
        env,
        show=_News(),
        advice=_advice,
        sick=_sick,
    )


def _executor(options: JoinOptions, port: int) -> Program:
    command = [
        flower_command("flower-superexec"),
        "--runtime-api-address",
        f"127.0.0.1:{port}",
        "--root-certificates",
        str(_own_loop(options).ca),
    ]
    command += ["--superexec-auth-secret-file", str(_secret(options))]
    env = flower_env(options.folder / "flower") | {
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": str(TASK_POLL)
    }
    return Program("executor", command, options.folder / "log" / "executor.log", env)


def _secret(options: JoinOptions) -> Path:
    """Shared by the node and what starts processes for it, so that nobody else on this machine
    takes its letters."""
    path = options.folder / "secret"
    if not path.exists():
        certs.write_private(path, secrets.token_bytes(32))
    return path


def _own_loop(options: JoinOptions) -> certs.ServerFiles:
    """What the node shows to those who ask it for work on 127.0.0.1. They run the code that they
    are given there: without it that of any user of this machine who has the port before the
    node."""
    files = certs.ServerFiles(options.folder / "loop")
    if not files.certificate.exists():  # the last one to be written
        shutil.rmtree(files.root, ignore_errors=True)
        certs.make_loopback_authority(files.root, days=LOOP_DAYS)
    return files


def _sick(line: str) -> bool:
    """A node that an error has thrown out of its loop lives on without doing anything."""
    return line.startswith(("Traceback (most recent call last)", "ERROR"))


class _Trust:
    """The certificate of the authority that this device trusts, which Flower's node reads only as
    it starts."""

    def __init__(self, options: JoinOptions) -> None:
        self.path = options.certs.ca if options.certs else None
        self._seen = self._stamp()

    def changed(self) -> bool:
        before, self._seen = self._seen, self._stamp()
        return self._seen not in (0, before)

    def _stamp(self) -> int:
        return self.path.stat().st_mtime_ns if self.path and self.path.exists() else 0


class _Ending:
    """Tells the device's owner once a day that the authority which it trusts ends soon."""

    def __init__(self, options: JoinOptions) -> None:
        self.ca = options.certs.ca if options.certs else None
        self._due = 0.0

    def tell(self) -> None:
        """Says it, if a day has passed since it was looked at."""
        if self.ca is None or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + WARN_SECONDS
        if line := trust_ending_soon(self.ca):
            logs.tell(log, logs.Note(line, "expiry"), logging.WARNING)


class _News:
    """Which of the node's lines say something new: that it is in, and that the server is away, once
    each time."""

    def __init__(self) -> None:
        self.away = False

    def __call__(self, line: str) -> bool:
        if "Connection attempt failed" in line:
            news, self.away = not self.away, True
            return news
        if "SuperNode ID" in line or "Receiving" in line:
            news, self.away = self.away or "SuperNode ID" in line, False
            return news
        return False


def _advice(tail: str) -> str | None:
    return next((words for sign, words in ADVICE.items() if sign in tail), None)


@contextmanager
def _sockets(folder: Path) -> Iterator[Path]:
    """A folder for the worker's socket, readable by this user alone: the device's own, or a short
    one where that path is too long."""
    if len(os.fsencode(folder)) < SOCKET_PATH:
        yield folder
        return
    path = Path(tempfile.mkdtemp(prefix="nestling-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)

"""The gateway: one process that speaks for many boards.

    python -m nestling.tiny.link.gateway --config boards.json --socket PATH --journal FOLDER

It is sent jobs over a Unix socket and answers with results, boards side by side, one job at a time
for each. What it has learned is in its journal before it goes on: killed and started again, and
asked for the same job again, it goes on where it was, or answers at once if the job was finished.
Whoever asks may therefore simply ask again.

The configuration names the boards: {"kitchen": {"transport": "serial:/dev/ttyUSB0:115200", "every":
20}, …}.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import socketserver
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from nestling.errors import InputError, unknown
from nestling.tiny.link import bundle
from nestling.tiny.link.journal import JournalEntry
from nestling.tiny.link.line import BoardLine, BoardRefused, Counts, LineTiming, Lost
from nestling.tiny.link.orders import Orders, orders_from, orders_of
from nestling.tiny.link.session import Notes, Session, connect, first_state
from nestling.tiny.link.transport import Noise
from nestling.tiny.runtime.job import Done, Job

_LENGTH = struct.Struct("<I")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_LOOK_FOR_PARENT = 0.5  # seconds


# -- the configuration -----------------------------------------------------------------------------


@dataclass(frozen=True)
class BoardConfig:
    """How a board is reached, and how often its state is noted (in steps)."""

    transport: str
    every: int = 20
    noise: Noise | None = None
    timing: LineTiming = field(default_factory=LineTiming)


def read_config(path: Path) -> dict[str, BoardConfig]:
    """The boards of a configuration file."""
    try:
        boards = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"cannot be read: {error}",
            field=str(path),
            fix='a JSON object: {"name": {"transport": …}}',
        ) from error
    if not isinstance(boards, dict) or not boards:
        raise InputError(
            "names no boards", field=str(path), fix='a JSON object: {"name": {"transport": …}}'
        )
    return {name: _board_config(name, told) for name, told in boards.items()}


def _board_config(name: str, told: Any) -> BoardConfig:
    if not _NAME.fullmatch(name):
        raise InputError(
            f"{name!r} is no name for a board", field="config", fix="letters, digits, - and _"
        )
    if not isinstance(told, dict) or not isinstance(told.get("transport"), str):
        raise InputError(
            "says not how to reach the board", field=name, fix='{"transport": "unix:PATH"}'
        )
    parts: dict[str, Callable[..., Any]] = {"noise": Noise, "timing": LineTiming}
    try:
        return _made(
            BoardConfig,
            name,
            {k: _made(parts[k], f"{name}.{k}", v) if k in parts else v for k, v in told.items()},
        )
    except TypeError as error:
        raise InputError(str(error), field=name) from error


def _made(kind: Callable[..., Any], where: str, values: Mapping[str, Any]) -> Any:
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise unknown("setting", key, known, field=where)
    return kind(**values)


# -- the process -----------------------------------------------------------------------------------


class Log:
    """One JSON object per line."""

    def __init__(self, file: IO[str]) -> None:
        """Writes to an open file, from any thread."""
        self._file, self._lock = file, threading.Lock()

    def __call__(self, event: str, **facts: Any) -> None:
        """Writes one event with its time and its facts."""
        line = json.dumps({"time": round(time.time(), 3), "event": event, **facts})
        with self._lock:
            print(line, file=self._file, flush=True)


@dataclass
class _Desk:
    """One board's place in the gateway."""

    session: Session
    lock: threading.Lock = field(default_factory=threading.Lock)


class Gateway:
    """Runs jobs on boards and keeps the journal."""

    def __init__(self, boards: Mapping[str, BoardConfig], journal: Path, log: Log) -> None:
        """Makes a session for every board; none is spoken to yet."""
        self._journal, self._log = journal, log
        self._desks = {name: _Desk(self._session(name, board)) for name, board in boards.items()}

    def run(self, board: str, orders: Orders) -> tuple[Done, dict[str, Any]]:
        """The result of a job, and what it took. Waits while the board is at work on another."""
        desk = self._desk(board)
        with desk.lock:
            return self._run(board, desk.session, orders)

    def hello(self, board: str) -> dict[str, Any]:
        """A board's state."""
        desk = self._desk(board)
        with desk.lock:
            return asdict(desk.session.hello())

    def _desk(self, board: str) -> _Desk:
        if board not in self._desks:
            raise unknown("board", board, self._desks, field="board")
        return self._desks[board]

    def _session(self, name: str, board: BoardConfig) -> Session:
        line = BoardLine(connect(board.transport, board.noise), board.timing)
        return Session(line, board.every, lambda why: self._log("lost", board=name, why=why))

    def _run(self, board: str, session: Session, orders: Orders) -> tuple[Done, dict[str, Any]]:
        session.notes, session.line.counts = Notes(), Counts()
        begun = time.monotonic()
        entry = JournalEntry(self._journal, board, orders.digest, session.hello().data)
        found = entry.find()
        done = found.done
        facts: dict[str, Any] = {"board": board, "job": orders.digest[:16]}
        if done is None:
            start = found.state or first_state(orders)
            self._log("job", **facts, steps=len(orders.sizes), step=start.step + len(start.later))
            if found.state is None:
                entry.begin(start)
            done = session.run(orders, entry.checkpoint, start, entry.step)
            entry.finish(done)
        facts |= {
            **asdict(session.notes),
            **asdict(session.line.counts),
            "from_journal": found.done is not None,
        }
        facts["seconds"] = round(time.monotonic() - begun, 3)
        self._log("done", **facts, loss=done.loss)
        return done, facts


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, path: str, gateway: Gateway, log: Log) -> None:
        self.gateway, self.log = gateway, log
        super().__init__(path, _Handler)


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            while (data := _receive(self.request)) is not None:
                _send(self.request, self._answer(data))

    def _answer(self, data: bytes) -> bytes:
        try:
            return self._serve(*bundle.unpack(data))
        except InputError as error:
            kind = "refused" if isinstance(error, BoardRefused) else "input"
            return self._failed(kind, error.message, field=error.field, fix=error.fix)
        except Lost as error:
            return self._failed("lost", str(error))
        except Exception as error:  # one request must not end the service of the other boards
            return self._failed("failed", f"{type(error).__name__}: {error}")

    def _serve(self, facts: dict[str, Any], arrays: dict[str, Any]) -> bytes:
        what, board = facts.get("ask"), str(facts.get("board"))
        if what == "hello":
            return bundle.pack({"ok": True, "info": self.server.gateway.hello(board)}, {})
        if what == "run":
            done, notes = self.server.gateway.run(board, orders_from(arrays))
            told = {
                "ok": True,
                "loss": done.loss,
                "steps": done.steps,
                "samples": done.samples,
                "facts": notes,
            }
            return bundle.pack(told, {"weights": done.weights})
        raise InputError(f"unknown request {what!r}", field="ask", fix="run or hello")

    def _failed(self, kind: str, message: str, **more: Any) -> bytes:
        self.server.log(kind, message=message)
        return bundle.pack({"ok": False, "kind": kind, "message": message, **more}, {})


def _send(link: socket.socket, data: bytes) -> None:
    link.sendall(_LENGTH.pack(len(data)) + data)


def _receive(link: socket.socket) -> bytes | None:
    """The next message, or None at the end."""
    head = _exactly(link, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > bundle.MOST_BYTES:
        raise ConnectionError("a message that is too long")
    body = _exactly(link, length)
    if body is None:
        raise ConnectionError("the message ended early")
    return body


def _exactly(link: socket.socket, count: int) -> bytes | None:
    parts, missing = [], count
    while missing:
        part = link.recv(min(missing, 1 << 20))
        if not part:
            if missing < count:
                raise ConnectionError("the message ended early")
            return None
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def serve(
    config: Path, path: Path, journal: Path, parent: int | None = None, log: Log | None = None
) -> None:
    """Serves until it is told to stop (SIGTERM, SIGINT), or until `parent` is gone."""
    boards = read_config(config)
    journal.mkdir(parents=True, exist_ok=True)
    log = log or Log(sys.stderr)
    with _alone(journal):
        path.unlink(missing_ok=True)
        with _Server(str(path), Gateway(boards, journal, log), log) as server:
            path.chmod(0o600)
            stop = threading.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stop.set())
            threading.Thread(target=server.serve_forever, daemon=True).start()
            log("listening", socket=str(path), boards=sorted(boards))
            while not stop.wait(_LOOK_FOR_PARENT):
                if parent is not None and os.getppid() != parent:
                    log("orphaned", parent=parent)
                    break
            server.shutdown()


@contextlib.contextmanager
def _alone(journal: Path) -> Any:
    """Two gateways on one journal would speak to the same boards; the kernel lets go of the lock
    when a process dies."""
    with open(journal / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(
                "another gateway is at work with this journal",
                field="journal",
                fix="stop it, or take another",
            ) from error
        yield


# -- the client ------------------------------------------------------------------------------------


class GatewayClient:
    """Asks a gateway. May be used from many threads; a gateway that is gone is waited for
    (`patience` seconds) and asked again."""

    def __init__(self, path: str | Path, patience: float = 60.0) -> None:
        """Asks the gateway whose socket is at `path`; every request opens a connection of its
        own."""
        self._path, self._patience = str(path), patience

    def run(self, board: str, job: Job | Orders) -> Done:
        """The result of a job on a board."""
        return self.ask(board, job)[0]

    def ask(self, board: str, job: Job | Orders) -> tuple[Done, dict[str, Any]]:
        """The result of a job on a board, and what it took (RAM, ticks, frames sent again,
        restarts)."""
        orders = job if isinstance(job, Orders) else orders_of(job)
        facts, arrays = self._request({"ask": "run", "board": board}, orders.arrays())
        weights = arrays.get("weights")
        if weights is None or weights.shape != (orders.header.params,):
            raise InputError("the gateway's answer has not the weights of the job", field="gateway")
        return Done(weights.copy(), facts["loss"], facts["steps"], facts["samples"]), facts["facts"]

    def hello(self, board: str) -> dict[str, Any]:
        """A board's state."""
        return dict(self._request({"ask": "hello", "board": board}, {})[0]["info"])

    def _request(
        self, facts: dict[str, Any], arrays: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        data = bundle.pack(facts, arrays)
        end, pause = time.monotonic() + self._patience, _FIRST_PAUSE
        while True:
            try:
                answer = self._once(data)
                break
            except _NotThere as error:
                if time.monotonic() > end:
                    raise Lost(f"no gateway at {self._path}: {error}") from error
            except OSError:
                end = time.monotonic() + self._patience  # it was there a moment ago
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        told, found = bundle.unpack(answer)
        if not told.get("ok"):
            raise _error(told)
        return told, found

    def _once(self, data: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            try:
                link.connect(self._path)
            except OSError as error:
                raise _NotThere(str(error)) from error
            _send(link, data)
            answer = _receive(link)
            if answer is None:
                raise ConnectionError("the gateway has gone")
            return answer


class _NotThere(Exception):
    pass


def _error(told: Mapping[str, Any]) -> Exception:
    kind, message = told.get("kind"), str(told.get("message"))
    if kind == "lost":
        return Lost(message)
    if kind in ("input", "refused"):
        return (BoardRefused if kind == "refused" else InputError)(
            message, field=told.get("field"), fix=told.get("fix")
        )
    return RuntimeError(f"the gateway failed: {message}")


def main(words: list[str] | None = None) -> int:
    """Serves until told to stop; gives 0, or 2 where the configuration is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m nestling.tiny.link.gateway", description="Speaks for many boards."
    )
    parser.add_argument(
        "--config", type=Path, required=True, help="JSON file that names the boards"
    )
    parser.add_argument("--socket", type=Path, required=True, help="where it is asked")
    parser.add_argument("--journal", type=Path, required=True, help="folder for its notes")
    parser.add_argument("--parent", type=int, help="end when this process is no longer the parent")
    told = parser.parse_args(words)
    try:
        serve(told.config, told.socket, told.journal, told.parent)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What happens, as JSON lines that programs can read, one per record: when, how severe, what, and
in which round, of which client and node.

Several processes may write to one file (the server and its run): each line is one write under a
lock, and whoever finds the file full puts it aside. Nothing that looks like a key, a certificate or
a token gets into a file: whatever a library may log, it is hidden here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from nestling.errors import InputError

SERVER_LOG, DEVICE_LOG = "server.log.jsonl", "join.log.jsonl"
FIELDS = ("round", "client", "node", "name", "reason")
"""What a record may say besides its text."""

BELIEVING = "believing"
"""The event of a run whose server takes every device at its word."""

LIMIT, KEPT_BACK, TEXT = 10_000_000, 1000, 4000
HIDDEN = "[hidden]"

_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\Z)", re.DOTALL)
_SSH = re.compile(r"\b(?:ssh-[a-z0-9-]+|ecdsa-sha2-[a-z0-9-]+) AAAA[0-9A-Za-z+/=]+")
_NAMED = re.compile(
    r"""(?ix) \b(
    [a-z_-]*(?:token|secret|passwd|password|signature|public-key|private[-_]key|api[-_]?key)
    | authorization )
    (["']? \s* [=:] \s* ["']? (?:bearer\s+|basic\s+)?) ([^\s"',;}]{6,})"""
)
_HEX = re.compile(r"(?<![0-9A-Za-z])[0-9a-fA-F]{32,}(?![0-9A-Za-z])")
_BASE64 = re.compile(r"[0-9A-Za-z+/]{40,}={0,2}")
_LINE_OF_A_PROXY = re.compile(
    r"refused (?P<from>\S+?)(?: (?P<who>\S+))?: (?P<reason>.*) \((?P<status>\d{3})\)"
)


class Note(str):
    """A line for people that also says what it is about: `event`, and any of FIELDS."""

    facts: dict[str, Any]

    def __new__(cls, text: str, event: str, **facts: Any) -> Note:
        """Makes the text a string that carries its event and facts."""
        made = super().__new__(cls, text)
        made.facts = {"event": event, **facts}
        return made


def tell(log: logging.Logger, text: str, level: int = logging.INFO) -> None:
    """Logs a line, with what it is about where it is a `Note`."""
    log.log(level, "%s", text, extra={"facts": getattr(text, "facts", {})})


def hide(text: str) -> str:
    """The text without keys, certificates, tokens and what looks like one."""
    text = _PEM.sub(HIDDEN, text)
    text = _SSH.sub(HIDDEN, text)
    text = _NAMED.sub(rf"\1\2{HIDDEN}", text)
    text = _HEX.sub(HIDDEN, text)
    return _BASE64.sub(_unless_a_path, text)


def _unless_a_path(found: re.Match[str]) -> str:
    """Random bytes in base64 have small and capital letters and digits; a path seldom has all three
    without a dot or a hyphen."""
    text = found.group()
    random = all(re.search(kind, text) for kind in ("[a-z]", "[A-Z]", "[0-9]"))
    return HIDDEN if random else text


class Discreet(logging.Filter):
    """A filter for any handler: records pass with secrets hidden."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Hides secrets in the message and its traceback; every record passes."""
        record.msg, record.args = hide(record.getMessage()), ()
        if record.exc_info:
            record.exc_text = hide(logging.Formatter().formatException(record.exc_info))
        return True


class PlainLines(RotatingFileHandler):
    """A file of plain lines. What a full disk does not take is left out without a word: the
    terminal would fill with the same."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing."""

    def close(self) -> None:
        """Closes the file even where the disk does not take its last lines."""
        with contextlib.suppress(OSError):
            super().close()


class JsonLines(logging.Handler):
    """Writes records to a file. Until its folder is there, they are kept back: a run's folder must
    be empty when the run begins."""

    def __init__(self, path: Path, limit: int = LIMIT, needs: Path | None = None) -> None:
        """For the file at `path`, put aside when it has `limit` bytes; nothing is written before
        `needs` exists."""
        super().__init__()
        self.path, self.limit, self.needs = path, limit, needs or path.parent
        self._waiting: deque[bytes] = deque(maxlen=KEPT_BACK)

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a record as a line, and writes the queue if it can."""
        if not getattr(record, "echo", False):  # else another process wrote it already
            self._waiting.append(line_of(record))
        # A full disk must not end a run for the sake of its log; what was kept back is written when
        # there is room.
        with contextlib.suppress(OSError):
            self._write()

    def close(self) -> None:
        """Tries once more to write what is queued."""
        with contextlib.suppress(OSError):
            self._write()
        super().close()

    def _write(self) -> None:
        if not self._waiting or not self.needs.exists():
            return
        handle = self._locked()
        try:
            while self._waiting:
                size = os.fstat(handle).st_size
                if os.write(handle, self._waiting[0]) < len(self._waiting[0]):
                    os.ftruncate(handle, size)  # no half lines
                    raise OSError(errno.ENOSPC, "the disk is full")
                self._waiting.popleft()
        finally:
            os.close(handle)

    def _locked(self) -> int:
        """The file, this process's alone until it is closed, and not full."""
        while True:
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
            fcntl.flock(handle, fcntl.LOCK_EX)
            here = os.fstat(handle)
            try:
                current = os.stat(self.path).st_ino == here.st_ino
            except FileNotFoundError:
                current = False
            if current and here.st_size < self.limit:
                return handle
            if current:
                os.replace(self.path, self.path.with_name(self.path.name + ".1"))
            os.close(handle)


def line_of(record: logging.LogRecord) -> bytes:
    """A record as a line of JSON."""
    facts: dict[str, Any] = getattr(record, "facts", {}) or {}
    when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
    row: dict[str, Any] = {
        "time": when,
        "level": record.levelname.lower(),
        "event": str(facts.get("event", "log")),
    }
    for name, value in facts.items():
        if name != "event" and value is not None:
            exact = isinstance(value, (bool, float)) or (
                isinstance(value, int) and abs(value) < 2**53
            )
            # numbers of nodes are larger than JSON's readers can hold
            row[name] = value if exact else hide(str(value))[:TEXT]
    row["text"] = hide(record.getMessage())[:TEXT]
    if record.exc_info:
        row["trace"] = hide(logging.Formatter().formatException(record.exc_info))[-TEXT:]
    return (
        json.dumps({**row, "from": record.name, "pid": record.process}, ensure_ascii=False).encode()
        + b"\n"
    )


def facts_of_line(program: str, line: str) -> dict[str, Any]:
    """What a line that a child process printed is about."""
    found = _LINE_OF_A_PROXY.search(line) if program == "proxy" else None
    if found is None:
        return {"event": "program", "program": program}
    return {
        "event": "refused",
        "program": program,
        "address": found["from"],
        "key": found["who"],
        "reason": found["reason"],
        "status": int(found["status"]),
    }


@contextmanager
def written_to(
    path: Path, needs: Path | None = None, logger: str = "nestling"
) -> Iterator[JsonLines]:
    """While the block lasts, what `nestling` logs is written to the file as well, and the
    `InputError` that ends it, which the terminal is told by others."""
    root, handler = logging.getLogger(logger), JsonLines(path, needs=needs)
    before = root.level
    root.addHandler(handler)
    root.setLevel(min(before or logging.INFO, logging.INFO))
    try:
        yield handler
    except InputError as error:
        handler.emit(logging.LogRecord(logger, logging.ERROR, "", 0, str(error), (), None))
        raise
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()


def read(path: Path, last: int = 100, most: int = 1_000_000) -> list[dict[str, Any]]:
    """The last records of a file, oldest first; a line cut short is left out."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        lines = file.read().splitlines()[-last:]
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows

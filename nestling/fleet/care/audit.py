"""The audit log of a fleet's run: who joined, whose replies were accepted and as how many rows they
counted, what was refused and why, and the digest of the server's state after every merge.

Each line ends with a hash of itself and of the hash before it, so that a line that was changed,
taken out or put in is found. Lines at the end are vouched for by the checkpoint, whose state must
be the one that the log tells; whoever writes all of them anew is found by a copy of the last hash,
kept elsewhere. A line is written before the checkpoint that relies on it. A run that goes on after
a crash goes on with the log; what it merged and did not keep stays there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch import Tensor

from nestling.errors import InputError
from nestling.fleet.protocol.wire import Parcel
from nestling.message import Message
from nestling.runfiles import AUDIT, Record
from nestling.runs import checkpoint

STARTED, ACCEPTED, CLIPPED, MERGED = "started", "accepted", "clipped", "merged"
RETURNED = "returned"

_NOTHING = "0" * 64  # the hash before the first line
_LINE = re.compile(rb'(\{.*),"hash":"([0-9a-f]{64})"\}')


class BrokenChain(Exception):
    """A log is not what was written; the text says from which line on."""


class Audit:
    """The log at `path`, to be gone on with. `cut` are the bytes of a last line that a crash left
    unfinished, which is taken off."""

    def __init__(self, path: Path) -> None:
        """Goes on after the last line that is there; refuses a log whose last line is no line."""
        self.path, self.cut, self._last = path, 0, _NOTHING
        raw = path.read_bytes() if path.exists() else b""
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            self.cut = len(raw) - len(whole)
            os.truncate(path, len(whole))
        if whole:
            found = _LINE.fullmatch(whole.splitlines()[-1])
            if found is None:
                raise InputError(
                    f"the last line of {path} is damaged",
                    field="--out",
                    fix="restore the file, or move it away to begin another",
                )
            self._last = found[2].decode()

    def add(self, event: str, flush: bool = False, **facts: Any) -> None:
        """Adds a line; with `flush` it, and all before it, are on the disk before this returns."""
        when = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        row = {"event": event, "time": when, **facts}
        body = json.dumps(row, sort_keys=True, separators=(",", ":"))
        own = _hash(self._last, body.encode())
        with open(self.path, "a") as file:
            file.write(f'{body[:-1]},"hash":"{own}"}}\n')
            if flush:
                file.flush()
                os.fsync(file.fileno())
        self._last = own


def digest_of(parts: Mapping[str, Mapping[str, Tensor]]) -> str:
    """The digest of a state or a reply, whatever the order of its names."""
    ordered = {kind: dict(sorted(part.items())) for kind, part in sorted(parts.items())}
    return Parcel.of(Message(ordered)).digest


def read_audit(path: Path) -> list[Record]:
    """The lines of a log; `BrokenChain` names the first that is not as it was written."""
    *lines, rest = path.read_bytes().split(b"\n")
    found, last = [], _NOTHING
    if not lines:
        raise BrokenChain(f"{path} has no first line")
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None or _hash(last, match[1] + b"}") != match[2].decode():
            raise BrokenChain(
                f"line {number} of {path} is broken: it was changed, or a line before it was taken "
                "out or put in"
            )
        last = match[2].decode()
        found.append(json.loads(line))
    if rest:
        raise BrokenChain(f"line {len(lines) + 1} of {path} is cut short")
    return found


def check(folder: Path) -> list[Record]:
    """The lines of a run's log, each with its hash, after a look at whether the states that the run
    went on from, and its checkpoint, are those that the log tells."""
    path = folder / AUDIT
    if not path.exists():
        raise InputError(
            f"{folder} has no {AUDIT}",
            field="RUN",
            fix="name the run folder of a fleet; only fleets write it",
        )
    # First, since a run that is going on writes its line before its checkpoint.
    saved = checkpoint.load(folder, "RUN")
    lines, merged = read_audit(path), dict[int, set[str]]()
    for number, line in enumerate(lines, 1):
        if line["event"] == MERGED or number == 1:
            merged[line["round"]] = {line["state"]}
        elif line["event"] == RETURNED:
            # A crash may come between this line and the checkpoint with the state that it tells.
            merged.setdefault(line["round"], set()).add(line["state"])
        elif line["event"] == STARTED and line["round"] > 0:
            _same(line["round"], line["state"], merged, f"line {number} of {path}")
    if saved is not None:
        _same(saved[1].round, digest_of(saved[0]), merged, f"the end of {path}")
    return lines


def audit(folder: Path) -> list[str]:
    """What a run's log holds, in a few lines for people; `BrokenChain` where it is not whole."""
    try:
        return _told(folder / AUDIT, check(folder))
    except InputError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError):
        raise BrokenChain(f"{folder / AUDIT} holds lines that no run wrote") from None


def _told(path: Path, lines: list[Record]) -> list[str]:
    counts = Counter(line["event"] for line in lines)
    names = sorted({line["name"] for line in lines if line["event"] == "joined"})
    clipped = {
        (line["round"], line["client"])
        for line in lines
        if (line["event"] == CLIPPED and "round" in line)
        or (line["event"] == ACCEPTED and line["counts_as"] < line["rows"])
    }
    started = [line for line in lines if line["event"] == STARTED]
    rounds = [line["round"] for line in lines if line["event"] == MERGED]
    return [
        f"{path} is whole: {len(lines)} lines, the last hash is {lines[-1]['hash']}",
        f"starts: {len(started)}, the first at round {started[0]['round'] + 1}",
        f"clients that joined: {len(names)} ({', '.join(names[:20])}{', …' * (len(names) > 20)})",
        f"merges: {counts[MERGED]}, the last of round {max(rounds, default=0)}",
        f"replies accepted: {counts[ACCEPTED]}, of these clipped: {len(clipped)}",
        f"refusals: {counts['refused']}",
        *([f"returns to an earlier state: {counts[RETURNED]}"] if counts[RETURNED] else []),
    ]


def _same(round: int, state: str, merged: Mapping[int, set[str]], where: str) -> None:
    if round not in merged:
        raise BrokenChain(f"{where}: lines are missing, those of round {round} among them")
    if state not in merged[round]:
        raise BrokenChain(f"{where}: the state of round {round} is not the one that was merged")


def _hash(last: str, body: bytes) -> str:
    return hashlib.sha256(last.encode() + body).hexdigest()

"""One input tried: it is read or refused, in time, and with memory in proportion."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType

from tests.fuzz.formats import Format

SECONDS = 20
"""How long one small input may take, on a busy machine too."""

MEMORY = 200 * 2**20
"""Bytes that a process may grow by while it reads one input of at most 64 KB, or all of them."""


READ, REFUSED = "read", "refused"


class TooSlow(BaseException):
    """An input that took too long; no `except Exception` of a reader catches it."""


@dataclass
class Tally:
    """What became of the inputs of one format. `faults` are (seed, what): the seed makes the input
    again."""

    read: int = 0
    refused: int = 0
    faults: list[tuple[int, str]] = field(default_factory=list)

    def add(self, more: Tally) -> None:
        """Counts others along with these."""
        self.read, self.refused = self.read + more.read, self.refused + more.refused
        self.faults += more.faults


def tally(name: str, format: Format, seeds: Iterable[int]) -> Tally:
    """Tries the inputs of some seeds."""
    found = Tally()
    before = signal.signal(signal.SIGALRM, _too_slow)
    start = _resident()
    try:
        for seed in seeds:
            what = _measured(format, format.made(Random(f"{name} {seed}")))
            if _resident() > start + MEMORY:
                what = f"{MEMORY >> 20} MB of memory are kept"
                start = _resident()
            found.read += what == READ
            found.refused += what == REFUSED
            found.faults += [] if what in (READ, REFUSED) else [(seed, what)]
    finally:
        signal.signal(signal.SIGALRM, before)
    return found


def _measured(format: Format, data: bytes) -> str:
    """Compared with what the process holds just before: what it held earlier, and what the system
    takes back from it meanwhile, must not hide what an input costs."""
    _reset_peak()
    before = _resident()
    what = _tried(format, data)
    grown = _peak() - before
    return f"{grown >> 20} MB of memory" if grown > MEMORY else what


def _tried(format: Format, data: bytes) -> str:
    signal.alarm(SECONDS)
    try:
        format.read(data)
    except format.refuses as refusal:
        return _unsayable(refusal)
    except (Exception, TooSlow) as error:
        return f"{type(error).__name__}: {str(error)[:200]!r} at {_place(error)}"
    finally:
        signal.alarm(0)
    return READ


def _unsayable(refusal: Exception) -> str:
    """A refusal is shown to people and written to logs: it must be text that can be."""
    try:
        str(refusal).encode()
    except UnicodeEncodeError:
        return f"a refusal that no file takes: {str(refusal)[:80]!r}"
    return REFUSED if len(str(refusal)) < 5000 else f"a refusal of {len(str(refusal))} letters"


def _place(error: BaseException) -> str:
    found, where = error.__traceback__, ""
    while found is not None:
        path = found.tb_frame.f_code.co_filename
        if "/nestling/" in path or "/tests/" in path:
            where = f"{Path(path).name}:{found.tb_lineno}"
        found = found.tb_next
    return where


def _too_slow(_number: int, _frame: FrameType | None) -> None:
    raise TooSlow(f"more than {SECONDS} s")


def _peak() -> int:
    """The most memory in bytes that this process has really had since the last reset."""
    return _status("VmHWM")


def _resident() -> int:
    """What it has now."""
    return _status("VmRSS")


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")

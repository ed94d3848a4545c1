"""What a notebook shows while a run or a sweep goes on: one line, written anew as rounds end."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from nestling.report.pace import Pace, scores
from nestling.report.words import plural

OFTEN = 0.2
"""Seconds from one look at a round's clients to the next: a notebook takes only so many
messages."""


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. IPython is not imported to find out: where
    there is a kernel, it was."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None  # a terminal's shell has none


class NotebookLine:
    """A line under the cell that is running."""

    def __init__(self) -> None:
        """Puts it there."""
        from IPython.display import display

        self._shown = display(_as_text("setting up"), raw=True, display_id=True)

    def say(self, *parts: str) -> None:
        """What it says from now on; parts that are empty are left out."""
        self._shown.update(_as_text(" · ".join(filter(None, parts))), raw=True)


class RunLine:
    """How a run stands: its round, its scores so far, the time that is left."""

    def __init__(self) -> None:
        """Nothing is known yet but that it is set up."""
        self._line = NotebookLine()
        self._rounds = self._done = 0
        self._latest, self._looked = "", 0.0
        self._pace: Pace | None = None

    def started(self, rounds: int, done: int) -> None:
        """The rounds of the run, and those that are behind it."""
        self._rounds, self._done = rounds, done
        self._pace = Pace({"": rounds - done})
        self._say()

    def client(self, done: int, of: int) -> None:
        """So many clients of a round have answered."""
        if time.monotonic() - self._looked > OFTEN:
            self._looked = time.monotonic()
            self._say(f"clients {done}/{of}")

    def round(self, metrics: Mapping[str, Any]) -> None:
        """A round has ended."""
        assert self._pace is not None
        self._done = metrics["round"]
        self._pace.round("")
        self._latest = scores(metrics) or self._latest
        self._say()

    def ended(self) -> None:
        """The run is over, or was stopped."""
        if self._pace is not None:
            self._pace.over("")
            self._say(self._pace.took())

    def _say(self, more: str = "") -> None:
        left = self._pace.time_left() if self._pace is not None else ""
        self._line.say(f"round {self._done}/{self._rounds}", self._latest, more, left)


class SweepLine:
    """How a sweep stands: its runs, their rounds, what the latest one came to, the time that is
    left."""

    def __init__(self) -> None:
        """Nothing is known yet but that it is set up."""
        self._line = NotebookLine()
        self._latest = ""
        self._runs = self._done = self._failed = 0
        self._rounds = self._played = 0
        self._pace: Pace | None = None

    def started(self, runs: Mapping[str, tuple[int, int]]) -> None:
        """The rounds of every run, and those that are behind it."""
        self._pace = Pace({name: rounds - done for name, (rounds, done) in runs.items()})
        self._runs, self._rounds = len(runs), sum(rounds for rounds, _ in runs.values())
        self._done = sum(rounds <= done for rounds, done in runs.values())
        self._played = self._rounds - self._pace.more
        self._say()

    def round(self, name: str, metrics: Mapping[str, Any]) -> None:
        """A run has played a round."""
        assert self._pace is not None
        self._pace.round(name)
        self._played += 1
        self._latest = f"{name} {scores(metrics)}".rstrip()
        self._say()

    def cell(self, name: str, why: str) -> None:
        """A run has ended, or failed for a reason."""
        assert self._pace is not None
        self._done += not why and not self._pace.left[name]
        self._failed += bool(why)
        self._pace.over(name)
        self._say()

    def ended(self) -> None:
        """The sweep is over, or was stopped."""
        if self._pace is not None:
            self._say(self._pace.took())

    def _say(self, took: str = "") -> None:
        assert self._pace is not None
        self._line.say(
            f"{self._done} of {plural(self._runs, 'run')} done",
            f"{self._failed} failed" if self._failed else "",
            f"round {self._played}/{self._rounds}",
            self._latest,
            took or self._pace.time_left(),
        )


def _as_text(text: str) -> dict[str, str]:
    return {"text/plain": text}

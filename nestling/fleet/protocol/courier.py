"""Who carries bytes to nodes and back.

A courier promises little, as real ones do: a letter may be lost, and its answer then never comes; a
node may come back under another number. The engine above it re-sends, and recognises what it has
already had.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from nestling.harmless import harmless

Handle = Callable[[bytes], bytes]
"""What a node does with a letter (see `worker.Worker.handle`)."""


@dataclass(frozen=True)
class Failure:
    """A letter that got no answer, and why."""

    reason: str

    def __post_init__(self) -> None:
        """Makes the reason harmless: it may be the node's own word."""
        object.__setattr__(self, "reason", harmless(self.reason))


class Courier(Protocol):
    """Carries letters. None of its functions waits for a node."""

    def nodes(self) -> Collection[int]:
        """The nodes that can be reached now."""

    def push(self, letters: Mapping[int, bytes]) -> dict[int, str]:
        """Sends each node its letter; gives a ticket for each that was sent."""

    def pull(self, tickets: Collection[str]) -> list[tuple[str, bytes | Failure]]:
        """The answers that have come in for some tickets; each is given once."""


class LoopCourier:
    """Nodes in this process: letters are answered as they are sent. `workers` may change while a
    run goes on."""

    def __init__(self, workers: Mapping[int, Handle]) -> None:
        """Takes what answers for each node."""
        self.workers = dict(workers)
        self._numbers = itertools.count()
        self._answers: dict[str, bytes | Failure] = {}

    def nodes(self) -> Collection[int]:
        """The nodes that have a worker now."""
        return list(self.workers)

    def push(self, letters: Mapping[int, bytes]) -> dict[int, str]:
        """Has each letter answered at once, and keeps the answer under its ticket."""
        tickets = {}
        for node, letter in letters.items():
            tickets[node] = f"letter {next(self._numbers)}"
            self._answers[tickets[node]] = self._answer(node, letter)
        return tickets

    def pull(self, tickets: Collection[str]) -> list[tuple[str, bytes | Failure]]:
        """The answers under these tickets, which are then forgotten."""
        return [
            (ticket, self._answers.pop(ticket)) for ticket in tickets if ticket in self._answers
        ]

    def _answer(self, node: int, letter: bytes) -> bytes | Failure:
        if node not in self.workers:
            return Failure("the node is gone")
        try:
            return self.workers[node](letter)
        except Exception as error:
            return Failure(f"{type(error).__name__}: {error}")

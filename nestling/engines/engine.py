"""What an engine is: it runs the clients' work of a round and knows nothing of the method it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from nestling.training.client import ClientSide, Outcome, Site, Task


class ClientError(RuntimeError):
    """A client's work failed; says which client in which round."""


class Engine(Protocol):
    """Runs tasks. Outcomes may come in any order; equal tasks give equal outcomes on every engine."""

    def open(self, method: ClientSide, site: Site) -> None:
        """Gets ready to work for a site."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Works on one round's tasks."""

    def close(self) -> None:
        """Gives everything back."""


def failed(task: Task, reason: object) -> ClientError:
    """The error of a task, with the client it happened on."""
    return ClientError(f"client {task.client} failed in round {task.round}: {reason}")

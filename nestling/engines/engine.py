"""What an engine is: it runs the clients' work of a round and knows nothing of the method it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from nestling.training.client import ClientSide, Outcome, Site, Task


class ClientError(RuntimeError):
    """A client's work failed; says which client in which round."""


class Engine(Protocol):
    """Runs tasks. Outcomes may come in any order; equal tasks give equal outcomes on every engine.

    notes:     what the engine has to say of how it runs things (what could not be stacked, and why).
    lookahead: how many rounds may be started before the results of one are looked at; above 0 only where work is asynchronous.
    """

    notes: list[str]
    lookahead: int

    def open(self, method: ClientSide, site: Site) -> None:
        """Gets ready to work for a site."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Works on one round's tasks."""

    def close(self) -> None:
        """Gives everything back."""


def failed(task: Task, reason: object) -> ClientError:
    """The error of a task, with the client it happened on."""
    return ClientError(f"client {task.client} failed in round {task.round}: {reason}")


def blame(task: Task, error: Exception) -> Exception:
    """Any error as one that says which client it happened on."""
    return error if isinstance(error, ClientError) else failed(task, f"{type(error).__name__}: {error}")

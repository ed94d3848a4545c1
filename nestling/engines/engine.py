"""What an engine is: it runs the clients' work of a round and knows nothing of the method it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from nestling.training.client import ClientSide, Outcome, Site, Task
from nestling.where import Where


class ClientError(RuntimeError):
    """A client's work failed; says which client in which round."""


class Engine(Protocol):
    """Runs tasks. Outcomes may come in any order; equal tasks give equal outcomes on every engine.

    name:      what it is called where people read of it.
    where:     the device it computes on; it refuses data that lies on another.
    notes:     what the engine has to say of how it runs things (what could not be stacked or recorded, and why).
    lookahead: how many rounds may be started before the results of one are looked at; above 0 only where work is asynchronous.
    """

    name: str
    where: Where
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


def account(engine: Engine) -> dict[str, Any]:
    """What an engine really is and did: for the first lines of a run and for its summary."""
    found = {"name": engine.name, "device": str(engine.where.device), "precision": engine.where.precision}
    if engine.where.device.type == "cuda":
        found["device_name"] = torch.cuda.get_device_name(engine.where.device)
    recorded = getattr(engine, "recorded", None)
    return {**found, **(recorded() if recorded else {})}

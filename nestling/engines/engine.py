"""What an engine is: it runs the clients' work of a round and knows nothing of the method it
runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nestling.harmless import harmless
from nestling.training.client import ClientSide, Errand, Outcome, Site
from nestling.where import CPU, Where


class ClientError(RuntimeError):
    """A client's work failed; says which client in which round."""


@dataclass(frozen=True)
class Refusal:
    """An answer that does not count: whose, to which round, and why."""

    client: int
    round: int
    reason: str

    def __post_init__(self) -> None:
        """Makes the reason harmless: it may quote what the client sent."""
        object.__setattr__(self, "reason", harmless(self.reason))


@dataclass(frozen=True)
class BoardReport:
    """What an emulated board did for a job, and what the link went through."""

    facts: Mapping[str, Any]


Event = Outcome | Refusal | BoardReport
"""What an engine tells while it works."""


class Engine:
    """Runs errands. Events may come in any order; equal errands give equal outcomes on every
    engine.

    name:      what it is called where people read of it.
    where:     the device it computes on; it refuses data that lies on another.
    notes:     what the engine has to say of how it runs things (what could not be stacked or
               recorded, and why).
    lookahead: how many rounds may be started before the results of one are looked at; above 0 only
               where work is asynchronous.
    """

    name: str
    where: Where = CPU
    notes: list[str]
    lookahead: int = 0

    def open(self, method: ClientSide, site: Site) -> None:
        """Gets ready to work for a site."""
        raise NotImplementedError

    def run(self, errands: Sequence[Errand]) -> Iterator[Event]:
        """Works on one round's errands."""
        raise NotImplementedError

    def close(self) -> None:
        """Gives everything back."""
        raise NotImplementedError

    def discard(self, client: int, round: int) -> None:
        """A client's outcome was refused when it was looked at. Real devices keep what is theirs,
        and have to be told."""

    def recorded(self) -> dict[str, object]:
        """What of the work was recorded, for engines that record it."""
        return {}


def failed(errand: Errand, reason: object) -> ClientError:
    """The error of an errand, with the client it happened on."""
    return ClientError(f"client {errand.client} failed in round {errand.round}: {reason}")


def blame(errand: Errand, error: Exception) -> Exception:
    """Any error as one that says which client it happened on."""
    return (
        error
        if isinstance(error, ClientError)
        else failed(errand, f"{type(error).__name__}: {error}")
    )


def account(engine: Engine) -> dict[str, Any]:
    """What an engine really is and did: for the first lines of a run and for its summary."""
    found = {
        "name": engine.name,
        "device": str(engine.where.device),
        "precision": engine.where.precision,
    }
    if engine.where.device.type == "cuda":
        found["device_name"] = torch.cuda.get_device_name(engine.where.device)
    return {**found, **engine.recorded()}

"""Boards on serial lines, Unix sockets or TCP: the firmware's own protocol (`tiny.link.session`),
with the gateway's journal, which lets a board that lost its power go on where it was. A thread
waits for each board."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nestling.errors import InputError
from nestling.fleet.protocol.links import Facts, checked
from nestling.tiny.link.gateway import BoardConfig, Gateway, Log
from nestling.tiny.link.line import Lost
from nestling.tiny.link.orders import Orders
from nestling.tiny.runtime.job import Done

log = logging.getLogger("nestling.fleet")

PAUSE = 5.0
"""Seconds until a board that was not found is looked for again."""


@dataclass(frozen=True)
class SerialBoard:
    """How a board is reached, and its rows by class, which its firmware does not tell (None:
    unknown)."""

    config: BoardConfig
    counts: tuple[int, ...] | None = None


@dataclass(eq=False)
class _Desk:
    """One board's place: the job to do next, and what is known of the board."""

    board: SerialBoard
    facts: Facts | None = None
    bell: threading.Condition = field(default_factory=threading.Condition)
    next: tuple[Orders, Future[Done]] | None = None


class SerialDevices:
    """Gives jobs to boards. `journal`: the folder of what must survive this process."""

    def __init__(self, boards: Mapping[str, SerialBoard], journal: Path) -> None:
        """Sets up a gateway to all boards and a desk for each; `open` looks for them."""
        self._gateway = Gateway(
            {name: board.config for name, board in boards.items()}, journal, _Log()
        )
        self._desks = {name: _Desk(board) for name, board in boards.items()}
        self._closing = threading.Event()

    def open(self) -> None:
        """Starts a thread for each board, which looks for it until it is there."""
        for name, desk in self._desks.items():
            threading.Thread(
                target=self._attend, args=(name, desk), name=f"nestling-{name}", daemon=True
            ).start()

    def close(self) -> None:
        """Lets go. A thread that waits for a board's answer ends with the process."""
        self._closing.set()
        for desk in self._desks.values():
            with desk.bell:
                desk.bell.notify_all()

    def facts(self, device: str) -> Facts | None:
        """What a board said when it was first reached; None before that."""
        return self._desks[device].facts

    def run(self, device: str, orders: Orders) -> Future[Done]:
        """Lays a job on a board's desk; one that still lies there is cancelled."""
        future: Future[Done] = Future()
        desk = self._desks[device]
        with desk.bell:
            if desk.next is not None:
                desk.next[1].cancel()
            desk.next = (orders, future)
            desk.bell.notify_all()
        return future

    def _attend(self, name: str, desk: _Desk) -> None:
        """A board's thread: first who it is, then its jobs, one after the other."""
        while desk.facts is None and not self._closing.is_set():
            try:
                desk.facts = _facts(self._gateway.hello(name), desk.board.counts)
            except Exception as error:  # noqa: PERF203 (it is looked for until it is there)
                log.warning("%s: %s", name, error)
                self._closing.wait(PAUSE)
        while not self._closing.is_set():
            with desk.bell:
                if desk.next is None:
                    desk.bell.wait()
                taken, desk.next = desk.next, None
            if taken is not None and taken[1].set_running_or_notify_cancel():
                self._do(name, *taken)

    def _do(self, name: str, orders: Orders, future: Future[Done]) -> None:
        try:
            done, _ = self._gateway.run(name, orders)
            future.set_result(checked(done, orders))
        except (Lost, InputError) as error:
            future.set_exception(error)
        except Exception as error:
            future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


def _facts(info: Mapping[str, Any], counts: tuple[int, ...] | None) -> Facts:
    if not info["has_data"]:
        raise InputError(
            "the board has no readable data", fix="write the client's data to its flash"
        )
    if counts is not None and sum(counts) != info["rows"]:
        raise InputError(
            f"the board has {info['rows']} rows, its counts are of {sum(counts)}", field="counts"
        )
    channels, height, width = info["shape"]
    return Facts(info["rows"], (channels, height, width), counts, info["data"], info["region"])


class _Log(Log):
    """What the boards' side tells, among the other lines of this process."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def __call__(self, event: str, **facts: Any) -> None:
        log.debug("%s %s", event, facts)

"""Clients that train on microcontrollers, beside others that any other engine trains.

To the server a board is a client like any other: this engine takes the errands of clients whose
tier has a board, turns each phase into a job (see `tiny.lowering`), has the board do it, and gives
everybody else's errands to the engine it is built around. All of torch runs in this thread; what
waits for boards are threads that know of jobs only.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from nestling.devices.fleet import Fleet
from nestling.engines.engine import BoardReport, Engine, Event, blame
from nestling.errors import InputError
from nestling.planning.graph import Unsupported, lower
from nestling.tiny.lab import HOST, MOST_BOARDS, Lab, LabSettings, Report
from nestling.tiny.lowering import board_trained, check_targets, job_for
from nestling.tiny.runtime import native
from nestling.tiny.runtime.data import pack as pack_data
from nestling.tiny.runtime.job import Job
from nestling.training.client import Client, ClientSide, Errand, Outcome, Site, Working, working
from nestling.training.trainer import Trained
from nestling.world import Plan

LOOK_SECONDS = 1.0
"""How often to look whether the boards are still kept alive."""

KEPT_BLOBS = 256
"""Of how many clients the data are kept in the form that boards read."""


def with_boards(
    base: Engine, fleet: Fleet, *, verify: bool = True, home: Path | None = None
) -> Engine:
    """The engine for a fleet: `base`, and where some tier has a board, with boards beside it.
    `home` is where a run that is resumed finds what its boards had done."""
    if not any(tier.board for tier in fleet.tiers):
        return base
    emulated: dict[int, str] = {}
    for number, tier in enumerate(fleet.tiers):
        if tier.board and tier.board != HOST:
            if len(emulated) + fleet.count_of(number) > MOST_BOARDS:
                raise InputError(
                    f"more than {MOST_BOARDS} emulated boards",
                    field=f"fleet.tiers[{number}].count",
                    fix=f'make the tier smaller, or set its board to "{HOST}": the same '
                    "arithmetic without emulation",
                )
            emulated.update(
                {fleet.member(number, k): tier.board for k in range(fleet.count_of(number))}
            )
    return Boards(
        base, fleet, Lab(emulated, LabSettings(verify=verify), home) if emulated else None
    )


def check_boards(fleet: Fleet, plans: Mapping[str, Plan], y: Tensor) -> None:
    """Refuses, before anybody trains, targets and networks that no firmware knows."""
    for number, tier in enumerate(fleet.tiers):
        if tier.board and tier.name in plans:
            check_targets(y)
            piece = plans[tier.name].piece
            try:
                lower(piece.reference.network(piece.view), piece.reference.shape)
            except Unsupported as error:
                raise InputError(
                    f"clients of tier {tier.name!r} on {tier.board}: {error.message}",
                    field=f"fleet.tiers[{number}].board",
                    fix=error.fix,
                ) from error


@dataclass(eq=False)
class _Waiting:
    """One client's round, waiting for its board."""

    errand: Errand
    round: Working
    client: Client
    job: Job


class Boards(Engine):
    """Boards beside another engine. It reports every job that an emulated board did."""

    def __init__(self, base: Engine, fleet: Fleet, lab: Lab | None = None) -> None:
        """Stands around `base`, whose notes it shares; without a `lab` all boards are the C runtime
        on this machine."""
        self.base, self.fleet, self.lab = base, fleet, lab
        self.name, self.where = f"{base.name}, boards beside it", base.where
        self.notes = base.notes
        self._blobs: OrderedDict[int, bytes] = OrderedDict()
        self._crew: ThreadPoolExecutor | None = None
        self._waiting: dict[Future[Report], _Waiting] = {}

    def open(self, method: ClientSide, site: Site) -> None:
        """Opens the base engine, compiles the C runtime, and starts the lab if there is one."""
        self._method, self._site = method, site
        self.base.open(method, site)
        native.library()  # a missing compiler is reported before the first round, not in it
        self._crew = ThreadPoolExecutor(os.cpu_count() or 1)
        if self.lab is not None:
            self.lab.open()
            self.notes.append(self.lab.describe())

    def run(self, errands: Sequence[Errand]) -> Iterator[Event]:
        """Starts the boards' jobs first, then runs the base engine's errands and yields what boards
        finish meanwhile."""
        own = [errand for errand in errands if self.fleet.tier_of(errand.client).board]
        rest = [errand for errand in errands if not self.fleet.tier_of(errand.client).board]
        for errand in own:
            outcome = self._go_on(errand, working(self._method, errand, self._site), None)
            if outcome is not None:
                yield outcome
        for event in self.base.run(rest) if rest else ():
            yield event
            yield from self._finished(block=False)
        while self._waiting:
            yield from self._finished(block=True)

    def close(self) -> None:
        """Closes the lab, then the threads that waited for boards, then the base engine."""
        if self.lab is not None:
            self.lab.close()
        if self._crew is not None:
            self._crew.shutdown(wait=True, cancel_futures=True)
            self._crew = None
        self._waiting.clear()
        self.base.close()

    def _finished(self, block: bool) -> Iterator[Event]:
        """Goes on with the rounds whose boards have answered."""
        if self.lab is not None and self.lab.failure:
            raise RuntimeError(self.lab.failure)
        for future in wait(self._waiting, LOOK_SECONDS if block else 0, FIRST_COMPLETED).done:
            waited = self._waiting.pop(future)
            with self._blaming(waited.errand):
                report = future.result()
                yield from self._reported(waited.errand, report.facts)
                outcome = self._go_on(
                    waited.errand,
                    waited.round,
                    board_trained(waited.client, waited.job, report.done),
                )
            if outcome is not None:
                yield outcome

    def _go_on(self, errand: Errand, round: Working, told: Trained | None) -> Outcome | None:
        """A client's round up to its next job, which its board is given, or up to its outcome."""
        with self._blaming(errand):
            try:
                asked = next(round) if told is None else round.send(told)
                while not (job := job_for(*asked)).steps:
                    asked = round.send(board_trained(asked[0], job, None))
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome
            self._hand_out(_Waiting(errand, round, asked[0], job))
            return None

    def _hand_out(self, waiting: _Waiting) -> None:
        assert self._crew is not None
        client, job, blob = waiting.client, waiting.job, self._blob(waiting.client)
        tier = self.fleet.tier_of(client.id)
        if tier.board == HOST or self.lab is None:
            future = self._crew.submit(_on_host, job, blob)
        else:
            self.lab.check_fits(client.id, job, blob)
            future = _in_thread(self.lab.run, client.id, job, blob)
        self._waiting[future] = waiting

    def _blob(self, client: Client) -> bytes:
        """A client's data as its board has them in flash."""
        if client.id not in self._blobs:
            self._blobs[client.id] = pack_data(client.x.cpu(), client.y.cpu())
            while len(self._blobs) > KEPT_BLOBS:
                self._blobs.popitem(last=False)
        self._blobs.move_to_end(client.id)
        return self._blobs[client.id]

    def _reported(self, errand: Errand, facts: dict[str, Any]) -> Iterator[BoardReport]:
        if facts:
            yield BoardReport(
                {
                    "round": errand.round,
                    "tier": self.fleet.tier_of(errand.client).name,
                    **facts,
                }
            )
        if facts.get("restarts"):
            times = "once" if facts["restarts"] == 1 else f"{facts['restarts']} times"
            self.notes.append(
                f"round {errand.round}: the board of client {errand.client} ({facts['board']}) "
                f"started anew {times}"
            )

    @contextmanager
    def _blaming(self, errand: Errand) -> Iterator[None]:
        """Errors say which client on which board they are about."""
        tier = self.fleet.tier_of(errand.client)
        try:
            yield
        except InputError as error:
            field = error.field or f"fleet.tiers[{self.fleet.tier_index(errand.client)}].board"
            raise InputError(
                f"client {errand.client} on {tier.board}: {error.message}",
                field=field,
                fix=error.fix,
            ) from error
        except Exception as error:
            raise blame(errand, error) from error


def _in_thread(function: Callable[..., Report], *arguments: Any) -> Future[Report]:
    """Runs a function in a thread that nobody has to wait for: a board may take its time to come
    back."""
    future: Future[Report] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _on_host(job: Job, blob: bytes) -> Report:
    return Report(native.run_job(job, blob))

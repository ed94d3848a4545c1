"""A node that speaks for many small devices, each of which is one client to the method.

    python -m nestling.fleet.node.gateway --socket PATH --folder DIR --name NAME --devices FILE.toml

The devices cannot run Python, and their rows never leave them. The gateway does the part of the
method that is not training (what a client does with a message, what it replies), turns each phase
of training into a job (`tiny.lowering`), and has the device do it. Devices work side by side; one
that dies, or takes too long, costs its own reply only.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import queue
import signal
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from nestling.errors import InputError
from nestling.files import read_toml
from nestling.fleet.node.broker import Broker, check_device
from nestling.fleet.node.mqtt import ABSENCE, MqttDevices
from nestling.fleet.node.serial_devices import SerialBoard, SerialDevices
from nestling.fleet.node.worker import Begun, OwnRows, Worker, _Run, _said
from nestling.fleet.protocol import wire
from nestling.fleet.protocol.links import Facts, Link, board_shape
from nestling.fleet.protocol.local import serve
from nestling.fleet.protocol.wire import (
    Answer,
    Failed,
    Hello,
    JobDone,
    JobOrder,
    Member,
    Order,
    Welcome,
)
from nestling.harmless import harmless
from nestling.schema import check_keys
from nestling.tiny.link.gateway import BoardConfig
from nestling.tiny.link.line import LineTiming
from nestling.tiny.link.orders import orders_of
from nestling.tiny.lowering import board_trained, job_for
from nestling.tiny.runtime.job import Done, Job
from nestling.training.client import Client, Outcome, Site, Working, working

log = logging.getLogger("nestling.fleet")

DEADLINE = 600.0
GATHER_SECONDS = 15.0
MQTT = "mqtt"
LINKS = ("unix", "tcp", "serial")
ON_DEVICE = "device"
"""The data of a worker whose clients' rows are on their devices."""


# -- the devices of a gateway ----------------------------------------------------------------------


@dataclass(frozen=True)
class SmallDevice:
    """A device behind a gateway.

    link:     "mqtt", or where a board is: "serial:/dev/ttyUSB0:115200", "tcp:HOST:PORT",
              "unix:PATH".
    device:   the kind of device (a name of the catalogue) or tier it is; client: the number it
              would like to have.
    deadline: seconds that a job may take (0: the gateway's). counts: rows by class, where the
              method asks and a board does not say.
    every:    steps between two notes of a board's state.
    """

    name: str
    link: str = MQTT
    device: str = ""
    client: int | None = None
    deadline: float = 0.0
    counts: tuple[int, ...] | None = None
    every: int = 20


@dataclass(frozen=True)
class Devices:
    """All devices behind a gateway, and the broker of those that speak MQTT."""

    devices: tuple[SmallDevice, ...]
    deadline: float = DEADLINE
    absence: float = ABSENCE
    mqtt: Broker | None = None

    def links(self, home: Path) -> dict[str, Link]:
        """Who carries jobs to which device."""
        speak = [one.name for one in self.devices if one.link == MQTT]
        wired = {one.name: _board(one, self.deadline) for one in self.devices if one.link != MQTT}
        found: dict[str, Link] = {}
        if speak:
            if self.mqtt is None:
                raise InputError(
                    "there are devices that speak MQTT, and no broker",
                    field="mqtt",
                    fix="add a table [mqtt]",
                )
            found |= dict.fromkeys(speak, MqttDevices(self.mqtt, speak, self.absence))
        if wired:
            found |= dict.fromkeys(wired, SerialDevices(wired, home / "boards"))
        return found


def _board(device: SmallDevice, deadline: float) -> SerialBoard:
    # A board that is lost is looked for as long as its job may take: then there is another one, or
    # none.
    timing = LineTiming(revival=device.deadline or deadline)
    return SerialBoard(BoardConfig(device.link, device.every, timing=timing), device.counts)


def read_devices(path: Path) -> Devices:
    """The devices in a file: `deadline`, `absence`, a table [mqtt] and [[devices]] tables. Paths in
    it are relative to the file."""
    table = read_toml(path, "--devices")
    check_keys(table, [field.name for field in fields(Devices)], "")
    rows = table.get("devices", [])
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(
            "names no devices", field="devices", fix="write [[devices]] before each of them"
        )
    devices = tuple(_device(row, f"devices[{index}]") for index, row in enumerate(rows))
    if len({one.name for one in devices}) < len(devices):
        raise InputError("two devices of one name", field="devices", fix="give each its own")
    broker = _broker(table["mqtt"], path.parent) if "mqtt" in table else None
    return Devices(
        devices, _seconds(table, "deadline", DEADLINE), _seconds(table, "absence", ABSENCE), broker
    )


def _device(row: Mapping[str, Any], where: str) -> SmallDevice:
    check_keys(row, [field.name for field in fields(SmallDevice)], where)
    kinds: dict[str, Any] = {
        "link": str,
        "device": str,
        "client": int,
        "deadline": (int, float),
        "counts": list,
        "every": int,
    }
    for name, kind in kinds.items():
        if name in row and (not isinstance(row[name], kind) or isinstance(row[name], bool)):
            raise InputError(f"{row[name]!r}", field=f"{where}.{name}", fix="see docs/fleet.md")
    link = row.get("link", MQTT)
    if link != MQTT and link.partition(":")[0] not in LINKS:
        fix = "mqtt, serial:PORT:BAUD, tcp:HOST:PORT or unix:PATH"
        raise InputError(f"{link!r} is no link to a device", field=f"{where}.link", fix=fix)
    counts = row.get("counts")
    if counts is not None and not all(type(count) is int and count >= 0 for count in counts):
        raise InputError(
            f"{counts!r}", field=f"{where}.counts", fix="rows by class, all of them 0 or more"
        )
    name = check_device(row.get("name", ""), f"{where}.name")
    return SmallDevice(
        **{**row, "name": name, "counts": tuple(counts) if counts is not None else None}
    )


def _broker(row: Any, folder: Path) -> Broker:
    known = [field.name for field in fields(Broker)]
    if (
        not isinstance(row, dict)
        or not isinstance(row.get("host"), str)
        or not isinstance(row.get("password_file"), str)
    ):
        raise InputError(
            "says not how to reach the broker",
            field="mqtt",
            fix="host and password_file, and where needed port, ca",
        )
    check_keys(row, known, "mqtt")
    paths = {name: folder / row[name] for name in ("password_file", "ca") if name in row}
    return Broker(**{"user": "gateway", **row, **paths})


def _seconds(table: Mapping[str, Any], name: str, default: float) -> float:
    value = table.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise InputError(f"{value!r}", field=name, fix="seconds")
    return float(value)


# -- the gateway -----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Work:
    """A client's round under way. `future` is its device's next word, which is not waited for
    beyond `until`."""

    begun: Begun
    device: SmallDevice
    round: Lowered
    future: Future[Done]
    until: float


class FleetGateway(Worker):
    """The worker of a node that speaks for many devices: `name` is the node's, and NAME/DEVICE a
    client's."""

    def __init__(
        self,
        home: Path | str,
        name: str,
        devices: Devices,
        links: Mapping[str, Link],
        tell_classes: bool = False,
    ) -> None:
        """Makes each device a client, NAME/DEVICE, reached through the link in `links` under the
        device's name."""
        self.devices = {f"{name}/{one.name}": one for one in devices.devices}
        self.links, self.deadline = dict(links), devices.deadline
        self._all = tuple(
            Member(full, one.client, one.device) for full, one in self.devices.items()
        )
        super().__init__(home, self._all, ON_DEVICE, tell_classes=tell_classes)
        self._told: dict[str, Facts] = {}  # what the server was told of devices
        self._at_work: dict[int, _Work] = {}
        self._failed: dict[int, Failed] = {}
        self._serving = threading.Lock()
        # rung when a device has answered, and when a letter comes
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        # which run and round the letter that came last is about
        self._latest: tuple[str, int] | None = None

    def open(self, seconds: float = GATHER_SECONDS) -> None:
        """Connects to the devices, and waits a little for those that are there."""
        for link in self._distinct():
            link.open()
        until = time.monotonic() + seconds
        while len(self._known()) < len(self.devices) and time.monotonic() < until:
            time.sleep(0.1)
        missing = sorted(set(self.devices) - set(self._known()))
        log.info("%d of %d devices are there", len(self.devices) - len(missing), len(self.devices))
        if missing:
            log.warning(
                "not heard from: %s%s", ", ".join(missing[:20]), ", …" if len(missing) > 20 else ""
            )

    def close(self) -> None:
        """Closes every link once, however many devices share it."""
        for link in self._distinct():
            link.close()

    def handle(self, letter: bytes) -> bytes:
        """The answer to a letter. A letter about something else ends the wait for devices that are
        still at work; whoever asks for their results again gets them."""
        order = Order.from_bytes(letter) if wire.kind_of(letter) == "order" else None
        self._latest = (order.run, order.round) if order is not None and order.jobs else None
        self._bell.put(None)
        with self._serving:
            return (self._welcome(letter) if order is None else self._order(order)).to_bytes()

    def _distinct(self) -> list[Link]:
        return list({id(link): link for link in self.links.values()}.values())

    # -- who is there ------------------------------------------------------------------------------

    def _known(self) -> dict[str, Facts]:
        found = {full: self.links[one.name].facts(one.name) for full, one in self.devices.items()}
        return {full: facts for full, facts in found.items() if facts is not None}

    def _welcome(self, letter: bytes) -> Hello:
        self._told = self._known()
        self.members = tuple(member for member in self._all if member.name in self._told)
        return super()._welcome(letter)

    def _reported(self, member: Member, welcome: Welcome) -> Member:
        facts = self._told[member.name]
        if facts.shape != board_shape(welcome.shape):
            raise InputError(
                f"{member.name} has samples of {facts.shape}, the experiment's are "
                f"{board_shape(welcome.shape)}"
            )
        counts = _by_class(facts, welcome.classes) if self.tell_classes else None
        return replace(member, ram=facts.ram, rows=facts.rows, counts=counts)

    # -- orders ------------------------------------------------------------------------------------

    def _order(self, order: Order) -> Answer:
        if not order.jobs:
            return super()._order(order)
        answer = Answer(order.run, order.round)
        try:
            run = self._run(order.run)
        except Exception as error:  # whatever it is, the server must hear of it
            answer.error = _said(error)
            return answer
        if run is None or self._known() != self._told:
            # Devices that came, or came back with other data, are told of in the answer to a
            # welcome.
            answer.unknown = True
            return answer
        found = self._results(run, order)
        answer.results = [found[job.client] for job in order.jobs if job.client in found]
        return answer

    def _results(self, run: _Run, order: Order) -> dict[int, JobDone | Failed]:
        """What came of an order, client by client; those that are still at work when another letter
        comes are left out."""
        found: dict[int, JobDone | Failed] = {}
        for job in order.jobs:
            self._put(found, job.client, self._begin(run, order, job))
        while True:
            waiting = [self._at_work[job.client] for job in order.jobs if job.client not in found]
            for work in waiting:
                self._put(found, work.begun.job.client, self._go_on(run, work))
            left = [work for work in waiting if work.begun.job.client not in found]
            if not left or self._latest != (order.run, order.round):
                return found
            self._wait(min(work.until for work in left))

    @staticmethod
    def _put(
        found: dict[int, JobDone | Failed], client: int, result: JobDone | Failed | None
    ) -> None:
        if result is not None:
            found[client] = result

    def _wait(self, until: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._bell.get(timeout=max(0.0, until - time.monotonic()))
            while True:
                self._bell.get_nowait()

    def _begin(self, run: _Run, order: Order, job: JobOrder) -> JobDone | Failed | None:
        """Begins a client's round, unless its result is known or it is under way already (None)."""
        failed, work = self._failed.get(job.client), self._at_work.get(job.client)
        if failed is not None and failed.key == job.key:
            return failed  # asked again it would fail again, and others would wait for it
        if work is not None and work.begun.job.key == job.key:
            return None
        self._drop(job.client)
        if job.name not in self._told:
            return Failed(
                job.client,
                job.key,
                f"there is no {job.name!r} behind this node, or it has not been heard from",
            )
        try:
            begun = run.begin(order, job)
            if not isinstance(begun, Begun):
                return begun
            round = lowered(working(run.method, begun.errand, self._site(run, job)))
            return self._step(run, begun, round, None)
        except Exception as error:
            return self._fail(job, error)

    def _go_on(self, run: _Run, work: _Work) -> JobDone | Failed | None:
        """Goes on with a round whose device has answered, or has had its time."""
        job = work.begun.job
        try:
            if work.future.done():
                return self._step(run, work.begun, work.round, work.future.result())
            if time.monotonic() >= work.until:
                raise TimeoutError(
                    f"{work.device.name} gave no answer within "
                    f"{work.device.deadline or self.deadline:.0f} s"
                )
        except Exception as error:
            return self._fail(job, error)
        return None

    def _step(self, run: _Run, begun: Begun, round: Lowered, told: Done | None) -> JobDone | None:
        """A round up to its next job, which its device is given, or up to its end."""
        client = begun.job.client
        try:
            _, job = next(round) if told is None else round.send(told)
        except StopIteration as end:
            self._at_work.pop(client, None)
            return run.finish(begun, end.value)
        device = self.devices[begun.job.name]
        future = self.links[device.name].run(device.name, orders_of(job))
        self._at_work[client] = _Work(
            begun, device, round, future, time.monotonic() + (device.deadline or self.deadline)
        )
        future.add_done_callback(lambda _: self._bell.put(None))
        return None

    def _drop(self, client: int) -> None:
        work = self._at_work.pop(client, None)
        if work is not None:
            work.future.cancel()

    def _fail(self, job: JobOrder, error: Exception) -> Failed:
        self._drop(job.client)
        self._failed[job.client] = Failed(job.client, job.key, _said(error))
        log.warning("%s: %s", job.name, harmless(_said(error)))
        return self._failed[job.client]

    def _site(self, run: _Run, job: JobOrder) -> Site:
        world, _ = run.world(ON_DEVICE, job.network)
        facts = self._told[job.name]
        rows = _Rows(facts, world.classes)
        x = cast(Tensor, _Elsewhere(len(run.welcome.shape) + 1, torch.float32))
        y = cast(Tensor, _Elsewhere(*run.target_form))
        w = world
        return Site(x, y, rows, w.references, w.classes, w.train, w.seed, w.public, real=True)


# -- a round in jobs -------------------------------------------------------------------------------

Lowered = Generator[tuple[Client, Job], Done, Outcome]
"""A round under way: gives (client, job), is told what came of it, and ends with the outcome."""


def lowered(round: Working) -> Lowered:
    """A round, its phases as jobs."""
    try:
        asked = next(round)
        while True:
            job = job_for(*asked)
            done = (yield asked[0], job) if job.steps else None
            asked = round.send(board_trained(asked[0], job, done))
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome


@dataclass(frozen=True)
class _Elsewhere:
    """Rows that are on a device: a gateway knows their form only, and a method that wants to see
    them is refused."""

    dimensions: int
    dtype: torch.dtype

    def is_floating_point(self) -> bool:
        """As a tensor says it."""
        return self.dtype.is_floating_point

    @property
    def device(self) -> torch.device:
        """Where weights are made, which is here."""
        return torch.device("cpu")

    def dim(self) -> int:
        return self.dimensions

    def __getitem__(self, rows: object) -> NoReturn:
        raise InputError(
            "the method looks at a client's rows, and those of a small device never leave it",
            fix="take a method whose clients only train (fedavg, heterofl, fedprox, "
            "shared-average, …)",
        )


class _Rows(OwnRows):
    """How many rows a device has, and of which classes."""

    def __init__(self, facts: Facts, classes: int) -> None:
        counts = _by_class(facts, classes)
        y = (
            np.zeros(facts.rows, np.int64)
            if counts is None
            else np.repeat(np.arange(classes), counts)
        )
        super().__init__(y, classes)
        self._told = counts is not None

    def counts(self, client: int) -> np.ndarray:
        if not self._told:
            raise InputError(
                "the method asks for a client's rows by class, which its board does not tell",
                field="devices.counts",
                fix="give them in the gateway's file of devices",
            )
        return super().counts(client)


def _by_class(facts: Facts, classes: int) -> tuple[int, ...] | None:
    if facts.counts is None:
        return None
    if any(facts.counts[classes:]):
        raise InputError(
            f"a device has rows of {len(facts.counts)} classes, the experiment has {classes}"
        )
    return (*facts.counts[:classes], *([0] * (classes - len(facts.counts))))


def main(words: Sequence[str] | None = None) -> int:
    """The resident process of a gateway."""
    parser = argparse.ArgumentParser(
        prog="python -m nestling.fleet.node.gateway", description="Speaks for many small devices."
    )
    parser.add_argument("--socket", required=True, help="the socket to answer at")
    parser.add_argument(
        "--folder", type=Path, required=True, help="where it keeps what its clients keep"
    )
    parser.add_argument("--name", required=True, help="what the gateway is called")
    parser.add_argument(
        "--devices", type=Path, required=True, help="the TOML file that names the devices"
    )
    given = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        devices = read_devices(given.devices)
        gateway = FleetGateway(given.folder, given.name, devices, devices.links(given.folder))
        gateway.open()
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        serve(
            given.socket,
            gateway.handle,
            lambda: print(f"{given.name}: the gateway is ready", flush=True),
        )
    finally:
        gateway.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Devices on a network, reached through an MQTT broker: the gateway's side (`packets` says how they
talk, `mqtt_device` is the other side). One connection serves them all."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from nestling.errors import InputError
from nestling.fleet.node.broker import TOPICS, Broker, topic
from nestling.fleet.protocol.links import Facts, checked
from nestling.fleet.protocol.packets import ACK, JOB, PART, RESULT, Packet, Receiver, Sender
from nestling.harmless import harmless
from nestling.tiny.link import bundle
from nestling.tiny.link.line import Lost
from nestling.tiny.link.orders import Orders
from nestling.tiny.runtime.job import Done

log = logging.getLogger("nestling.fleet")

TICK = 0.5
CONNECT_SECONDS = 20.0
ABSENCE = 30.0
MOST_STATE = 2**16
"""Bytes of a device's word about itself."""


@dataclass(eq=False)
class _Transfer:
    """A job on its way to a device and back."""

    orders: Orders
    future: Future[Done]
    sender: Sender
    receiver: Receiver | None = None


@dataclass(eq=False)
class _Desk:
    """One device's place."""

    facts: Facts | None = None
    away: float = 0.0  # since when; 0: it is there
    transfer: _Transfer | None = None


class MqttDevices:
    """Gives jobs to devices behind a broker.

    absence: seconds after which a device that has taken leave, or was cut off, is not waited for
             any more.
    counts:  packets "down", "up", "again" (sent more than once), "late" (of a job that is not
             wanted any more) and "refused".
    """

    def __init__(self, broker: Broker, devices: Sequence[str], absence: float = ABSENCE) -> None:
        """Counts every device as away until it is heard from; `open` connects."""
        self.broker, self.absence = broker, absence
        self.counts: Counter[str] = Counter()
        self._desks = {name: _Desk(away=time.monotonic()) for name in devices}
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._answered = threading.Event()
        self._trouble = ""
        self._ticker: threading.Thread | None = None

    def open(self) -> None:
        """Connects, and says so when the broker will not have it."""
        # On a broker of others ids are free for all: nobody can take one that nobody can guess.
        self._client = self.broker.client(id=secrets.token_hex(11))
        self._client.on_connect, self._client.on_message = self._connected, self._heard
        self._client.loop_start()
        self._ticker = threading.Thread(target=self._tick, name="nestling-mqtt", daemon=True)
        self._ticker.start()
        where = f"{self.broker.host}:{self.broker.port}"
        if not self._answered.wait(CONNECT_SECONDS):
            log.warning("no broker answers at %s; trying on", where)
        if self._trouble:
            self.close()
            raise InputError(
                f"the broker at {where} refuses {self.broker.user!r}: {self._trouble}", field="mqtt"
            )

    def close(self) -> None:
        """Disconnects, and ends the jobs under way with an error."""
        self._closing.set()
        self._client.disconnect()
        self._client.loop_stop()
        if self._ticker is not None:
            self._ticker.join()
        with self._lock:
            for name, desk in self._desks.items():
                self._fail(desk, f"{name}: the gateway has closed")

    def facts(self, device: str) -> Facts | None:
        """What a device last said of itself; None before it did."""
        return self._desks[device].facts

    def run(self, device: str, orders: Orders) -> Future[Done]:
        """Sends a job, now or when the device is back; the one it had before is cancelled."""
        future: Future[Done] = Future()
        desk = self._desks[device]
        with self._lock:
            if desk.transfer is not None:
                desk.transfer.future.cancel()
            desk.transfer = _Transfer(orders, future, Sender(JOB, orders.number, orders.to_bytes()))
            if not desk.away:
                self._send(device, desk)
        return future

    # -- what comes --------------------------------------------------------------------------------

    def _connected(
        self, client: Any, _data: Any, _flags: Any, reason: Any, _properties: Any
    ) -> None:
        self._trouble = str(reason) if reason.is_failure else ""
        if reason.is_failure:
            log.error("the broker refuses %r: %s", self.broker.user, reason)
        else:
            # What devices say of themselves is retained: it comes again now, and jobs on their way
            # are sent again.
            client.subscribe([(f"{TOPICS}/+/up", 1), (f"{TOPICS}/+/state", 1)])
        self._answered.set()

    def _heard(self, _client: Any, _data: Any, message: Any) -> None:
        _, device, end = message.topic.split("/")
        desk = self._desks.get(device)
        if desk is None:
            return
        try:
            with self._lock:
                if end == "state":
                    self._state(device, desk, message.payload)
                else:
                    self.counts["up"] += 1
                    self._packet(device, desk, Packet.from_bytes(message.payload))
        except InputError as error:
            self.counts["refused"] += 1
            log.warning("%s: refused: %s", device, harmless(str(error)))

    def _state(self, device: str, desk: _Desk, payload: bytes) -> None:
        if not payload:
            desk.away = desk.away or time.monotonic()
            return
        if len(payload) > MOST_STATE:
            raise InputError(f"{len(payload)} bytes of state")
        desk.facts, desk.away = _facts(bundle.unpack(payload)[0]), 0.0
        if desk.transfer is not None:
            desk.transfer.sender.restart()
            self._send(device, desk)

    def _packet(self, device: str, desk: _Desk, packet: Packet) -> None:
        transfer = desk.transfer
        if transfer is None or packet.job != transfer.sender.job:
            if packet.kind == RESULT:
                self.counts["late"] += 1
                # It need not be sent again.
                self._publish(
                    device, Packet(ACK, packet.job, packet.count, packet.count).to_bytes()
                )
        elif packet.kind == ACK:
            transfer.sender.acknowledge(packet, time.monotonic())
            self._send(device, desk)
        elif packet.kind == RESULT:
            self._part(device, desk, transfer, packet)

    def _part(self, device: str, desk: _Desk, transfer: _Transfer, packet: Packet) -> None:
        if transfer.receiver is None or transfer.receiver.count != packet.count:
            most = 4 * transfer.orders.header.params + 4 * PART
            transfer.receiver = Receiver(packet.job, packet.count, most)
        ack = transfer.receiver.take(packet)
        if ack is not None:
            self._publish(device, ack.to_bytes())
        if not transfer.receiver.complete:
            return
        desk.transfer = None
        self.counts["again"] += transfer.sender.again
        try:
            found = _result(transfer.receiver.data(), transfer.orders)
        except InputError as error:
            self.counts["refused"] += 1
            _settle(transfer.future, error=InputError(f"{device}: {error.message}", fix=error.fix))
        else:
            _settle(transfer.future, found)

    # -- what goes ---------------------------------------------------------------------------------

    def _tick(self) -> None:
        while not self._closing.wait(TICK):
            with self._lock:
                for name, desk in self._desks.items():
                    self._look(name, desk)

    def _look(self, name: str, desk: _Desk) -> None:
        if desk.transfer is None:
            return
        if desk.transfer.future.cancelled():
            desk.transfer = None
        elif not desk.away:
            self._send(name, desk)
        elif time.monotonic() - desk.away > self.absence:
            self._fail(desk, f"{name} is gone")

    def _fail(self, desk: _Desk, why: str) -> None:
        if desk.transfer is not None:
            _settle(desk.transfer.future, error=Lost(why))
            desk.transfer = None

    def _send(self, device: str, desk: _Desk) -> None:
        if desk.transfer is not None:
            for packet in desk.transfer.sender.due(time.monotonic()):
                self._publish(device, packet)

    def _publish(self, device: str, packet: bytes) -> None:
        self.counts["down"] += 1
        self._client.publish(topic(device, "down"), packet, qos=1)


def _settle(future: Future[Done], done: Done | None = None, error: Exception | None = None) -> None:
    """Gives a future its end, unless nobody waits for it any more."""
    if future.set_running_or_notify_cancel():
        future.set_exception(error) if error is not None else future.set_result(done)  # type: ignore[arg-type]


def _facts(told: Mapping[str, Any]) -> Facts:
    """A device's word about itself, checked."""

    def whole(value: Any, most: int = 2**32) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < most:
            raise InputError(f"a state with {str(value)[:40]!r} in it")
        return value

    shape, counts = told.get("shape"), told.get("counts")
    if (
        not isinstance(shape, list)
        or len(shape) != 3
        or not (counts is None or isinstance(counts, list))
    ):
        raise InputError("a state without the form of the data")
    channels, height, width = (whole(side, 2**16) for side in shape)
    by_class = None if counts is None else tuple(whole(count) for count in counts)
    rows = whole(told.get("rows"), 2**16)
    if by_class is not None and sum(by_class) != rows:
        raise InputError(f"{rows} rows, and {sum(by_class)} by class")
    return Facts(
        rows, (channels, height, width), by_class, whole(told.get("crc")), whole(told.get("ram", 0))
    )


def _result(data: bytes, orders: Orders) -> Done:
    """What came of a job, from a device's bytes."""
    facts, arrays = bundle.unpack(data)
    if facts.get("job") != orders.digest:
        raise InputError("a result of another job")
    if "error" in facts:
        raise InputError(str(facts["error"])[:2000])
    loss, steps, samples = facts.get("loss"), facts.get("steps"), facts.get("samples")
    if not isinstance(loss, float) or not isinstance(steps, int) or not isinstance(samples, int):
        raise InputError("a result without loss, steps or samples")
    weights = arrays.get("weights", np.empty(0, np.float32))
    return checked(Done(weights.copy(), loss, steps, samples), orders)

"""A device on a network that trains with the C runtime and speaks MQTT: what firmware for such a
device does, in Python.

    python -m nestling.fleet.node.mqtt_device --broker HOST:PORT --ca ca.crt --name kitchen
        --password-file secret --data kitchen.data

Its data lie in a file as they would in flash (`tiny.runtime.data`), or in an .npz file of x and y.
It tells who it is (state), takes jobs (down) and gives results (up); see `packets` for how.
Whatever is lost is sent again, and a job that comes twice is done once. No torch is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np

from nestling.errors import InputError
from nestling.files import read_arrays
from nestling.fleet.node.broker import Broker, check_device, topic
from nestling.fleet.protocol.addresses import parse_server
from nestling.fleet.protocol.packets import ACK, JOB, RESULT, Packet, Receiver, Sender
from nestling.planning.descriptor import DescriptorSettings, Header
from nestling.tiny.link import bundle
from nestling.tiny.link.orders import Orders, orders_from
from nestling.tiny.runtime import native
from nestling.tiny.runtime.data import head_of, labels_of
from nestling.tiny.runtime.job import Done, Job, Step

TICK = 0.5
MOST_JOB = 2**26
REFUSED = 2


class MqttDevice:
    """One device.

    blob:   its data as a board has them in flash.
    ram:    bytes that a job may take (0: as many as it likes).
    crew:   who computes; several devices of one process may share it.
    """

    def __init__(
        self, name: str, blob: bytes, broker: Broker, ram: int = 0, crew: Executor | None = None
    ) -> None:
        """Checks the data and sets up the client; should it be cut off, the broker clears its
        state."""
        self.name, self.blob, self.ram = name, blob, ram
        native.FlashData(blob)  # refuses what cannot be read
        self.trouble = ""  # why the broker does not let it in
        self.jobs = 0
        self._crew = crew or ThreadPoolExecutor(1)
        self._lock = threading.Lock()
        self._receiver: Receiver | None = None
        self._sender: Sender | None = None
        self._client = broker.client()
        self._client.will_set(topic(name, "state"), b"", qos=1, retain=True)
        self._client.on_connect = self._connected
        self._client.on_subscribe = self._subscribed
        self._client.on_message = self._heard

    def start(self) -> MqttDevice:
        """Starts the client's thread, which connects; gives the device."""
        self._client.loop_start()
        return self

    def stop(self) -> None:
        """Takes leave: whoever watches knows that the device is gone."""
        self._client.publish(topic(self.name, "state"), b"", qos=1, retain=True)
        self._client.disconnect()
        self._client.loop_stop()

    def tick(self) -> None:
        """Sends again what has waited too long; to be called now and then."""
        with self._lock:
            self._send()

    def hello(self) -> bytes:
        """Who it is."""
        head = head_of(self.blob)
        counts = None if head.values else np.bincount(labels_of(self.blob)).tolist()
        return bundle.pack(
            {
                "rows": head.rows,
                "shape": list(head.shape),
                **({"counts": counts} if counts is not None else {}),
                "crc": head.crc,
                "ram": self.ram,
                "boot": secrets.token_hex(4),
            },
            {},
        )

    def _connected(
        self, client: Any, _data: Any, _flags: Any, reason: Any, _properties: Any
    ) -> None:
        self.trouble = str(reason) if reason.is_failure else ""
        if not reason.is_failure:
            client.subscribe(topic(self.name, "down"), qos=1)

    def _subscribed(self, client: Any, *_: Any) -> None:
        # Only now can it be reached: whoever hears of it may send at once.
        client.publish(topic(self.name, "state"), self.hello(), qos=1, retain=True)

    def _heard(self, _client: Any, _data: Any, message: Any) -> None:
        try:
            packet = Packet.from_bytes(message.payload)
            with self._lock:
                self._take(packet)
        except InputError as error:
            print(f"{self.name}: {error}", file=sys.stderr, flush=True)

    def _take(self, packet: Packet) -> None:
        if packet.kind == ACK and self._sender is not None:
            self._sender.acknowledge(packet, time.monotonic())
        elif packet.kind == JOB:
            self._part(packet)
        self._send()

    def _part(self, packet: Packet) -> None:
        if self._receiver is None or self._receiver.job != packet.job:
            # What it was at work on is not wanted any more.
            self._receiver, self._sender = Receiver(packet.job, packet.count, MOST_JOB), None
        before = self._receiver.complete
        ack = self._receiver.take(packet)
        if ack is not None:
            self._publish(ack.to_bytes())
        if (
            before
            and self._sender is not None
            and self._sender.finished
            and packet.index == packet.count - 1
        ):
            self._sender.restart()  # whoever asks again has lost the result
        if self._receiver.complete and not before:
            self.jobs += 1
            self._crew.submit(self._work, packet.job, self._receiver.data())

    def _work(self, number: int, data: bytes) -> None:
        told = {"job": hashlib.sha256(data).hexdigest()}
        try:
            done = self.compute(orders_from(bundle.unpack(data)[1]), lambda: self._wanted(number))
        except Unwanted:
            return
        except Exception as error:  # whatever it is, the gateway must hear of it
            why = (
                str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
            )
            result = bundle.pack({**told, "error": why[:2000]}, {})
        else:
            facts = {**told, "loss": done.loss, "steps": done.steps, "samples": done.samples}
            result = bundle.pack(facts, {"weights": done.weights})
        with self._lock:
            if self._wanted(number):
                self._sender = Sender(RESULT, number, result)
                self._send()

    def compute(self, orders: Orders, wanted: Callable[[], bool]) -> Done:
        """Does a job, unless it stops being wanted."""
        needed = len(orders.descriptor) + orders.header.arena
        if self.ram and needed > self.ram:
            fix = "a smaller view, a frozen prefix, or plain SGD"
            raise InputError(
                f"the job needs {needed} bytes of RAM, the device has {self.ram}", fix=fix
            )
        return native.run_job(job_of(orders, wanted), self.blob)

    def _wanted(self, number: int) -> bool:
        return self._receiver is not None and self._receiver.job == number

    def _send(self) -> None:
        for packet in self._sender.due(time.monotonic()) if self._sender is not None else ():
            self._publish(packet)

    def _publish(self, packet: bytes) -> None:
        self._client.publish(topic(self.name, "up"), packet, qos=1)


class Unwanted(Exception):
    """Another job has come."""


@dataclass(frozen=True)
class _Plan:
    """As much of a plan as the runtime needs."""

    descriptor: bytes
    arena: int
    header: Header


def job_of(orders: Orders, wanted: Callable[[], bool]) -> Job:
    """The orders in the form that the C runtime's host build takes."""
    header = orders.header
    mask = (
        None
        if orders.mask is None
        else np.unpackbits(orders.mask, bitorder="little")[: header.trained]
    )
    return Job(
        plan=cast(Any, _Plan(orders.descriptor.tobytes(), header.arena, header)),
        weights=orders.weights,
        settings=DescriptorSettings(
            **dict(
                zip(
                    (f.name for f in fields(DescriptorSettings)),
                    orders.settings.tolist(),
                    strict=True,
                )
            )
        ),
        steps=cast(Any, _Steps(orders, wanted)),
        anchor=orders.anchor,
        mask=mask,
        present=orders.present,
        targets=orders.targets,
    )


@dataclass(frozen=True)
class _Steps:
    """The steps of a job, as long as it is wanted."""

    orders: Orders
    wanted: Callable[[], bool]

    def __len__(self) -> int:
        return len(self.orders.sizes)

    def __iter__(self) -> Any:
        orders = self.orders
        for index, inner in enumerate(orders.inner.tolist()):
            if not self.wanted():
                raise Unwanted
            place = slice(int(orders.starts[index]), int(orders.starts[index + 1]))
            yield Step(
                orders.rows[place].astype(np.uint32),
                None if orders.shifts is None else orders.shifts[place],
                inner,
            )


def read_blob(path: Path) -> bytes:
    """A device's data: as it lies in flash, or x and y of an .npz file."""
    try:
        if path.suffix != ".npz":
            return path.read_bytes()
        from nestling.tiny.runtime.data import pack

        arrays = read_arrays(path, field="--data")
        return pack(arrays["x"], arrays["y"])
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error}",
            field="--data",
            fix="give a flash image, or an .npz file",
        ) from None


def main(words: Sequence[str] | None = None) -> int:
    """The command: does jobs until it is stopped, or until the broker refuses the device."""
    parser = argparse.ArgumentParser(
        prog="python -m nestling.fleet.node.mqtt_device", description="A device that speaks MQTT."
    )
    parser.add_argument("--broker", required=True, help="host:port")
    parser.add_argument("--name", required=True, help="what the device is called, there and here")
    parser.add_argument(
        "--password-file", type=Path, required=True, help="holds its password (0600)"
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="its data: a flash image, or an .npz file"
    )
    parser.add_argument("--ca", type=Path, help="the authority of the broker's certificate")
    parser.add_argument(
        "--plain", action="store_true", help="no TLS: a broker on this machine only"
    )
    parser.add_argument("--ram", type=int, default=0, help="bytes that a job may take (0: any)")
    told = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        host, port = parse_server(told.broker, "--broker")
        broker = Broker(
            host,
            check_device(told.name, "--name"),
            told.password_file,
            port,
            told.ca,
            not told.plain,
        )
        device = MqttDevice(told.name, read_blob(told.data), broker, told.ram).start()
    except InputError as error:
        print(error, file=sys.stderr)
        return REFUSED
    try:
        while not device.trouble:
            time.sleep(TICK)
            device.tick()
    finally:
        device.stop()
    print(f"{told.name}: the broker refuses it: {device.trouble}", file=sys.stderr)
    return REFUSED


if __name__ == "__main__":
    sys.exit(main())

"""A device behind a registered key that makes Flower's requests from this process, so that it can
make them as no honest one does.

with wire_device(fleet, "d1") as device:
    order = device.letter()                          # waits for the next one
    device.announce(order, answer).send_all()        # or send half of it, or nothing
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supernode.fleet_http_connection import http_request_response

from nestling.fleet.flower.in_process import _know_who_we_are
from nestling.fleet.flower.letters import pack, unpack
from nestling.fleet.node.worker import Worker
from nestling.fleet.protocol.wire import Member
from tests.fleet.processes import SECONDS, ProcessFleet, until


def patiently(call: Callable[..., Any], *given: Any) -> Any:
    """What a call gives; asked again, as Flower's nodes do, while the server says 503."""

    def found() -> list[Any]:
        try:
            return [call(*given)]
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 503:
                raise
            return []

    return until(found, step=0.5)[0]


@dataclass
class Upload:
    """An answer that was announced: its objects, by number, can now be sent."""

    objects: dict[str, InflatableObject]
    push: Callable[[str, bytes], None]

    def send(self, count: int | None = None) -> int:
        """Sends so many objects, the largest first; how many bytes that was."""
        contents = sorted(
            ((k, o.deflate()) for k, o in self.objects.items()), key=lambda p: -len(p[1])
        )
        sent = 0
        for number, content in contents[:count]:
            patiently(self.push, number, content)
            sent += len(content)
        return sent


class WireDevice:
    """The requests of one device."""

    def __init__(self, calls: tuple) -> None:
        self.node, self._receive, self._send, _, _, self._pull, self._push, self._confirm = calls

    def ask(self) -> Message | None:
        """The next letter's message, if there is one."""
        found = self._receive()
        if found is None:
            return None
        message, tree = found
        run, number = message.metadata.run_id, tree.object_id
        contents = pull_objects(
            [one.object_id for one in iterate_object_tree(tree)], partial(self._pull, run)
        )
        self._confirm(run, number)
        whole = inflate_object_from_contents(number, contents)
        assert isinstance(whole, Message)
        whole.metadata.__dict__["_message_id"] = number
        return whole

    def letter(self) -> Message:
        """Waits for the next letter's message."""
        found: Message = until(self.ask, what="a letter", step=0.3)
        return found

    def announce(self, message: Message, content: RecordDict) -> Upload:
        """Says that an answer comes, and of what objects it is made."""
        reply = Message(content, reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        tree, objects = get_object_tree(reply), get_all_nested_objects(reply)
        wanted, session = patiently(self._send, reply, tree, 0.0)
        run = message.metadata.run_id
        return Upload(
            {number: one for number, one in objects.items() if number in wanted},
            lambda number, data: self._push(run, session, number, data),
        )

    def answer(self, message: Message, handle: Callable[[bytes], bytes]) -> None:
        """Answers as an honest device does."""
        self.announce(message, pack(handle(unpack(message.content)))).send()


@contextmanager
def wire_device(made: ProcessFleet, name: str) -> Iterator[WireDevice]:
    """A device of the fleet, in until the block ends."""
    _know_who_we_are()
    folder = made.certs / "devices" / name
    key = load_ssh_private_key((folder / "device.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    ca, failed = (folder / "ca.crt").read_bytes(), list[BaseException]()
    with http_request_response(
        f"127.0.0.1:{made.port}", False, ca, (key, key.public_key()), max_retries=0
    ) as calls:
        try:
            yield WireDevice(calls)
        except BaseException as error:  # which Flower would only log
            failed.append(error)
    if failed:
        raise failed[0]


def worker_of(home: Path, name: str, client: int) -> Worker:
    """What answers letters on an honest device."""
    return Worker(home / name, [Member(name, client)])


@contextmanager
def honest(made: ProcessFleet, name: str, client: int) -> Iterator[None]:
    """An honest device that answers, in a thread, until the block ends or the server is gone."""
    over, worker = threading.Event(), worker_of(made.root, name, client)

    def serve() -> None:
        with suppress(httpx.TransportError), wire_device(made, name) as device:
            while not over.is_set():
                message = device.ask()
                if message is None:
                    time.sleep(0.2)
                else:
                    device.answer(message, worker.handle)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(SECONDS)

"""A gateway killed at any step of an order, and started again, answers as one that never was: the
letters are those of a whole run, the devices do their jobs at once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "paho.mqtt.client", reason="paho-mqtt is not installed: pip install nestling[mqtt]"
)
pytest.importorskip(
    "cryptography", reason="cryptography is not installed: pip install nestling[fleet]"
)

from fleet_gateway import NAME, experiment, images

from nestling.fleet.node.gateway import Devices, FleetGateway, SmallDevice
from nestling.fleet.node.mqtt_device import job_of
from nestling.fleet.protocol.links import Facts
from nestling.fleet.protocol.wire import Answer, JobDone, Order, kind_of
from nestling.tiny.link.orders import Orders
from nestling.tiny.runtime import native, toolchain
from nestling.tiny.runtime.job import Done
from tests.fleet.storm import memory_at
from tests.fleet.test_crash_points import digest
from tests.fleet.test_gateway import Bench, served
from tests.runs.crash_points import EVERY, Steps, in_child

pytestmark = pytest.mark.skipif(
    toolchain.host_compiler() is None, reason="there is no C compiler: apt-get install gcc"
)

CLIENTS, ROUNDS = 2, 3
METHODS = ("shared-average", "fedper")
"""The second keeps something on each client."""
SLICE = 17
"""Of the points of a method, every so-manieth is tried in `make test`."""


class Prompt(Bench):
    """A link whose devices have done a job when it was given to them."""

    def run(self, device: str, orders: Orders) -> Future[Done]:
        future: Future[Done] = Future()
        future.set_result(native.run_job(job_of(orders, lambda: True), self.flash[device]))
        return future


PLACES = [
    (Prompt, "run"),
    *((FleetGateway, name) for name in ("_welcome", "_order", "_begin", "_step", "_results")),
]
"""The steps of an order, beside those that leave a trace on the disk."""


@dataclass(frozen=True, eq=False)
class Case:
    """What a server wrote to a gateway in a whole run, and the devices behind it."""

    welcome: bytes
    orders: Sequence[bytes]
    flash: Mapping[str, bytes]

    def gateway(self, home: Path) -> FleetGateway:
        """The gateway, started on a folder."""
        listed = tuple(SmallDevice(name, client=c) for c, name in enumerate(self.flash))
        link = Prompt({name: Facts(20, (1, 8, 8), None, 1) for name in self.flash}, self.flash)
        return FleetGateway(home, NAME, Devices(listed), dict.fromkeys(self.flash, link))


def case_of(method: str, home: Path) -> Case:
    """A run with a gateway, listened to."""
    told = experiment(CLIENTS, ROUNDS, method)
    flash = {f"d{client}": blob for client, blob in images(told, range(CLIENTS)).items()}
    heard: list[bytes] = []
    gateway = Case(b"", (), flash).gateway(home)

    class Listening:
        def handle(self, letter: bytes) -> bytes:
            heard.append(letter)
            return gateway.handle(letter)

    _, rows, _ = served(told, Listening())
    assert [row["missed"] for row in rows] == [[]] * ROUNDS
    orders = [letter for letter in heard if kind_of(letter) == "order"]
    assert len(orders) == ROUNDS
    return Case(next(letter for letter in heard if kind_of(letter) == "welcome"), orders, flash)


def asked(case: Case, home: Path, answers: Path) -> None:
    """A gateway is asked for what the server has no answer of yet, and each answer noted."""
    gateway = case.gateway(home)
    done = len(list(noted(answers)))
    for letter in case.orders[done:]:
        answer = Answer.from_bytes(gateway.handle(letter))
        if answer.unknown:  # as the server does
            gateway.handle(case.welcome)
            answer = Answer.from_bytes(gateway.handle(letter))
        with open(answers, "a") as file:
            file.write(json.dumps(said(answer)) + "\n")


def noted(answers: Path) -> Iterator[Any]:
    lines = answers.read_text().splitlines() if answers.exists() else []
    return (json.loads(line) for line in lines)


def said(answer: Answer) -> list[Any]:
    """An answer in a form that a file takes."""
    assert not answer.error and len(answer.results) == CLIENTS
    found: list[Any] = [answer.run, answer.round]
    for one in answer.results:
        assert isinstance(one, JobDone), one
        message = one.parcel.open()
        parts = {f"{k}/{n}": t for k, part in message.parts.items() for n, t in part.items()}
        found.append([one.client, one.key, one.loss, one.steps, one.samples, message.facts])
        found.append(digest(parts))
    return json.loads(json.dumps(found))


def ended(case: Case, home: Path, answers: Path) -> list[Any]:
    """All that the server heard, and what the clients keep."""
    run = Order.from_bytes(case.orders[0]).run
    kept = [digest(memory_at(home, client, ROUNDS, run)) for client in range(CLIENTS)]
    return [*noted(answers), kept]


def undisturbed(method: str, home: Path) -> tuple[Case, list[Any], int]:
    """The letters of a run, what a gateway makes of them, and in how many steps."""
    case = case_of(method, home / "heard")
    (home / "whole").mkdir()

    def count() -> None:
        steps = Steps(home / "whole")
        steps.watch(PLACES)
        asked(case, home / "whole", home / "answers-whole")
        (home / "steps").write_text(str(len(steps.names)))

    assert in_child(count)
    wanted = ended(case, home / "whole", home / "answers-whole")
    assert len(wanted) == ROUNDS + 1
    return case, wanted, int((home / "steps").read_text())


def tried(case: Case, home: Path, wanted: list[Any], point: int) -> None:
    """The gateway killed at a point, and started again."""
    place, answers = home / str(point), home / f"answers-{point}"
    place.mkdir()

    def killed() -> None:
        Steps(place, point).watch(PLACES)
        asked(case, place, answers)

    assert not in_child(killed), "it was not killed"
    assert in_child(lambda: asked(case, place, answers))
    assert ended(case, place, answers) == wanted, point


@pytest.mark.parametrize("method", METHODS)
def test_a_gateway_killed_at_some_of_its_steps_answers_the_same(
    method: str, tmp_path: Path
) -> None:
    case, wanted, steps = undisturbed(method, tmp_path)
    assert steps > 100
    for point in range(1 + METHODS.index(method), steps + 1, SLICE):
        tried(case, tmp_path, wanted, point)


@pytest.mark.minutes
@pytest.mark.parametrize("method", METHODS)
def test_a_gateway_killed_all_along_answers_the_same(method: str, tmp_path: Path) -> None:
    case, wanted, steps = undisturbed(method, tmp_path)
    for point in range(1, steps + 1, EVERY):
        tried(case, tmp_path, wanted, point)
    print(f"{method}: {steps} points")

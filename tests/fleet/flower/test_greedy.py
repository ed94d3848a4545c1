"""A device with a valid key that sends too much, or begins to send and stops: it is refused, and
the round of the others goes on."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import httpx
import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed (nestling[fleet])")

from flwr.app import Array, ArrayRecord, RecordDict

from nestling import Evaluation, FleetConfig, Tier
from nestling.fleet.care import logs
from nestling.fleet.care.processes import free_port
from nestling.fleet.flower.letters import pack, unpack
from tests.fleet.flower.wire_device import WireDevice, honest, wire_device, worker_of
from tests.fleet.loop import six
from tests.fleet.processes import ProcessFleet, Server, fleet, until
from tests.fleet.test_quota import half_an_upload

DEADLINE = 10.0
NAMES = ("d0", "large", "many", "stalls")
TIERS = tuple(Tier(name=name, ratio=0.25, count=1) for name in NAMES)
EXPERIMENT = six(fleet=FleetConfig(tiers=TIERS), rounds=2, evaluate=Evaluation(clients=1))


@dataclass
class Story:
    """A fleet of one honest device and three that are not, and what became of them in round 1."""

    fleet: ProcessFleet
    server: Server
    health: str
    refused: dict[str, int]  # device → bytes that were taken before it was refused
    stored: int  # bytes of Flower's database afterwards

    def tell(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.health}/{path}", timeout=60) as answer:
            return str(answer.read().decode())


def noise(size: int) -> Array:
    return Array(np.random.default_rng(size).integers(0, 256, size, np.uint8))


def overdo(device: WireDevice, content: RecordDict) -> int:
    """Answers the next order with too much; how many bytes were taken until it was refused."""
    upload, taken = device.announce(device.letter(), content), 0
    for number, one in list(upload.objects.items()):
        data = one.deflate()
        try:
            upload.push(number, data)
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 413:
                return taken
            raise
        taken += len(data)
    pytest.fail(f"{taken} bytes were taken")


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    root = tmp_path_factory.mktemp("greedy")
    with fleet(root) as made:
        made.keys(*NAMES)
        port = free_port()
        more = ("--min-clients", "4", "--deadline", str(DEADLINE), "--quorum", "1")
        server = made.start_server(EXPERIMENT, "run", *more, "--health", f"127.0.0.1:{port}")
        server.wait_for("listening on")
        with (
            honest(made, "d0", 0),
            wire_device(made, "large") as large,
            wire_device(made, "many") as many,
            wire_device(made, "stalls") as stalls,
            ExitStack() as open_lines,
        ):
            for client, device in enumerate((large, many, stalls), 1):
                device.answer(device.letter(), worker_of(root, NAMES[client], client).handle)
            order = stalls.letter()
            answer = worker_of(root, "stalls", 3)  # who does not know the run, which is an answer
            stalls.announce(order, pack(answer.handle(unpack(order.content)))).send(2)
            open_lines.enter_context(half_an_upload(made.certs, made.port, "stalls"))
            whole = RecordDict({"a": ArrayRecord({"a": noise(120_000_000)})})
            small = {f"a{k}": noise(200_000 + k) for k in range(100)}
            refused = {
                "large": overdo(large, whole),
                "many": overdo(many, RecordDict({"a": ArrayRecord(small)})),
            }
            stored = sum(path.stat().st_size for path in server.home.glob("state.db*"))
            server.wait_for("round 1: ")
            yield Story(made, server, f"http://127.0.0.1:{port}", refused, stored)


def test_what_is_too_much_is_refused_before_it_is_stored(story: Story) -> None:
    assert story.refused["large"] < 3_000_000 and story.refused["many"] < 6_000_000
    assert story.stored < 16_000_000


def test_who_sent_too_much_is_named(story: Story) -> None:
    log = logs.read(story.server.out / logs.SERVER_LOG, last=1000)
    told = {row.get("key"): row["reason"] for row in log if row["event"] == "refused"}
    health = json.loads(story.tell("health"))["greedy"]
    assert {"large", "many"} == set(told) == set(health)
    assert all("bytes a letter allows" in row["reason"] for row in health.values())
    assert 'nestling_over_quota_total{device="large"} 1\n' in story.tell("metrics")


def test_the_round_ends_by_its_deadline_with_the_replies_of_the_others(story: Story) -> None:
    story.server.wait_done()
    rows = [
        json.loads(line) for line in (story.server.out / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["merged"] for row in rows] == [1, 1] and rows[0]["missed"] == [1, 2, 3]
    # this is a promise of time, and the server's own record of it; Flower waits for minutes
    assert max(row["seconds"] for row in rows) <= DEADLINE + 5.0
    until(lambda: not story.fleet.leftovers(), 60, "the end of all processes")

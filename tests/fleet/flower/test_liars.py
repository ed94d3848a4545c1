"""Devices with good keys that lie, over the real wire: TLS, signatures, the proxy, Flower. Each
costs its own reply, or as much as it may, and is named; the honest ones go on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (nestling[fleet])")

import httpx
import torch
from safetensors.torch import load_file

from nestling import Evaluation, Experiment, FleetConfig, Tier
from nestling.fleet.care import logs
from nestling.fleet.care.audit import check
from nestling.fleet.node.worker import Worker
from nestling.fleet.protocol.wire import Answer, Failed, Member, Order, kind_of
from tests.fleet.flower.wire_device import wire_device
from tests.fleet.loop import six
from tests.fleet.lying import Handle, times, with_weights
from tests.fleet.processes import SECONDS, ProcessFleet, Server, fleet
from tests.fleet.test_claims import LIES, Liar, claiming
from tests.fleet.test_forged_lines import EVIL, SHOWN

ROUNDS = 2


one_huge = with_weights(lambda t: t.index_fill(0, torch.tensor([0]), 3e38))
"""One finite value among ordinary ones."""


class Drawing(Liar):
    """One whose work fails, in words that draw on a terminal and forge a line."""

    def handle(self, letter: bytes) -> bytes:
        if kind_of(letter) == "welcome":
            return self.worker.handle(letter)
        order = Order.from_bytes(letter)
        jobs = [Failed(job.client, job.key, EVIL) for job in order.jobs]
        return Answer(order.run, order.round, list(jobs)).to_bytes()


def handles(home: Path, names: list[str]) -> dict[str, Handle]:
    """What each device answers by."""
    workers = {n: Worker(home / n, [Member(n, client)]) for client, n in enumerate(names)}
    own = Member("names", names.index("names"))
    crowd = [own, *(Member(f"names{end}") for end in ("/0", "/1", "-2", "-3"))]
    lying: dict[str, Handle] = {
        "rows": Liar(workers["rows"], reply=claiming(2**39)).handle,
        "far": Liar(workers["far"], reply=times(-100.0)).handle,
        "huge": Liar(workers["huge"], reply=one_huge).handle,
        "draws": Drawing(workers["draws"]).handle,
        "names": Worker(home / "crowd", crowd).handle,
    }
    return {name: lying.get(name, worker.handle) for name, worker in workers.items()}


@contextmanager
def answering(made: ProcessFleet, name: str, handle: Handle) -> Iterator[None]:
    """A device that answers, in a thread, until the block ends or the server is gone."""
    over = threading.Event()

    def serve() -> None:
        with suppress(httpx.TransportError), wire_device(made, name) as device:
            while not over.is_set():
                message = device.ask()
                if message is None:
                    time.sleep(0.2)
                else:
                    device.answer(message, handle)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(SECONDS)


@dataclass
class Story:
    """A run that is over."""

    server: Server
    rows: list[dict[str, Any]]


def told(
    root: Path, asked: Experiment, devices: dict[str, Handle], deadline: float = 60.0
) -> Story:
    with fleet(root) as made, ExitStack() as answers:
        made.keys(*devices)
        count = str(len(devices))
        words = ("--min-clients", count, "--deadline", str(deadline))
        server = made.start_server(asked, "run", *words)
        server.wait_for("listening on")
        for name, handle in devices.items():
            answers.enter_context(answering(made, name, handle))
        server.wait_done()
        lines = (server.out / "metrics.jsonl").read_text().splitlines()
        return Story(server, [json.loads(line) for line in lines])


def tiers(names: list[str]) -> FleetConfig:
    return FleetConfig(tiers=tuple(Tier(name=name, ratio=0.5, count=1) for name in names))


NAMES = ["h0", "h1", "h2", "rows", "far", "huge", "draws", "names"]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    root = tmp_path_factory.mktemp("liars")
    asked = six(fleet=tiers(NAMES), rounds=ROUNDS, evaluate=Evaluation(every=ROUNDS, clients=1))
    return told(root, asked, handles(root / "devices", NAMES))


def reasons(story: Story, kind: str, name: str) -> list[str]:
    client = NAMES.index(name)
    return [
        one["reason"] for row in story.rows for one in row.get(kind, []) if one["client"] == client
    ]


def test_who_claims_rows_that_it_did_not_declare_is_refused(story: Story) -> None:
    said = reasons(story, "refusals", "rows")
    assert len(said) == ROUNDS and all(str(2**39) in reason for reason in said)


def test_one_value_that_is_too_large_is_refused(story: Story) -> None:
    said = reasons(story, "refusals", "huge")
    assert len(said) == ROUNDS and all("too large" in reason for reason in said)


def test_who_goes_far_is_brought_back(story: Story) -> None:
    """To a step that is bounded, which a model may still be ruined by: what bears such devices is
    played in `test_liars_under_a_rule`."""
    said = reasons(story, "clipped", "far")
    assert said and all("times the median" in reason for reason in said)
    weights = load_file(story.server.out / "global.safetensors")
    assert max(float(t.abs().max()) for t in weights.values()) < 10.0


def test_what_a_device_says_draws_nothing_and_forges_no_line(story: Story) -> None:
    log = story.server.log.read_bytes().decode()
    assert all(c.isprintable() or c == "\n" for c in log)
    assert any(SHOWN in line for line in log.splitlines())
    assert not any(line.startswith("09:00:00") for line in log.splitlines())
    rows = logs.read(story.server.out / logs.SERVER_LOG, last=1000)
    assert all(str(row["text"]).isprintable() for row in rows)


def test_made_up_names_get_no_place(story: Story) -> None:
    joined = {line["name"] for line in check(story.server.out) if line["event"] == "joined"}
    assert joined == set(NAMES)
    assert "'names/0'" in story.server.text


def test_the_honest_go_on(story: Story) -> None:
    assert [row["merged"] for row in story.rows] == [5] * ROUNDS


def test_negative_rows_by_class_are_refused(tmp_path: Path) -> None:
    names = ["h0", "h1", "liar"]
    workers = {n: Worker(tmp_path / n, [Member(n, client)]) for client, n in enumerate(names)}
    devices = {n: w.handle for n, w in workers.items()}
    devices["liar"] = Liar(workers["liar"], reply=LIES["negative rows"][1]).handle
    (tmp_path / "fleet").mkdir()
    asked = six("fedproto", fleet=tiers(names), rounds=1, evaluate=Evaluation(clients=1))
    (row,) = told(tmp_path / "fleet", asked, devices).rows
    assert row["merged"] == 2 and [one["client"] for one in row["refusals"]] == [2]

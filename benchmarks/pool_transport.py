"""What a round costs beyond its training when clients run in worker processes: weights in shared
memory against weights as bytes.

    python benchmarks/pool_transport.py [ROUNDS] [WORKERS]

50 clients with two rows of data each and a network of 1.6 million parameters, so that there is next
to nothing to train. The round is played with a message for each client and with one that all share,
both by the pool and by one that serialises every message and every reply and sends them through a
pipe. Overhead is the time of a round less an equal share of the in-process engine's time for every
worker; the two pools take turns. Prints it in milliseconds a client, and last how many times less
it is.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from nestling import SplitConfig, Train
from nestling.data import make_split
from nestling.engines import Engine, Inline, Pool
from nestling.engines.pool import _main_script_hidden
from nestling.message import Message
from nestling.methods.method import Method
from nestling.runs.assemble import reference_network
from nestling.training.client import ClientSide, Errand, Outcome, Site, work
from nestling.views import to_spec

CLIENTS, CLASSES, SHAPE, HIDDEN = 50, 10, (784,), (430,) * 8
CASES = {"a message each": False, "one message": True}


class BytePool:
    """Every message and every reply as bytes through a pipe, one errand at a time: what the
    comparison is with."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def open(self, method: ClientSide, site: Site) -> None:
        context = mp.get_context("spawn")
        self._members = []
        for _ in range(self.workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, method, site), daemon=True)
            with _main_script_hidden():
                process.start()
            theirs.close()
            self._members.append((ours, process))

    def run(self, errands: Sequence[Errand]) -> Iterator[Outcome]:
        waiting, idle, busy = deque(errands), [connection for connection, _ in self._members], 0
        while waiting or busy:
            while idle and waiting:
                idle.pop().send(_pack(waiting.popleft(), "message"))
                busy += 1
            for connection in wait([c for c, _ in self._members]):
                yield Outcome(**_unpack(connection.recv(), "reply"))  # type: ignore[union-attr]
                idle.append(connection)  # type: ignore[arg-type]
                busy -= 1

    def close(self) -> None:
        for connection, process in self._members:
            connection.close()
            process.join()


def _serve(connection: Connection, method: ClientSide, site: Site) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            errand = Errand(**_unpack(connection.recv(), "message"))
        except EOFError:
            return
        connection.send(_pack(work(method, errand, site), "reply"))


def _pack(data: Errand | Outcome, kind: str) -> dict[str, Any]:
    return {**vars(data), kind: getattr(data, kind).to_bytes()}


def _unpack(packed: dict[str, Any], kind: str) -> dict[str, Any]:
    return {**packed, kind: Message.from_bytes(packed[kind])}


def make_site() -> Site:
    """Random rows, two for each client."""
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.normal(size=(2 * CLIENTS, *SHAPE)).astype(np.float32))
    y = np.arange(2 * CLIENTS) % CLASSES
    split = make_split(
        SplitConfig(kind="iid", min_size=1), y=y, classes=CLASSES, clients=CLIENTS, seed=0
    )
    network = reference_network("mlp", {"hidden": HIDDEN}, SHAPE, CLASSES, 0, "main")
    return Site(
        x, torch.from_numpy(y), split, {"main": network}, CLASSES, Train(epochs=1, batch=2), 0
    )


def make_errands(site: Site, shared: bool) -> list[Errand]:
    network = site.references["main"]
    spec, one = to_spec(network.full), Message({"weights": network.initial})
    messages = [
        one if shared else Message({"weights": network.full.extract(network.initial)})
        for _ in range(CLIENTS)
    ]
    return [Errand(client, 1, "main", spec, message) for client, message in enumerate(messages)]


def timed(engine: Engine, errands: Sequence[Errand]) -> float:
    began = time.perf_counter()
    outcomes = list(engine.run(errands))
    assert len(outcomes) == len(errands)
    return time.perf_counter() - began


def main(rounds: int, workers: int) -> None:
    torch.set_num_threads(1)
    site = make_site()
    parameters = sum(t.numel() for t in site.references["main"].initial.values())
    print(f"{parameters:,} parameters, {CLIENTS} clients, {workers} workers")
    engines: dict[str, Engine] = {
        "in-process": Inline(),
        "bytes": BytePool(workers),
        "shared memory": Pool(workers),
    }
    for engine in engines.values():
        engine.open(Method(), site)
    try:
        ratios = [
            compare(engines, name, make_errands(site, shared), rounds, workers)
            for name, shared in CASES.items()
        ]
    finally:
        for engine in engines.values():
            engine.close()
    print(
        "overhead, bytes / shared memory: "
        + ", ".join(f"{r:.1f} times ({n})" for r, n in zip(ratios, CASES, strict=True))
    )


def compare(
    engines: dict[str, Engine],
    name: str,
    errands: Sequence[Errand],
    rounds: int,
    workers: int,
) -> float:
    for engine in engines.values():
        (
            timed(engine, errands),
            timed(engine, errands),
        )  # the first ones import, trace and make room
    # The quickest of several rounds: whatever else the machine does can only add to it.
    found = [
        {kind: timed(engine, errands) for kind, engine in engines.items()} for _ in range(rounds)
    ]
    best = {kind: min(times[kind] for times in found) for kind in engines}
    beyond = {
        kind: best[kind] - best["in-process"] / workers for kind in ("bytes", "shared memory")
    }
    for kind, seconds in beyond.items():
        a_round, a_client = (
            f"{1e3 * best[kind]:.0f} ms a round",
            f"{1e3 * seconds / CLIENTS:.2f} ms a client beyond training",
        )
        print(f"{name}, {kind}: {a_round}, {a_client}")
    return beyond["bytes"] / beyond["shared memory"]


if __name__ == "__main__":
    # the workers import this file by its name, so the classes must come from there
    import pool_transport

    numbers = [int(a) for a in sys.argv[1:]]
    pool_transport.main(*(numbers + [10, 2][len(numbers) :]))

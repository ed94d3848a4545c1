"""A fleet three of whose eight devices lie behind good keys, each in a way of its own: one sends
its weights a hundred times as large and turned round, one declares 2³⁹ rows as it joins and turns
its weights round, and one has the wrong labels in its own file. Nothing that they send is
malformed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nestling import Evaluation, Experiment, FleetConfig, Named, Server, SplitConfig, Tier, Train
from nestling.fleet.node.worker import Worker
from nestling.fleet.protocol.wire import Member
from nestling.message import Message
from nestling.runs.assemble import assemble
from tests.fleet.loop import six
from tests.fleet.test_claims import Liar, claiming

Handle = Callable[[bytes], bytes]

NAMES = ("labels", "h1", "h2", "h3", "h4", "rows", "far", "h7")
"""The devices by client; those with a number are honest. Of the large ones (h2, h4, rows, h7) one
lies, of the small ones two."""

ROUNDS, ROWS = 5, 2**39


def asked(merge: str, rounds: int = ROUNDS, **server: Any) -> Experiment:
    """What is quick to learn: 84 % after five rounds, some seconds of training in all."""
    tiers = (Tier(name="a", ratio=0.5, count=4), Tier(name="b", ratio=1.0, count=4))
    return six(
        fleet=FleetConfig(tiers=tiers),
        rounds=rounds,
        model=Named("mlp"),
        train=Train(epochs=4, batch=10, lr=0.02, augment="none"),
        split=SplitConfig(kind="iid", size=150, public=0.02),
        evaluate=Evaluation(every=rounds, clients=1),
        server=Server(merge=merge, **server),
    )


def handles(
    home: Path, lie: Callable[[str, Worker], Handle], flipped: tuple[str, ...] = ("labels",)
) -> dict[str, Handle]:
    """What each device answers by: `lie` says it, and whose labels are `flipped` in their files.
    Who declares rows that it has not says nothing of their classes."""
    home.mkdir()
    data = files(home, flipped)
    return {
        name: lie(
            name, Worker(home / name, [Member(name, c)], data[c], tell_classes=name != "rows")
        )
        for c, name in enumerate(NAMES)
    }


def all_three(name: str, worker: Worker) -> Handle:
    """What the liars do."""
    if name == "far":
        return Liar(worker, reply=times(-100.0)).handle
    if name == "rows":
        back = times(-1.0)
        return Liar(worker, ROWS, lambda reply: claiming(ROWS)(back(reply))).handle
    return worker.handle


def files(home: Path, flipped: tuple[str, ...]) -> list[str]:
    """Each device's rows; those of some have the label 9 − y."""
    _, federation = assemble(asked("mean"))
    bench, found = federation.bench, []
    for client, name in enumerate(NAMES):
        rows = federation.world.split.indices(client)
        x, y = bench.x[rows].numpy(), bench.y[rows].numpy()
        found.append(str(home / f"{name}.npz"))
        np.savez(found[-1], x=x, y=9 - y if name in flipped else y)
    return found


def times(factor: float) -> Callable[[Message], Message]:
    """Weights so many times as large."""
    return with_weights(lambda t: t * factor)


def with_weights(change: Callable[[Any], Any]) -> Callable[[Message], Message]:
    """A reply whose weights are others."""

    def lie(reply: Message) -> Message:
        weights = {
            n: change(t) if t.is_floating_point() else t for n, t in reply["weights"].items()
        }
        return Message({**reply.parts, "weights": weights}, reply.facts)

    return lie

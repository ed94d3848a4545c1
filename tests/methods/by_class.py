"""What the tests of the methods that exchange statistics by class share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import nestling
from nestling import EngineConfig, Evaluation, FleetConfig, Named, SplitConfig, Tier, Train
from nestling.methods import Reply
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.training.client import Client, Errand, client_of, work
from nestling.views import State
from tests.methods.mixed import unlike
from tests.small import small

MIXED = FleetConfig(
    tiers=(
        Tier(name="mlp", model="mlp", model_options={"hidden": [16]}, count=2),
        Tier(name="cnn", ratio=1.0, count=1),
        Tier(name="deep", model="mlp", model_options={"hidden": [24, 16]}, count=1),
    )
)

SHOTS: dict[str, Any] = {
    "fleet": FleetConfig(
        tiers=tuple(
            Tier(name=f"mlp {k}", model="mlp", model_options={"hidden": [k, 32]}, count=3)
            for k in (48, 64, 80)
        )
    ),
    "split": SplitConfig(kind="classes", classes=3, size=20, public=0.02),
    "train": Train(epochs=5, batch=8, lr=0.02),
    "rounds": 8,
    "evaluate": Evaluation(every=8, clients=9),
    "engine": EngineConfig("cohort", workers=1),
}
"""What the learning tests change: few classes and few rows a client, networks of other widths with
features of one size, which is where such methods are meant to work. Both sides train at one
learning rate, at which clients alone learn too fast: that the exchange helps there is what these
tests claim. With a rate of its own training alone reaches as much (docs/results.md)."""


@lru_cache(maxsize=1)
def few_shots_alone() -> list[float]:
    """What the very same networks reach alone."""
    return unlike("local", **SHOTS)


def one_round(
    method: Any, clients: Sequence[int] = range(4), **changes: Any
) -> tuple[Federation, list[Reply], list[Client]]:
    """Sends, trains and collects by hand: the federation before its merge, the replies, and the
    clients with what they trained."""
    settled, federation = assemble(small(method, **{"fleet": MIXED, **changes}))
    world, own, replies, seen = federation.world, federation.method, [], []
    for number in clients:
        device = world.device(number)
        piece = own.piece(device, 1)
        sent = own.send(device, piece, 1)
        errand = Errand(number, 1, piece.reference.name, piece.spec(), sent)
        done = work(settled.make_method(), errand, site_of(federation))
        replies.append(Reply(device, own.returned(piece, sent, done.reply.facts), sent, done.reply))
        seen.append(client_of(errand, site_of(federation)))
        seen[-1].memory = done.memory
        seen[-1].weights = {
            n.removeprefix("weights/"): t for n, t in done.memory.items()
        } or done.reply["weights"]
    return federation, replies, seen


def holders(replies: Sequence[Reply], label: int) -> list[tuple[Reply, int]]:
    """Who tells of a class, and in which row."""
    return [
        (r, r.message.facts["classes"].index(label))
        for r in replies
        if label in r.message.facts["classes"]
    ]


def held(federation: Federation, client: int, least: int = 1) -> int:
    """How many classes a client has."""
    return int((federation.world.split.counts(client) >= least).sum())


def known_after(federation: Federation, clients: Sequence[int], least: int = 1) -> int:
    """How many classes some clients have together."""
    return int(sum(federation.world.split.counts(c) >= least for c in clients).astype(bool).sum())  # type: ignore[union-attr]


def everything(federation: Federation) -> State:
    """The server's state and what clients keep, under one name each."""
    kept = {
        f"{c} {n}": t
        for c in federation.world.store.clients()
        for n, t in federation.world.store.get(c).items()
    }
    return {
        **{
            f"{kind} {n}": t
            for kind, part in federation.method.state().items()
            for n, t in part.items()
        },
        **kept,
    }


def same_on_every_engine(method: Any, engines: Sequence[str] = ("cohort",), **changes: Any) -> None:
    """In another process bit for bit, stacked within rounding."""
    run = {"fleet": MIXED, "participants": 4, "rounds": 2, **changes}
    plain = everything(nestling.run(small(method, **run)).federation)
    for engine in engines:
        found = everything(
            nestling.run(small(method, **run, engine=EngineConfig(engine, workers=1))).federation
        )
        assert plain.keys() == found.keys()
        for name, tensor in plain.items():
            most = 0.0 if engine == "pool" else 1e-4
            assert torch.allclose(tensor.double(), found[name].double(), rtol=0, atol=most), (
                engine,
                name,
            )


def resumes(method: Named, tmp_path: Path, **changes: Any) -> None:
    """A run that was stopped after two rounds ends as one that was not."""
    run = {"fleet": MIXED, **changes}
    whole = nestling.run(small(method, rounds=3, **run))
    nestling.run(small(method, rounds=2, **run), out=tmp_path / "a")
    resumed = nestling.resume(tmp_path / "a", overrides=("rounds=3",))
    first, second = everything(whole.federation), everything(resumed.federation)
    assert first.keys() == second.keys() and all(
        torch.equal(t, second[name]) for name, t in first.items()
    )
    assert resumed.summary["personal_score"]["last"] == whole.summary["personal_score"]["last"]

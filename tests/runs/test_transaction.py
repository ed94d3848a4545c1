"""A round is a transaction: nothing that a refused reply touched survives it, whichever engine
found it out and when."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nestling import Evaluation, FleetConfig, Tier
from nestling.engines import Cohort, Engine, Inline, Pool
from nestling.message import Message
from nestling.methods import METHODS
from nestling.runs.assemble import assemble, site_of
from nestling.runs.federation import Federation
from nestling.runs.loop import play
from nestling.training.client import Errand, Outcome
from nestling.views.flat import Row
from tests.small import small

SPOILT = {2: (0, math.nan), 3: (1, math.inf)}
"""Round → whose training went wrong in it, and what it made of a number."""

PAIRS = FleetConfig(
    tiers=(Tier(name="small", ratio=0.5, count=2), Tier(name="large", ratio=1.0, count=2))
)
"""Nobody is alone, so that everybody is trained in a stack where the method lets it."""

EVERYBODY = 4

WITHOUT_TENSORS = {"local"}
"""Methods whose replies hold nothing that could be wrong."""


APART = {"fedzkt": 5e-2, "shared-distill": 1e-2}
"""How far the engines may be apart after three rounds where it is more than a thousandth: also
where nobody is refused, a generator that is trained against others, and a server that trains many
steps, make more of rounding, on one processor more than on another."""


class Spoils(Inline):
    """The in-process engine; some clients' training goes wrong, or (with `lose`) they are never
    heard of again."""

    def __init__(self, lose: bool = False) -> None:
        super().__init__()
        self.lose = lose

    def run(self, errands: Sequence[Errand]) -> Iterator[Outcome]:
        return spoil(errands, super().run(errands), self.lose)


class SpoilsStacks(Cohort):
    """The same in stacks, by an engine that is trusted and looked at a round later."""

    lookahead = 1

    def __init__(self, lose: bool = False) -> None:
        super().__init__(1)
        self.lose = lose

    def run(self, errands: Sequence[Errand]) -> Iterator[Outcome]:
        return spoil(errands, super().run(errands), self.lose)


class SpoilsProcesses(Pool):
    """The same behind a worker process."""

    def __init__(self) -> None:
        super().__init__(1)

    def run(self, errands: Sequence[Errand]) -> Iterator[Outcome]:
        return spoil(errands, super().run(errands), lose=False)


class SpoilsAll(Inline):
    """Everybody's training goes wrong."""

    def run(self, errands: Sequence[Errand]) -> Iterator[Outcome]:
        for outcome in super().run(errands):
            yield replace(outcome, reply=spoilt_reply(outcome.reply, math.nan))


def spoil(errands: Sequence[Errand], outcomes: Iterator[Outcome], lose: bool) -> Iterator[Outcome]:
    client, value = SPOILT.get(errands[0].round, (None, 0.0))
    for outcome in outcomes:
        if outcome.client != client or not outcome.reply.parts:
            yield outcome
        elif not lose:
            memory = {name: spoilt(t, value) for name, t in outcome.memory.items()}
            yield replace(outcome, reply=spoilt_reply(outcome.reply, value), memory=memory)


def spoilt_reply(reply: Message, value: float) -> Message:
    rows = [part for part in reply.parts.values() if isinstance(part, Row)]
    if rows:
        rows[0].stack.flat[rows[0].number, 5] = value
        return reply
    return Message(
        {
            kind: {n: spoilt(t, value) for n, t in part.items()}
            for kind, part in reply.parts.items()
        },
        reply.facts,
    )


def spoilt(tensor: Tensor, value: float) -> Tensor:
    found = tensor.clone()
    if found.is_floating_point() and found.numel():
        found.view(-1)[-1] = value
    return found


def played(method: str, engine: Engine, rounds: int = 3) -> tuple[Federation, list[dict[str, Any]]]:
    settings = {
        "rounds": rounds,
        "participants": EVERYBODY,
        "fleet": PAIRS,
        "evaluate": Evaluation(every=rounds, clients=EVERYBODY),
    }
    experiment, federation = assemble(small(method, **settings))
    federation.engine = engine
    engine.open(experiment.make_method(), site_of(federation))
    try:
        return federation, list(play(federation))
    finally:
        engine.close()


def traces(federation: Federation) -> dict[str, Tensor]:
    """All that a run leaves: the server's state, what clients keep, and what is written down of
    them."""
    store = federation.world.store
    kept = {f"client {c}": store.get(c) for c in sorted({*store._versions, *store._recent})}
    parts: Mapping[str, Mapping[str, Tensor]] = {**federation.state(), **kept}
    return {f"{kind}/{name}": t for kind, part in parts.items() for name, t in part.items()}


def far(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The distance of two sets of tensors, relative to the first."""
    a, b = (
        torch.cat([found[n].double().reshape(-1) for n in sorted(one)]) for found in (one, other)
    )
    return float((a - b).norm() / a.norm().clamp(min=1e-12))


@pytest.mark.parametrize("method", METHODS)
def test_a_refused_reply_leaves_no_trace(method: str) -> None:
    one, other = played(method, Spoils()), played(method, SpoilsStacks())
    gone = played(method, SpoilsStacks(lose=True))
    refused = [0, 0, 0] if method in WITHOUT_TENSORS else [0, 1, 1]
    assert [row["refused"] for row in one[1]] == [row["refused"] for row in other[1]] == refused
    assert [row["dropped"] for row in gone[1]] == refused
    alone, stacked, without = (traces(federation) for federation, _ in (one, other, gone))
    assert all(bool(t.isfinite().all()) for left in (alone, stacked) for t in left.values())
    assert stacked.keys() == without.keys() and all(
        torch.equal(stacked[name], t) for name, t in without.items()
    )
    assert alone.keys() == stacked.keys() and far(alone, stacked) < APART.get(method, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_nor_one_that_came_from_another_process(method: str) -> None:
    alone, pooled = played(method, Spoils()), played(method, SpoilsProcesses())
    assert [row["refused"] for row in pooled[1]] == [row["refused"] for row in alone[1]]
    one, other = traces(alone[0]), traces(pooled[0])
    assert one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


@pytest.mark.parametrize("method", [name for name in METHODS if name not in WITHOUT_TENSORS])
def test_a_round_in_which_everybody_is_refused_merges_nothing(method: str) -> None:
    federation, rows = played(method, SpoilsAll(), rounds=1)
    assert [(row["refused"], row["merged"]) for row in rows] == [(EVERYBODY, 0)]
    assert all(bool(t.isfinite().all()) for t in traces(federation).values())

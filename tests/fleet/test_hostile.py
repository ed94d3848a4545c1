"""A hundred thousand hostile answers: every one is refused with a reason, and honest clients never
notice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nestling import Evaluation, Experiment, Named, SplitConfig, Tier
from nestling.experiment import FleetConfig
from nestling.fleet.node.worker import Worker
from nestling.fleet.protocol.courier import LoopCourier
from nestling.fleet.protocol.wire import (
    Answer,
    Failed,
    Hello,
    JobDone,
    JobOrder,
    Member,
    Order,
    Parcel,
    Welcome,
    kind_of,
)
from nestling.fleet.server.engine import FleetEngine, Patience
from nestling.message import Message
from nestling.runs.assemble import assemble, site_of
from nestling.runs.loop import play
from tests.fleet.loop import live, same, state_of
from tests.fleet.test_engine import Time
from tests.small import small

HONEST = (0, 1, 2)
HOSTILE = 1000
FRAMES = 25
WANTED = 100_000
SAMPLES = 20
PATIENCE = Patience(deadline=2.0, resend=100.0, poll=1.0, largest=2**23)


def experiment(rounds: int) -> Experiment:
    size = len(HONEST) + HOSTILE + FRAMES
    return small(
        "shared-average",
        rounds=rounds,
        participants=0,
        data="mnist12k-8x8",
        model=Named("mlp", {"hidden": [6]}),
        fleet=FleetConfig(
            tiers=(
                Tier(name="half", ratio=0.5, count=size // 2),
                Tier(name="whole", ratio=1.0, count=size - size // 2),
            )
        ),
        split=SplitConfig(kind="iid", size=SAMPLES, public=0.0),
        evaluate=Evaluation(every=rounds, clients=2),
    )


# -- one result that is wrong ----------------------------------------------------------------------

Spoil = Callable[[JobOrder, random.Random], "JobDone | Failed"]


def honest(job: JobOrder, **changes: Any) -> JobDone:
    """What an honest client's reply looks like: the weights it got, and how many samples it has."""
    return JobDone(
        job.client,
        job.key,
        Parcel({**job.parcel.table, "facts": {"samples": SAMPLES}}, job.parcel.data),
        1.0,
        1,
        SAMPLES,
        **changes,
    )


def table(
    job: JobOrder, change: Callable[[list[Any]], list[Any] | None], data: bytes | None = None
) -> JobDone:
    """A reply whose rows of the table were changed, one by one (None leaves one out)."""
    parts = [
        [kind, [r for r in (change(list(row)) for row in rows) if r is not None]]
        for kind, rows in job.parcel.table["parts"]
    ]
    parcel = Parcel(
        {"facts": {"samples": SAMPLES}, "parts": parts}, job.parcel.data if data is None else data
    )
    return replace(honest(job), parcel=parcel)


def facts(job: JobOrder, told: Any) -> JobDone:
    return replace(honest(job), parcel=Parcel({**job.parcel.table, "facts": told}, job.parcel.data))


def data(job: JobOrder, change: Callable[[bytearray], Any]) -> JobDone:
    raw = bytearray(job.parcel.data)
    change(raw)
    return replace(
        honest(job), parcel=Parcel({**job.parcel.table, "facts": {"samples": SAMPLES}}, bytes(raw))
    )


NAN, INF = b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f"


def put(raw: bytearray, rng: random.Random, what: bytes) -> None:
    place = 4 * rng.randrange(len(raw) // 4)
    raw[place : place + 4] = what


SPOILS: dict[str, Spoil] = {
    "a wrong name": lambda job, rng: table(job, lambda row: [row[0] + "x", *row[1:]]),
    "a name too few": lambda job, rng: table(
        job, lambda row: row if row[0] != "head.bias" else None, b"\0" * (len(job.parcel.data) - 40)
    ),
    "another part": lambda job, rng: replace(
        honest(job), parcel=Parcel.of(Message({"logits": {}}, {"samples": SAMPLES}))
    ),
    "nothing": lambda job, rng: replace(
        honest(job), parcel=Parcel.of(Message({}, {"samples": SAMPLES}))
    ),
    "a flat shape": lambda job, rng: table(job, lambda row: [row[0], row[1], [_size(row[2])]]),
    "a turned shape": lambda job, rng: table(
        job, lambda row: [row[0], row[1], row[2][::-1] if len(row[2]) > 1 else [1, *row[2]]]
    ),
    "another type": lambda job, rng: table(job, lambda row: [row[0], "i32", row[2]]),
    "half floats": lambda job, rng: table(
        job, lambda row: [row[0], "f16", row[2]], job.parcel.data[: len(job.parcel.data) // 2]
    ),
    "NaN": lambda job, rng: data(job, lambda raw: put(raw, rng, NAN)),
    "infinity": lambda job, rng: data(job, lambda raw: put(raw, rng, INF)),
    "truncated": lambda job, rng: data(
        job, lambda raw: raw.__delitem__(slice(rng.randrange(len(raw)), None))
    ),
    "too much": lambda job, rng: data(job, lambda raw: raw.extend(b"\0" * rng.randrange(1, 50))),
    "an enormous tensor": lambda job, rng: table(job, lambda row: [row[0], row[1], [2**20, 2**20]]),
    "too many samples": lambda job, rng: facts(job, {"samples": SAMPLES + rng.randrange(1, 10**9)}),
    "too few samples": lambda job, rng: facts(job, {"samples": rng.randrange(SAMPLES)}),
    "samples below zero": lambda job, rng: facts(job, {"samples": -SAMPLES}),
    "samples beyond all numbers": lambda job, rng: facts(job, {"samples": 10**30}),
    "samples in words": lambda job, rng: facts(job, {"samples": "20"}),
    "samples in a list": lambda job, rng: facts(job, {"samples": [SAMPLES]}),
    "no samples": lambda job, rng: facts(job, {}),
    "facts in a list": lambda job, rng: facts(job, [SAMPLES]),
    "an error": lambda job, rng: Failed(job.client, job.key, "x" * 1000),
    "other work": lambda job, rng: replace(honest(job), key=f"{rng.getrandbits(128):032x}"),
    "an honest client's number": lambda job, rng: replace(honest(job), client=rng.choice(HONEST)),
    "a number that nobody has": lambda job, rng: replace(honest(job), client=10**9),
}


def _size(shape: list[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


# -- a whole answer that is wrong ------------------------------------------------------------------


class Enemy:
    """Behind one node: answers orders with what is meant to harm. `sent` counts what it has
    tried."""

    def __init__(self, clients: list[int], name: str, seed: int) -> None:
        self.members = tuple(Member(f"{name}/{c}", c) for c in clients)
        self.rng, self.sent = random.Random(seed), Counter[str]()
        self.overheard: list[bytes] = []
        self.token = f"{seed:032x}"

    def handle(self, letter: bytes) -> bytes:
        if kind_of(letter) == "welcome":
            return Hello(Welcome.from_bytes(letter).run, self.token, self.members).to_bytes()
        return self.answer(Order.from_bytes(letter))

    def answer(self, order: Order) -> bytes:
        """One wrong result for each client."""
        names = list(SPOILS)
        found: list[JobDone | Failed] = []
        for number, job in enumerate(order.jobs):
            name = names[(number + order.round) % len(names)]
            found.append(SPOILS[name](job, self.rng))
            self.sent[name] += 1
        return Answer(order.run, order.round, found).to_bytes()


class Vandal(Enemy):
    """One client behind one node, whose whole answers are wrong."""

    def answer(self, order: Order) -> bytes:
        good = Answer(order.run, order.round, [honest(job) for job in order.jobs])
        kinds: dict[str, Callable[[], bytes]] = {
            "random bytes": lambda: self.rng.randbytes(self.rng.randrange(2000)),
            "cut": lambda: good.to_bytes()[: self.rng.randrange(len(good.to_bytes()))],
            "longer": lambda: good.to_bytes() + b"!",
            "changed": lambda: self._changed(good.to_bytes()),
            "another run": lambda: replace(good, run="0" * 16).to_bytes(),
            "the next round": lambda: replace(good, round=order.round + 1).to_bytes(),
            "an old answer": lambda: (self.overheard or [b"?"])[0],
            "oversize": lambda: good.to_bytes() + b"\0" * PATIENCE.largest,
            "twice the same": lambda: Answer(
                order.run, order.round, [*self._failed(order), *good.results]
            ).to_bytes(),
            "an order": lambda: order.to_bytes(),
            "an error": lambda: replace(good, error="no", results=[]).to_bytes(),
            "deep": lambda: b"NSTL\x01A" + (60_000).to_bytes(4, "little") + b"[" * 60_000,
        }
        name = list(kinds)[self.rng.randrange(len(kinds))]
        self.sent[name] += 2 if name == "twice the same" else 1
        found = kinds[name]()
        self.overheard = [*self.overheard, good.to_bytes()][-3:]
        return found

    def _failed(self, order: Order) -> list[Failed]:
        return [Failed(job.client, job.key, "first") for job in order.jobs]

    def _changed(self, raw: bytes) -> bytes:
        """Any one byte, be it one of a weight."""
        changed = bytearray(raw)
        changed[self.rng.randrange(len(changed))] ^= 0x55
        return bytes(changed)


def attacked(rounds: int, home: Path) -> tuple[Any, list[dict[str, Any]], list[Enemy], list[str]]:
    first = len(HONEST) + HOSTILE
    enemies: list[Enemy] = [Enemy(list(range(len(HONEST), first)), "crowd", 1)]
    enemies += [Vandal([first + k], f"vandal {k}", 2 + k) for k in range(FRAMES)]
    workers = {c: Worker(home / str(c), [Member(f"honest {c}", c)]) for c in HONEST}
    courier = LoopCourier(
        {
            **{c: w.handle for c, w in workers.items()},
            **{100 + k: e.handle for k, e in enumerate(enemies)},
        }
    )
    time, reasons = Time(), list[str]()
    _, federation = live(experiment(rounds), courier, PATIENCE, clock=time.clock, sleep=time.sleep)
    federation.on_refusal = lambda client, round, reason: reasons.append(reason)
    rows = list(play(federation))
    return federation, rows, enemies, reasons


def alone(rounds: int) -> Any:
    """The same run in this process, in which the hostile clients never answer."""
    settled, federation = assemble(experiment(rounds))
    federation.world.fleet.drops = lambda i, round: i not in HONEST  # type: ignore[method-assign]
    federation.engine.open(settled.make_method(), site_of(federation))
    list(play(federation))
    return federation


@pytest.mark.parametrize("rounds", [3, pytest.param(WANTED // HOSTILE, marks=pytest.mark.slow)])
def test_hostile_answers_are_refused_and_nobody_else_notices(rounds: int, tmp_path: Path) -> None:
    federation, rows, enemies, reasons = attacked(rounds, tmp_path)
    sent = sum((e.sent for e in enemies), Counter[str]())
    assert sum(sent.values()) >= rounds * (HOSTILE + FRAMES) and set(SPOILS) <= set(sent)
    assert rounds < 50 or sum(sent.values()) >= WANTED
    # every one, and nothing else
    assert len(reasons) == sum(row["refused"] for row in rows) == sum(sent.values())
    assert all(reasons) and max(map(len, reasons)) < 1500
    assert isinstance(federation.engine, FleetEngine) and all(
        row["loss"] is not None for row in rows
    )
    assert same(state_of(federation), state_of(alone(rounds)))


def test_what_hostile_answers_are_made_of_is_good(tmp_path: Path) -> None:
    """Without the spoiling the same replies count: the reasons above are the spoiling's."""
    enemy = Enemy([3], "good", 1)
    enemy.answer = lambda order: Answer(
        order.run, order.round, [honest(j) for j in order.jobs]
    ).to_bytes()  # type: ignore[method-assign]
    _, federation = live(
        experiment(1), LoopCourier({1: enemy.handle}), PATIENCE, clock=Time().clock
    )
    row = next(play(federation))
    assert row["clients"] == [3] and row["refused"] == row["dropped"] == 0


@pytest.mark.parametrize("name", SPOILS)
def test_each_of_them_is_refused_for_its_own_reason(name: str, tmp_path: Path) -> None:
    enemy = Enemy([3], "bad", 1)
    enemy.answer = lambda order: Answer(
        order.run, order.round, [SPOILS[name](j, enemy.rng) for j in order.jobs]
    ).to_bytes()  # type: ignore[method-assign]
    time = Time()
    _, federation = live(
        experiment(1),
        LoopCourier({1: enemy.handle}),
        replace(PATIENCE, most=3.0),
        clock=time.clock,
        sleep=time.sleep,
    )
    told: list[str] = []
    federation.on_refusal = lambda client, round, reason: told.append(reason)
    before = {n: t.clone() for n, t in state_of(federation).items()}
    # nobody answered, which stops a run; what was refused is told all the same
    with suppress(RuntimeError):
        next(play(federation))
    # Who answers for somebody else has not answered, and is asked again.
    assert len(told) == (2 if "number" in name.split() else 1) and same(
        state_of(federation), before
    )

"""The pool's transport and its chunks: what a worker gets and gives back is exact, kept apart, and
leaves nothing behind."""

from __future__ import annotations

import gc
import io
import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nestling
import nestling.runs.loop
from nestling import FleetConfig
from nestling.engines import ClientError, Inline, Pool
from nestling.engines.pool import DEPTH, each
from nestling.engines.shared_memory import PagePacket, PagePart, Place, Spare, _Header
from nestling.message import Message
from nestling.methods.method import Method
from nestling.runs.assemble import assemble, site_of
from nestling.training.client import ClientSide, Errand, Outcome, Site
from nestling.views.flat import Packed, pack
from tests.small import TIERS, small

LINUX = sys.platform == "linux"


# -- what the workers do: they import this file ----------------------------------------------------


def act(method: ClientSide, errands: Sequence[Errand], site: Site) -> list[Outcome]:
    """The client's work, or whatever the messages of the chunk ask for."""
    if "act" not in errands[0].message.facts:
        return each(method, errands, site)
    return [_act(errand, errands) for errand in errands]


def _act(errand: Errand, chunk: Sequence[Errand]) -> Outcome:
    facts = errand.message.facts
    if facts["act"] == "fail":
        raise ValueError("no luck")
    if facts["act"] == "die" or (facts["act"] == "die once" and _first(Path(facts["mark"]))):
        os.kill(os.getpid(), signal.SIGKILL)
    if facts["act"] == "lose":
        return Outcome(errand.client + 1, Message(), {}, 0.0, 0, 0)
    told = {
        "facts": facts,
        "clients": [t.client for t in chunk],
        "messages": len({id(t.message) for t in chunk}),
    }
    return Outcome(
        errand.client,
        Message(errand.message.parts, told),
        errand.memory,
        torch.tensor(0.5),
        3,
        7,
    )


def _first(mark: Path) -> bool:
    if mark.exists():
        return False
    mark.touch()
    return True


def grouped(errands: Sequence[Errand], site: Site) -> list[list[Errand]]:
    """Errands whose messages name the same group together, the others alone."""
    groups: dict[Any, list[Errand]] = {}
    for errand in errands:
        groups.setdefault(errand.message.facts.get("group", -1 - errand.client), []).append(errand)
    return list(groups.values())


# -- helpers ---------------------------------------------------------------------------------------


def crowd() -> nestling.Experiment:
    return small(fleet=FleetConfig(tiers=tuple(replace(tier, count=5) for tier in TIERS)))


@pytest.fixture(scope="module")
def federation() -> nestling.runs.loop.Federation:
    return assemble(crowd())[1]


@pytest.fixture(scope="module")
def pool(federation: nestling.runs.loop.Federation) -> Iterator[Pool]:
    made = Pool(2, do=act, chunks=grouped)
    made.open(Method(), site_of(federation))
    yield made
    made.close()


def echo(
    client: int, state: dict[str, Tensor], memory: dict[str, Tensor] | None = None, **facts: Any
) -> Errand:
    return Errand(
        client, 1, "main", {}, Message({"weights": state}, {"act": "echo", **facts}), memory or {}
    )


def by_client(outcomes: Iterator[Outcome]) -> dict[int, Outcome]:
    return {outcome.client: outcome for outcome in outcomes}


def equal(one: Any, other: Any) -> bool:
    return list(one) == list(other) and all(
        one[n].dtype == other[n].dtype
        and one[n].shape == other[n].shape
        and torch.equal(one[n], other[n])
        for n in one
    )


def filled(value: float, size: int = 1000) -> dict[str, Tensor]:
    return {"a": torch.full((size,), float(value)), "b": torch.full((3, 5), -float(value))}


# -- what travels ----------------------------------------------------------------------------------

STATES: dict[str, dict[str, Tensor]] = {
    "nothing": {},
    "no entries": {
        "a": torch.zeros(0),
        "b": torch.zeros(3, 0, 2, dtype=torch.int64),
        "c": torch.ones(2),
    },
    "a number": {"a": torch.tensor(2.5), "b": torch.tensor(7)},
    "flags": {"a": torch.tensor([[True, False, True]]), "b": torch.zeros(0, dtype=torch.bool)},
    "half": {"a": torch.randn(5).half(), "b": torch.randn(3, 3).bfloat16(), "c": torch.randn(2)},
    "double and complex": {"a": torch.randn(3).double(), "b": torch.randn(2, 2) + 1j},
    "whole": {
        "a": torch.tensor([2**62, -1]),
        "b": torch.arange(7, dtype=torch.uint8),
        "c": torch.arange(3, dtype=torch.int32),
    },
    "mixed order": {
        "n": torch.tensor(3),
        "w": torch.randn(4, 3),
        "m": torch.tensor([True]),
        "v": torch.randn(2),
    },
    "not contiguous": {
        "a": torch.randn(4, 6).t(),
        "b": torch.randn(8)[::2],
        "c": torch.randn(1, 3).expand(4, 3),
    },
    "parameters": {
        "a": torch.nn.Parameter(torch.randn(3)),
        "b": torch.randn(2, requires_grad=True) * 2,
    },
    "odd floats": {"a": torch.tensor([float("inf"), -0.0, 1e-45])},
    "one piece": pack({"a": torch.randn(3, 2), "b": torch.randn(5), "n": torch.tensor(1)}),
    "names": {"": torch.ones(1), "a/b": torch.ones(2), "ü": torch.ones(3)},
}


def test_every_state_travels_exactly_both_ways(pool: Pool) -> None:
    states = list(STATES.values())
    errands = [
        echo(k, state, memory)
        for k, (state, memory) in enumerate(zip(states, reversed(states), strict=True))
    ]
    outcomes = by_client(pool.run(errands))
    assert len(outcomes) == len(STATES)
    for k, name in enumerate(STATES):
        assert list(outcomes[k].reply.parts) == ["weights"]
        assert equal(outcomes[k].reply["weights"], states[k]), name
        assert equal(outcomes[k].memory, states[-1 - k]), name
        assert not any(t.requires_grad for t in outcomes[k].reply["weights"].values())
        assert (outcomes[k].loss, outcomes[k].steps, outcomes[k].samples) == (
            0.5,
            3,
            7,
        ) and isinstance(outcomes[k].loss, float)


def test_nan_keeps_its_bits(pool: Pool) -> None:
    bits = torch.tensor([0x7FC00001, -1, 0x7F800001], dtype=torch.int32)
    (outcome,) = pool.run([echo(0, {"a": bits.view(torch.float32)})])
    assert torch.equal(outcome.reply["weights"]["a"].view(torch.int32), bits)


def test_kinds_and_facts_travel(pool: Pool) -> None:
    facts = {
        "act": "echo",
        "levels": [{"index": {"a": 3}}],
        "pair": (1, 2.5),
        "none": None,
        "by number": {1: "x"},
    }
    parts: dict[str, dict[str, Tensor]] = {
        "logits": {"l": torch.randn(3)},
        "nothing": {},
        "mask": {"m": torch.tensor([True])},
    }
    for message in (Message(parts, facts), Message({}, facts)):
        (outcome,) = pool.run([Errand(0, 1, "main", {}, message)])
        assert outcome.reply.facts["facts"] == facts
        assert list(outcome.reply.parts) == list(message.parts)
        assert all(equal(outcome.reply[kind], part) for kind, part in message.parts.items())


def test_floats_arrive_in_one_piece(pool: Pool) -> None:
    """So that the merge need not gather them again."""
    (outcome,) = pool.run([echo(0, filled(1.0))])
    weights = outcome.reply["weights"]
    assert isinstance(weights, Packed) and weights.flat is not None
    assert torch.equal(weights.flat, torch.cat([t.reshape(-1) for t in filled(1.0).values()]))
    assert weights["a"].data_ptr() == weights.flat.data_ptr() and weights.flat.data_ptr() % 64 == 0


def test_a_message_that_tasks_share_is_written_once(
    federation: nestling.runs.loop.Federation,
) -> None:
    made = Pool(1, do=act, chunks=grouped)
    made.open(Method(), site_of(federation))
    try:
        large = 2**18
        shared = [Message({"weights": filled(float(k), large)}, {"act": "echo"}) for k in (1, 2)]
        outcomes = by_client(made.run([Errand(c, 1, "main", {}, shared[c % 2]) for c in range(8)]))
        assert all(equal(outcomes[c].reply["weights"], shared[c % 2]["weights"]) for c in range(8))
        own = made._members[0].channel._own
        assert 2 * 4 * large <= made._common.size < 2 * 4 * large + 2**16
        assert all(block.size < 2**16 for block in own)
        alone = [echo(c, filled(float(c), large)) for c in range(3)]
        assert all(
            equal(o.reply["weights"], alone[o.client].message["weights"]) for o in made.run(alone)
        )
        assert all(4 * large <= block.size < 4 * large + 2**16 for block in own)
    finally:
        made.close()


def test_a_chunk_shares_what_its_tasks_share(pool: Pool) -> None:
    one, two = (Message({"weights": filled(v)}, {"act": "echo", "group": "g"}) for v in (1.0, 2.0))
    outcomes = by_client(
        pool.run([Errand(c, 1, "main", {}, m) for c, m in enumerate((one, two, one, one))])
    )
    assert [outcomes[c].reply.facts["messages"] for c in range(4)] == [2] * 4
    assert all(
        equal(outcomes[c].reply["weights"], m["weights"])
        for c, m in enumerate((one, two, one, one))
    )


# -- round after round -----------------------------------------------------------------------------


def test_blocks_grow_on_demand_and_are_used_again(pool: Pool) -> None:
    def sizes() -> list[list[int]]:
        channels = [m.channel for m in pool._members]
        return [[b.size for b in (*c._own, *c._theirs.values())] for c in channels]

    seen = []
    for size in (10, 20_000, 300_000, 10, 300_000):
        errands = [echo(c, filled(c + size, size), filled(-c, size)) for c in range(8)]
        outcomes = by_client(pool.run(errands))
        assert all(
            equal(outcomes[t.client].reply["weights"], t.message["weights"]) for t in errands
        )
        assert all(equal(outcomes[t.client].memory, t.memory) for t in errands)
        seen.append(sizes())
    for before, after in itertools.pairwise(seen):
        assert all(
            a >= b
            for one, other in zip(before, after, strict=True)
            for b, a in zip(one, other, strict=False)
        )
    assert max(map(max, seen[-1])) < 2 * 4 * 300_000 + 2**16


def test_what_was_received_stays_as_it_was(pool: Pool) -> None:
    def play(shift: int) -> list[Outcome]:
        return list(
            pool.run([echo(c, filled(c + shift, 50_000), filled(-c - shift)) for c in range(10)])
        )

    kept = play(0)
    part = {o.client: o.reply["weights"]["b"] for o in play(100)}
    play(200)
    gc.collect()
    play(300)
    assert all(
        equal(o.reply["weights"], filled(o.client, 50_000)) and equal(o.memory, filled(-o.client))
        for o in kept
    )
    assert all(torch.equal(b, filled(c + 100)["b"]) for c, b in part.items())


def test_spare_memory_is_lent_again_only_when_nobody_sees_it() -> None:
    spare = Spare()
    first = spare.take(4096)
    address = first.data_ptr()
    seen = first[64:128].view(torch.float32).numpy()
    del first
    assert spare.take(4096).data_ptr() != address
    del seen
    again = [spare.take(4096) for _ in range(2)]
    assert address in [t.data_ptr() for t in again]
    del again
    held = [spare.take(8192)]
    assert spare._used + spare._kept <= 8192 and len(held[0]) == 8192
    assert spare.take(0).numel() == 0


@pytest.mark.skipif(not LINUX, reason="counts open files in /proc")
def test_rounds_do_not_collect_open_files(pool: Pool) -> None:
    def open_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    errands = [echo(c, filled(float(c))) for c in range(6)]
    list(pool.run(errands))
    before = open_files()
    for _ in range(5):
        list(pool.run(errands))
    assert open_files() == before


# -- chunks ----------------------------------------------------------------------------------------


def test_chunks_are_worked_on_together_and_come_one_by_one(pool: Pool) -> None:
    outcomes = by_client(pool.run([echo(c, filled(float(c)), group=c % 3) for c in range(8)]))
    together = {c: o.reply.facts["clients"] for c, o in outcomes.items()}
    assert together == {c: [k for k in range(8) if k % 3 == c % 3] for c in range(8)}
    assert list(pool.run([])) == []


def test_chunked_work_equals_the_plain_loop(
    pool: Pool, federation: nestling.runs.loop.Federation
) -> None:
    world, method = federation.world, federation.method
    errands = []
    for client in range(4):
        device = world.device(client)
        piece = method.piece(device, 1)
        message = Message(method.send(device, piece, 1).parts, {"group": client % 2})
        errands.append(Errand(client, 1, piece.reference.name, piece.spec(), message))
    inline = Inline()
    inline.open(Method(), site_of(federation))
    expected, got = by_client(inline.run(errands)), by_client(pool.run(errands))
    assert got.keys() == expected.keys()
    for client, outcome in expected.items():
        assert equal(got[client].reply["weights"], outcome.reply["weights"])
        assert got[client].reply.facts == outcome.reply.facts and got[client].loss == outcome.loss


def test_the_longest_chunk_goes_first_and_one_always_waits(
    federation: nestling.runs.loop.Federation,
) -> None:
    made = Pool(1, do=act, chunks=grouped)
    made.open(Method(), site_of(federation))
    try:
        order = []
        for outcome in made.run(
            [echo(c, filled(1.0, size)) for c, size in enumerate((10, 4000, 100, 9000, 1000))]
        ):
            order.append(outcome.client)
            assert len(made._members[0].given) == min(DEPTH, 5 - len(order))
        assert order == [3, 1, 4, 2, 0]
    finally:
        made.close()


def test_an_error_names_the_failing_client_of_the_chunk(
    pool: Pool, federation: nestling.runs.loop.Federation
) -> None:
    device = federation.world.device(0)
    piece = federation.method.piece(device, 1)
    sound = Message(federation.method.send(device, piece, 1).parts, {"group": 0})
    errands = [Errand(c, 4, "main" if c < 2 else "nowhere", piece.spec(), sound) for c in range(3)]
    with pytest.raises(
        ClientError, match=r"client 2 failed in round 4: KeyError: 'nowhere'\nTraceback"
    ):
        list(pool.run(errands))
    with pytest.raises(
        ClientError, match="one of the clients 5, 6 failed in round 1: ValueError: no luck"
    ):
        list(pool.run([echo(c, {}, act="fail", group=0) for c in (5, 6)]))
    with pytest.raises(
        ClientError,
        match=r"client 5 failed in round 1: RuntimeError: the outcomes are those of clients \[6\]",
    ):
        list(pool.run([echo(5, {}, act="lose")]))


def test_a_round_that_was_given_up_does_not_reach_the_next(pool: Pool) -> None:
    members = list(pool._members)
    shared = Message({"weights": filled(99.0, 5000)}, {"act": "echo"})
    for spoilt in range(3):
        # The longest one fails first, while others are at work and waiting.
        run = pool.run(
            [
                echo(9, filled(0, 9000), act="fail"),
                *(Errand(c, 1, "main", {}, shared) for c in range(6, 15) if c != 9),
            ]
        )
        if spoilt == 1:
            next(iter(pool.run([echo(c, filled(c)) for c in range(6, 15)])))
        else:
            with pytest.raises(ClientError, match="no luck"):
                list(run)
        errands = [echo(c, filled(c + spoilt)) for c in range(6)]
        outcomes = list(pool.run(errands))
        assert sorted(o.client for o in outcomes) == list(range(6))
        assert all(
            equal(o.reply["weights"], errands[o.client].message["weights"]) for o in outcomes
        )
    assert pool._members == members


def test_an_exchange_that_breaks_off_does_not_block_the_next(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any) -> Outcome:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("nestling.engines.pool._unpack_outcome", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(pool.run([echo(c, filled(c)) for c in range(6)]))
    outcomes = list(pool.run([echo(c, filled(c)) for c in range(6)]))
    assert sorted(o.client for o in outcomes) == list(range(6))
    assert all(equal(o.reply["weights"], filled(o.client)) for o in outcomes)


def test_a_header_holds_plain_data_only() -> None:
    packet = PagePacket(
        0, 0, 8, {"weights": PagePart(0, ("a",), ((2,),), {"n": Place(8, torch.int64, ())}, None)}
    )
    for plain in (
        {"packet": packet, "facts": {"rate": 0.5, "levels": [1, "b"]}},
        "what went wrong",
        [1, None, True],
    ):
        assert _Header(io.BytesIO(pickle.dumps(plain))).load() == plain
    for strange in (os.system, torch.load, Path("/"), torch.ones(1)):
        with pytest.raises(pickle.UnpicklingError, match="no place in a header"):
            _Header(io.BytesIO(pickle.dumps({"facts": strange}))).load()


# -- when a process goes ---------------------------------------------------------------------------


def test_a_worker_that_dies_is_replaced_and_its_chunks_done(pool: Pool, tmp_path: Path) -> None:
    shared = Message({"weights": filled(5.0, 100_000)}, {"act": "echo"})
    errands = [
        *(
            echo(c, filled(c), filled(-c), act="die once", mark=str(tmp_path / "mark"), group=0)
            for c in range(2)
        ),
        *(Errand(c, 1, "main", {}, shared) for c in range(2, 8)),
    ]
    processes = [m.process.pid for m in pool._members]
    outcomes = by_client(pool.run(errands))
    assert (tmp_path / "mark").exists()
    assert len(set(processes) & {m.process.pid for m in pool._members}) == 1
    assert (
        all(equal(outcomes[t.client].reply["weights"], t.message["weights"]) for t in errands)
        and len(outcomes) == 8
    )
    assert all(equal(outcomes[c].memory, filled(-c)) for c in range(2))


def test_a_chunk_that_kills_twice_is_an_error(pool: Pool) -> None:
    with pytest.raises(
        ClientError,
        match=r"client [34] failed in round 1: its worker process died twice \(exit code -9\)",
    ):
        list(pool.run([echo(c, {}, act="die") for c in (3, 4)]))
    # The other of the two may still be at it, and is nobody's business any more.
    assert len(list(pool.run([echo(c, filled(c)) for c in range(4)]))) == 4


def left_behind() -> list[str]:
    """Shared memory of ours that this process still holds or that has a name."""
    gc.collect()
    files = [
        os.readlink(f"/proc/self/fd/{n}")
        for n in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{n}")
    ]
    maps = Path("/proc/self/maps").read_text().splitlines()
    names = [
        n
        for n in os.listdir("/dev/shm")
        if "nestling" in n or re.match(rf"torch_{os.getpid()}_", n)
    ]
    return [
        *(f for f in files if "memfd:nestling" in f),
        *(m for m in maps if "memfd:nestling" in m),
        *names,
    ]


LEAVING = """
import os, signal, sys
from nestling.runs.assemble import assemble, site_of
from nestling.engines import Pool
from nestling.methods.method import Method
from tests.engines.test_pool import act, crowd, echo, filled, grouped, left_behind

site = site_of(assemble(crowd())[1])

def play(pool):
    pool.open(Method(), site)
    os.kill(pool._members[0].process.pid, signal.SIGKILL)
    assert left_behind()
    run = pool.run([echo(c, filled(c, 100_000)) for c in range(6)])
    outcomes = [next(run), next(run)]
    if sys.argv[1] == "close":
        pool.close()
        return outcomes
    raise RuntimeError("the caller's own trouble")

pool = Pool(2, do=act, chunks=grouped)
outcomes = play(pool)
del pool
assert all(o.reply["weights"]["a"][0] == o.client for o in outcomes)
print("left:", left_behind())
"""


@pytest.mark.skipif(not LINUX, reason="looks in /proc and /dev/shm")
@pytest.mark.parametrize("way", ["close", "raise"])
def test_nothing_is_left_behind(way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVING, way],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    if way == "close":
        assert (done.returncode, done.stderr, done.stdout) == (0, "", "left: []\n")
    else:
        assert done.returncode == 1 and done.stderr.strip().endswith(
            "RuntimeError: the caller's own trouble"
        )
        assert not re.search("leaked|resource_tracker|ignored", done.stderr)
    assert not [name for name in os.listdir("/dev/shm") if "nestling" in name]

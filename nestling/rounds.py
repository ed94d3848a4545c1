"""The loop: choose → send → train → merge → evaluate → log → checkpoint."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nestling.devices import Timing
from nestling.engines import Engine
from nestling.errors import InputError
from nestling.evaluation import Bench, evaluate
from nestling.message import Message, faults
from nestling.methods import Method, Reply
from nestling.methods.server import KEPT, Kept, Server, merge_round, shown
from nestling.training.client import Outcome, Task
from nestling.views import State
from nestling.views.flat import Row, layout_of
from nestling.world import Device, Piece, World

Metrics = dict[str, Any]
Expected = Mapping[str, Mapping[str, Tensor]]


@dataclass
class Totals:
    """What adds up over a run; part of every checkpoint."""

    round: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    refused: int = 0
    late: int = 0
    dropped: int = 0
    clock_seconds: float = 0.0
    energy_joules: float = 0.0


@dataclass
class Federation:
    """Everything a run needs, put together."""

    world: World
    method: Method
    engine: Engine
    bench: Bench
    rounds: int
    participants: int
    evaluate_every: int
    server: Server = field(default_factory=Server)
    kept: Kept = field(default_factory=dict)  # what the server's own optimiser and mean go by
    totals: Totals = field(default_factory=Totals)
    on_client: Callable[[int, int], None] = lambda done, of: None
    on_refusal: Callable[[int, int, str], None] = lambda client, round, reason: None
    ahead: int = 0  # rounds that the method's state is ahead of `totals`
    settle: bool = False  # set to have no round started before all that were are done
    stateful: bool = False  # whether any client has kept anything
    notes: list[str] = field(default_factory=list)  # what a run should tell its user beside results

    @property
    def shown(self) -> Method:
        """The method whose models are tested, reported and exported."""
        return shown(self.server, self.method, self.kept)

    def state(self) -> dict[str, State]:
        """The server's state by name: the method's and its own."""
        return {**self.method.state(), **self.kept}

    def restore(self, state: Mapping[str, State]) -> None:
        """Puts back what `state` gave."""
        self.kept = {name: part for name, part in state.items() if name.startswith(KEPT)}
        self.method.restore({name: part for name, part in state.items() if name not in self.kept})

    def roll_back(self, round: int, state: Mapping[str, State]) -> None:
        """Undoes a round and those begun after it: the server's state, what clients keep, and what is written down of them."""
        self.world.store.undo(round)
        self.restore(state)


@dataclass
class _Sent:
    """One client's share of a round."""

    device: Device
    piece: Piece
    message: Message
    dropped: bool


@dataclass
class _Round:
    """A round under way: merged, but perhaps still being computed on a device."""

    number: int
    before: dict[str, State]
    spoilt: frozenset[int]  # whose replies turned out not to be finite when the round was played before
    sent: dict[int, _Sent] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)  # whose replies to this round do not count
    refusals: list[tuple[int, str]] = field(default_factory=list)
    unsure: list[tuple[int, Row]] = field(default_factory=list)  # clients whose reply counted before its values were looked at
    events: dict[str, float] = field(default_factory=dict)
    tested: dict[str, Any] | None = None
    error: Exception | None = None

    def broken(self) -> frozenset[int]:
        """Whose replies counted though they are not finite; waits for the device that computes them."""
        return frozenset([client for client, row in self.unsure if not row.stack.finite[row.number]])


def play(federation: Federation) -> Iterator[Metrics]:
    """Plays the remaining rounds; gives each one's metrics after its merge, before anything is written.

    Where the engine works asynchronously, the next round is started before the results of one are looked at. Should a reply turn out
    not to be finite, everything goes back to how it was before that round, which is played again without it.
    """
    waiting: deque[_Round] = deque()
    number, mark = federation.totals.round + 1, time.monotonic()
    spoilt: frozenset[int] = frozenset()
    while waiting or number <= federation.rounds:
        # What clients of two rounds had before is not held at once, so where they keep something no round is started on trust.
        ahead = 0 if federation.settle or federation.stateful else federation.engine.lookahead
        if number <= federation.rounds and len(waiting) <= ahead and not (waiting and waiting[-1].error):
            waiting.append(_start(federation, number, spoilt))
            number, spoilt = number + 1, frozenset()
            continue
        done = waiting.popleft()
        federation.ahead = len(waiting)
        broken = done.broken()
        if broken:
            federation.roll_back(done.number, done.before)
            waiting.clear()
            number, spoilt = done.number, done.spoilt | broken
            continue
        if done.error:
            raise done.error
        federation.world.store.settle(done.number)
        metrics = _measure(federation, done)
        mark, metrics["seconds"] = time.monotonic(), time.monotonic() - mark
        federation.totals.round = done.number
        yield metrics
        mark = mark if waiting else time.monotonic()  # what the caller does with the metrics is no part of a round


def _start(federation: Federation, number: int, spoilt: frozenset[int]) -> _Round:
    before = {name: state.copy() for name, state in federation.state().items()}
    found = _Round(number, before, spoilt)
    federation.world.store.begin(number)
    try:
        _carry_out(federation, found)
    except Exception as error:
        # A value that is not finite may be why, in this round or in the one before, and nobody has looked at them yet.
        found.error = error
    return found


def _carry_out(federation: Federation, found: _Round) -> None:
    number = found.number
    found.sent = _send(federation, number)
    found.outcomes = _train(federation, found.sent, number)
    replies = _admit(federation, found)
    _keep(federation, found)
    federation.kept = merge_round(federation.server, federation.method, replies, number, federation.kept)
    if number % federation.evaluate_every == 0 or number == federation.rounds:
        found.tested = evaluate(federation.shown, federation.world, federation.bench)


def _send(federation: Federation, number: int) -> dict[int, _Sent]:
    world, method = federation.world, federation.method
    chosen = method.choose(number, federation.participants)
    sent = {}
    for client in chosen:
        device = world.device(client, number)
        piece = method.piece(device, number)
        sent[client] = _Sent(device, piece, method.send(device, piece, number), world.fleet.drops(client, number))
    return sent


def _train(federation: Federation, sent: dict[int, _Sent], number: int) -> dict[int, Outcome]:
    """Runs the work of all clients that do not vanish."""
    store = federation.world.store
    tasks = [
        Task(client, number, s.piece.reference.name, s.piece.spec(), s.message, store.get(client))
        for client, s in sent.items()
        if not s.dropped
    ]
    outcomes = {}
    for outcome in federation.engine.run(tasks):
        outcomes[outcome.client] = outcome
        federation.on_client(len(outcomes), len(tasks))
    # In the order of their numbers, whatever order they finished in.
    return dict(sorted(outcomes.items()))


def _keep(federation: Federation, found: _Round) -> None:
    """Puts away what clients keep. Who is refused counts as dropped, and goes on from what it had before."""
    store, discard = federation.world.store, getattr(federation.engine, "discard", None)
    for client, outcome in found.outcomes.items():
        federation.stateful |= bool(outcome.memory)
        if client not in found.refused:
            store.put(client, outcome.memory, found.number)
        elif discard:  # real devices keep what is theirs
            discard(client, found.number)


def _admit(federation: Federation, found: _Round) -> list[Reply]:
    """The replies that count; writes down what happened to the others and to the clock."""
    world, replies, sent = federation.world, [], found.sent
    told = _refused_by_engine(federation.engine)
    found.refusals += [(client, reason) for client, _, reason in told]
    heard = {*found.outcomes, *(client for client, round, _ in told if round == found.number)}
    events = {"late": 0, "dropped": sum(client not in heard for client in sent), "seconds": 0.0, "joules": 0.0}
    deadline = world.fleet.deadline
    seen: dict[Hashable, Timing] = {}  # clients with equal work take equally long, unless devices slow down by chance
    expected: dict[Hashable, Expected] = {}  # clients that got the same must send the same back
    for client, outcome in found.outcomes.items():
        s = sent[client]
        piece, reason = _returned(federation.method, s, outcome.reply)
        same = (piece, s.device.tier, id(s.message), outcome.samples, outcome.reply.nbytes)
        spent = seen.get(same)
        if spent is None:
            spent = _timing(world, s, piece, outcome, found.number)
            if world.fleet.steady:
                seen[same] = spent
        events["joules"] += spent.energy_j
        events["seconds"] = max(events["seconds"], min(spent.total_s, deadline or spent.total_s))
        if deadline and spent.total_s > deadline:
            events["late"] += 1
            continue
        form = (piece, id(s.message))
        if form not in expected:
            expected[form] = federation.method.expects(piece, s.message)
        reason = _NOT_FINITE if client in found.spoilt else reason or _faults(expected[form], s, outcome.reply, found)
        if reason:
            found.refusals.append((client, reason))
            found.refused.add(client)
            continue
        replies.append(Reply(s.device, piece, s.message, outcome.reply))
    if deadline and events["dropped"]:
        events["seconds"] = deadline  # the server waited for those that never answered
    found.events = {**events, "merged": len(replies)}
    return replies


_NOT_FINITE = "values that are not finite"


def _refused_by_engine(engine: Engine) -> list[tuple[int, int, str]]:
    """What an engine with real devices behind it refused in this round, before anybody could look at the content: whose reply to which
    round, and why."""
    refused = getattr(engine, "refused", [])
    found = list(refused)
    refused.clear()
    return found


def _returned(method: Method, s: _Sent, reply: Message) -> tuple[Piece, str | None]:
    """The piece that a reply is of, and why it is refused where it names none that it could be."""
    try:
        return method.returned(s.piece, s.message, reply.facts), None
    except InputError as error:
        return s.piece, error.message


def _faults(expected: Expected, s: _Sent, reply: Message, found: _Round) -> str | None:
    """Why a reply is refused. Rows of a stack are known to be well-formed by their layout; whether they are finite is asked later."""
    rows = []
    for kind, part in reply.parts.items():
        if isinstance(part, Row) and kind in expected and part.layout is layout_of(expected[kind]):
            part.stack.look()
            found.unsure.append((s.device.id, part))
            rows.append(kind)
    if len(rows) < len(reply.parts) or len(rows) < len(expected):
        rest = Message({kind: part for kind, part in reply.parts.items() if kind not in rows}, reply.facts)
        reason = faults(rest, {kind: like for kind, like in expected.items() if kind not in rows})
        if reason:
            return reason
    return _bad_facts(reply)


def _bad_facts(reply: Message) -> str | None:
    samples = reply.facts.get("samples")
    good = type(samples) is int and 0 < samples < 2**40
    return None if good else f"the number of samples is {samples!r}"


def _timing(world: World, s: _Sent, piece: Piece, outcome: Outcome, number: int) -> Timing:
    slowdown = world.fleet.slowdown(s.device.id, number)
    return world.timing(s.device.tier, piece, outcome.samples, s.message.nbytes, outcome.reply.nbytes, slowdown)


def _measure(federation: Federation, done: _Round) -> Metrics:
    totals, sent, outcomes, events = federation.totals, done.sent, done.outcomes, done.events
    for client, reason in done.refusals:
        federation.on_refusal(client, done.number, reason)
    losses = {client: float(o.loss) for client, o in outcomes.items()}
    counts = {"refused": len(done.refusals), "late": int(events["late"]), "dropped": int(events["dropped"])}
    up = sum([o.reply.nbytes for o in outcomes.values()])
    down = sum([s.message.nbytes for s in sent.values()])
    totals.bytes_up, totals.bytes_down = totals.bytes_up + up, totals.bytes_down + down
    for name, count in counts.items():
        setattr(totals, name, getattr(totals, name) + count)
    totals.clock_seconds += events["seconds"]
    totals.energy_joules += events["joules"]
    tested = dict(done.tested or {"global_accuracy": None, "personal_accuracy": None, "by_tier": {}})
    accuracies = tested.pop("by_tier")
    by_tier = _tier_losses(federation.world, sent, outcomes, losses)
    return {
        "round": done.number,
        "clients": list(sent),
        "missed": [client for client in sent if client not in outcomes],
        "merged": int(events["merged"]),
        "loss": _weighted_loss(list(outcomes.values()), losses),
        "by_tier": {tier: {**row, **accuracies.get(tier, {})} for tier, row in by_tier.items()},
        "bytes_up": up,
        "bytes_down": down,
        "bytes_up_total": totals.bytes_up,
        "bytes_down_total": totals.bytes_down,
        **counts,
        "clock_seconds": totals.clock_seconds,
        "energy_joules": totals.energy_joules,
        **tested,
    }


def _tier_losses(
    world: World, sent: dict[int, _Sent], outcomes: dict[int, Outcome], losses: dict[int, float]
) -> dict[str, Metrics]:
    own: dict[str, list[Outcome]] = {tier: [] for tier in world.plans}
    for client, outcome in outcomes.items():
        own[sent[client].device.tier].append(outcome)
    return {
        tier: {
            "global_accuracy": None,
            "personal_accuracy": None,
            "loss": _weighted_loss(found, losses),
            "clients": len(found),
        }
        for tier, found in own.items()
    }


def _weighted_loss(outcomes: list[Outcome], losses: dict[int, float]) -> float | None:
    samples = sum([o.samples for o in outcomes])
    return sum([losses[o.client] * o.samples for o in outcomes]) / samples if samples else None

"""The loop: choose → send → train → merge → evaluate → log → checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nestling.devices import Budget, Timing, round_time
from nestling.engines import Engine
from nestling.evaluation import Bench, evaluate
from nestling.message import Message, faults
from nestling.methods import Method, Reply
from nestling.training.client import Outcome, Task
from nestling.world import Device, Piece, World

Metrics = dict[str, Any]


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
    totals: Totals = field(default_factory=Totals)
    on_client: Callable[[int, int], None] = lambda done, of: None
    on_refusal: Callable[[int, int, str], None] = lambda client, round, reason: None


@dataclass
class _Sent:
    """One client's share of a round."""

    device: Device
    piece: Piece
    message: Message
    dropped: bool


def play(federation: Federation) -> Iterator[Metrics]:
    """Plays the remaining rounds; gives each one's metrics after its merge, before anything is written."""
    for number in range(federation.totals.round + 1, federation.rounds + 1):
        began = time.monotonic()
        sent = _send(federation, number)
        outcomes = _train(federation, sent, number)
        replies, events = _admit(federation, sent, outcomes, number)
        federation.method.merge(replies, number)
        metrics = _measure(federation, number, sent, outcomes, events)
        metrics["seconds"] = time.monotonic() - began
        federation.totals.round = number
        yield metrics


def _send(federation: Federation, number: int) -> dict[int, _Sent]:
    world, method = federation.world, federation.method
    chosen = world.fleet.choose(number, federation.participants)
    sent = {}
    for client in chosen:
        device = world.device(client, number)
        piece = method.piece(device, number)
        sent[client] = _Sent(device, piece, method.send(device, piece, number), world.fleet.drops(client, number))
    return sent


def _train(federation: Federation, sent: dict[int, _Sent], number: int) -> dict[int, Outcome]:
    """Runs the work of all clients that do not vanish, and puts away what they keep."""
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
    outcomes = dict(sorted(outcomes.items()))
    for client, outcome in outcomes.items():
        store.put(client, outcome.memory, number)
    return outcomes


def _admit(
    federation: Federation, sent: dict[int, _Sent], outcomes: dict[int, Outcome], number: int
) -> tuple[list[Reply], dict[str, float]]:
    """The replies that count, and what happened to the others and to the clock."""
    world, replies = federation.world, []
    events = {"refused": 0, "late": 0, "dropped": sum(s.dropped for s in sent.values()), "seconds": 0.0, "joules": 0.0}
    deadline = world.fleet.deadline
    for client, outcome in outcomes.items():
        s = sent[client]
        spent = _timing(world, s, outcome, number)
        events["joules"] += spent.energy_j
        events["seconds"] = max(events["seconds"], min(spent.total_s, deadline or spent.total_s))
        if deadline and spent.total_s > deadline:
            events["late"] += 1
            continue
        reason = faults(outcome.reply, federation.method.expects(s.piece, s.message)) or _bad_facts(outcome.reply)
        if reason:
            events["refused"] += 1
            federation.on_refusal(client, number, reason)
            continue
        replies.append(Reply(s.device, s.piece, s.message, outcome.reply))
    if deadline and events["dropped"]:
        events["seconds"] = deadline  # the server waited for those that never answered
    return replies, events


def _bad_facts(reply: Message) -> str | None:
    samples = reply.facts.get("samples")
    good = isinstance(samples, int) and not isinstance(samples, bool) and 0 < samples < 2**40
    return None if good else f"the number of samples is {samples!r}"


def _timing(world: World, s: _Sent, outcome: Outcome, number: int) -> Timing:
    plan = world.plans[s.device.tier]
    budget = Budget(batch=world.train.batch, samples=outcome.samples, epochs=1, optimizer=plan.budget.optimizer)
    slowdown = world.fleet.slowdown(s.device.id, number)
    return round_time(plan.profile, world.cost(s.piece), budget, s.message.nbytes, outcome.reply.nbytes, slowdown)


def _measure(
    federation: Federation, number: int, sent: dict[int, _Sent], outcomes: dict[int, Outcome], events: dict[str, float]
) -> Metrics:
    totals = federation.totals
    up = sum(o.reply.nbytes for o in outcomes.values())
    down = sum(s.message.nbytes for s in sent.values())
    totals.bytes_up, totals.bytes_down = totals.bytes_up + up, totals.bytes_down + down
    for name in ("refused", "late", "dropped"):
        setattr(totals, name, getattr(totals, name) + int(events[name]))
    totals.clock_seconds += events["seconds"]
    totals.energy_joules += events["joules"]
    metrics: Metrics = {
        "round": number,
        "clients": list(sent),
        "loss": _weighted_loss(list(outcomes.values())),
        "global_accuracy": None,
        "personal_accuracy": None,
        "by_tier": _tier_losses(federation.world, sent, outcomes),
        "bytes_up": up,
        "bytes_down": down,
        "bytes_up_total": totals.bytes_up,
        "bytes_down_total": totals.bytes_down,
        **{name: int(events[name]) for name in ("refused", "late", "dropped")},
        "clock_seconds": totals.clock_seconds,
        "energy_joules": totals.energy_joules,
    }
    if number % federation.evaluate_every == 0 or number == federation.rounds:
        tested = evaluate(federation.method, federation.world, federation.bench)
        for tier, values in tested.pop("by_tier").items():
            metrics["by_tier"][tier].update(values)
        metrics.update(tested)
    return metrics


def _tier_losses(world: World, sent: dict[int, _Sent], outcomes: dict[int, Outcome]) -> dict[str, Metrics]:
    rows = {}
    for tier in world.plans:
        own = [o for client, o in outcomes.items() if sent[client].device.tier == tier]
        rows[tier] = {"global_accuracy": None, "personal_accuracy": None, "loss": _weighted_loss(own), "clients": len(own)}
    return rows


def _weighted_loss(outcomes: list[Outcome]) -> float | None:
    samples = sum(o.samples for o in outcomes)
    return sum(o.loss * o.samples for o in outcomes) / samples if samples else None

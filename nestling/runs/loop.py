"""The loop: choose → send → train → admit → merge → test. What a round did is undone whole if it
must be (`ahead`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from nestling.engines import Refusal
from nestling.methods.server import merge_round
from nestling.runs import gate
from nestling.runs.accounting import account_for
from nestling.runs.admission import Round, Sent, admit
from nestling.runs.ahead import rounds_that_stand
from nestling.runs.attacked import attack
from nestling.runs.bounds import hold, note_lowered
from nestling.runs.evaluation import evaluate
from nestling.runs.federation import Federation, Metrics
from nestling.training.client import Errand, Outcome


def play(federation: Federation, halt: Callable[[], bool] = lambda: False) -> Iterator[Metrics]:
    """Plays the remaining rounds; gives each one's metrics after its merge, before anything is
    written. While `halt` says so no round is started before all that were are done."""
    if federation.server.gate:
        gate.begin(federation)
    mark = time.monotonic()
    for done in rounds_that_stand(federation, carry_out, halt):
        metrics = account_for(federation, done)
        mark, metrics["seconds"] = time.monotonic(), time.monotonic() - mark
        yield metrics
        # what the caller does with the metrics is no part of a round
        mark = mark if federation.ahead else time.monotonic()


def carry_out(federation: Federation, round: Round) -> None:
    """One round."""
    send(federation, round)
    train(federation, round)
    if federation.attackers:
        attack(federation, round)
    replies = admit(federation, round)
    hold(federation, round, replies)
    keep(federation, round)
    federation.kept = merge_round(
        federation.server, federation.method, replies, round.number, federation.kept
    )
    note_lowered(federation, round)
    if federation.server.gate:
        round.gate = gate.guard(federation)
    if federation.doubts:
        round.measure(federation.state())
    if round.number % federation.evaluate_every == 0 or round.number == federation.rounds:
        round.tested = evaluate(federation.shown, federation.world, federation.bench)


def send(federation: Federation, round: Round) -> None:
    """Chooses clients, and what each of them is sent."""
    world, method = federation.world, federation.method
    for client in method.choose(round.number, federation.participants):
        device = world.device(client, round.number)
        piece = method.piece(device, round.number)
        message = method.send(device, piece, round.number)
        round.sent[client] = Sent(device, piece, message, world.fleet.drops(client, round.number))


def train(federation: Federation, round: Round) -> None:
    """Runs the work of all clients that do not vanish."""
    store, number = federation.world.store, round.number
    errands = [
        Errand(client, number, s.piece.reference.name, s.piece.spec(), s.message, store.get(client))
        for client, s in round.sent.items()
        if not s.dropped
    ]
    outcomes: dict[int, Outcome] = {}
    for event in federation.engine.run(errands):
        if isinstance(event, Outcome):
            outcomes[event.client] = event
            federation.on_client(len(outcomes), len(errands))
        elif isinstance(event, Refusal):
            round.refusals.append(event)
        else:
            round.boards.append(event.facts)
    # In the order of their numbers, whatever order they finished in.
    round.outcomes = dict(sorted(outcomes.items()))


def keep(federation: Federation, round: Round) -> None:
    """Puts away what clients keep. Who is refused or late counts as dropped, and goes on from what
    it had before."""
    for client, outcome in round.outcomes.items():
        federation.stateful |= bool(outcome.memory)
        if client in round.void:
            federation.engine.discard(client, round.number)
        else:
            federation.world.store.put(client, outcome.memory, round.number)

"""What attackers reply, in a simulation with `[attack]`."""

from __future__ import annotations

from dataclasses import replace

from nestling.runs.admission import Round
from nestling.runs.federation import Federation
from nestling.runs.received import received_by


def attack(federation: Federation, round: Round) -> None:
    """Puts what the attackers send in place of their replies; nothing else of a round changes."""
    for client in federation.attackers & round.outcomes.keys():
        outcome, sent = round.outcomes[client], round.sent[client]
        received = received_by(federation.method, sent.piece, sent.message, outcome.reply)
        lie = federation.attack.lie(outcome.reply, received)
        round.outcomes[client] = replace(outcome, reply=lie)

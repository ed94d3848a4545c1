"""What attackers reply, in a simulation with `[attack]`."""

from __future__ import annotations

from dataclasses import replace

import torch

from nestling.runs.admission import Round, Sent
from nestling.runs.federation import Federation
from nestling.training.client import Outcome
from nestling.trust.attacks import received_as
from nestling.views import Tensors


def attack(federation: Federation, round: Round) -> None:
    """Puts what the attackers send in place of their replies; nothing else of a round changes."""
    for client in federation.attackers & round.outcomes.keys():
        outcome = round.outcomes[client]
        received = _received(federation, round.sent[client], outcome)
        lie = federation.attack.lie(outcome.reply, received)
        round.outcomes[client] = replace(outcome, reply=lie)


def _received(federation: Federation, sent: Sent, outcome: Outcome) -> Tensors:
    """The weights that a client began with, in the shapes of its reply. An update begins at
    zero."""
    weights = sent.message.parts.get("weights", {})
    if "update" in outcome.reply.parts:
        trained = sent.piece.reference.parameters
        return {n: torch.zeros_like(t) if n in trained else t for n, t in weights.items()}
    reply = outcome.reply.parts.get("weights", {})
    if all(n in weights and weights[n].shape == t.shape for n, t in reply.items()):
        return weights
    returned = federation.method.returned(sent.piece, sent.message, outcome.reply.facts)
    return received_as(weights, sent.piece.view, returned.view)

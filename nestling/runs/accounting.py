"""What a round did, in numbers: its line of the metrics, and what it adds to the run's totals."""

from __future__ import annotations

from typing import Any

from nestling.harmless import harmless
from nestling.runs.admission import Round
from nestling.runs.federation import Federation, Metrics
from nestling.training.client import Outcome

MOST_SAID, MOST_LETTERS = 100, 300
"""How many refusals stand in a round's line by client, and how much of each: who is refused can
make more of them."""

MOST_CLASSES = 30
"""A confusion matrix of more classes is written down in the last round only: each of them would be
longer than all the rest of a line."""


def account_for(federation: Federation, round: Round) -> Metrics:
    """A round's metrics; adds it to the totals, and says who was refused, what boards did and that
    the round stands."""
    tell(federation, round)
    federation.on_merged(round.number, round.outcomes, round.rows)
    totals, outcomes = federation.totals, round.outcomes
    losses = {client: float(outcome.loss) for client, outcome in outcomes.items()}
    up = sum([outcome.reply.nbytes for outcome in outcomes.values()])
    down = sum([sent.message.nbytes for sent in round.sent.values()])
    counts = {"refused": len(round.refusals), "late": round.late, "dropped": round.dropped}
    totals.round = round.number
    totals.bytes_up, totals.bytes_down = totals.bytes_up + up, totals.bytes_down + down
    totals.refused, totals.late = totals.refused + counts["refused"], totals.late + counts["late"]
    totals.dropped += counts["dropped"]
    totals.clock_seconds += round.seconds
    totals.energy_joules += round.joules
    if federation.method.shares_weights:
        federation.coverage.add(round.trained.values())
    tested = dict(
        round.tested
        or {
            "global_score": None,
            "personal_score": None,
            "by_tier": {},
            "metrics": {},
            "by_class": {},
        }
    )
    if federation.world.classes > MOST_CLASSES and round.number != federation.rounds:
        tested["by_class"] = {k: v for k, v in tested["by_class"].items() if k != "confusion"}
    scores = tested.pop("by_tier")
    return {
        "round": round.number,
        "clients": list(round.sent),
        "missed": [client for client in round.sent if client not in outcomes],
        "merged": round.merged,
        "loss": _weighted_loss(list(outcomes.values()), losses),
        "by_tier": {
            tier: {**row, **scores.get(tier, {})}
            for tier, row in _by_tier(federation, round, losses).items()
        },
        "bytes_up": up,
        "bytes_down": down,
        "bytes_up_total": totals.bytes_up,
        "bytes_down_total": totals.bytes_down,
        **counts,
        "clock_seconds": totals.clock_seconds,
        "energy_joules": totals.energy_joules,
        **tested,
        **({"gate": round.gate} if round.gate else {}),
        **(_sizes(federation, round) if federation.shrinks else {}),
        **_latecomers(round),
        **said_of(round),
    }


def _sizes(federation: Federation, round: Round) -> dict[str, list[int]]:
    """How many parameters each chosen client trained, or would have; masks are not looked at."""
    pieces = [round.trained.get(client, sent.piece) for client, sent in round.sent.items()]
    sizes = {piece: federation.world.cost(piece).params for piece in dict.fromkeys(pieces)}
    return {"trained": [sizes[piece] for piece in pieces]}


def _latecomers(round: Round) -> dict[str, list[int]]:
    """Whose replies came after the deadline; nothing where none did."""
    if not round.late:
        return {}
    return {"late_clients": sorted(round.void - {told.client for told in round.refusals})}


def said_of(round: Round) -> dict[str, list[dict[str, Any]]]:
    """Client by client, whose replies were refused or count for less than they say, and why;
    nothing where there are none."""
    refused = [(told.client, told.reason) for told in round.refusals]
    clipped = [(client, "; ".join(why)) for client, why in sorted(round.clipped.items())]
    return {
        name: [{"client": c, "reason": harmless(why, MOST_LETTERS)} for c, why in told[:MOST_SAID]]
        for name, told in (("refusals", refused), ("clipped", clipped))
        if told
    }


def tell(federation: Federation, round: Round) -> None:
    """Says who was refused, whose replies count for less, and what boards did."""
    for told in round.refusals:
        federation.on_refusal(told.client, round.number, told.reason)
    for client, reasons in sorted(round.clipped.items()):
        federation.on_clipped(client, round.number, "; ".join(reasons))
    for facts in round.boards:
        federation.on_board(facts)


def _by_tier(
    federation: Federation, round: Round, losses: dict[int, float]
) -> dict[str, dict[str, Any]]:
    own: dict[str, list[Outcome]] = {tier: [] for tier in federation.world.plans}
    for client, outcome in round.outcomes.items():
        own[round.sent[client].device.tier].append(outcome)
    untested = {"global_score": None, "personal_score": None}
    return {
        tier: {**untested, "loss": _weighted_loss(found, losses), "clients": len(found)}
        for tier, found in own.items()
    }


def _weighted_loss(outcomes: list[Outcome], losses: dict[int, float]) -> float | None:
    samples = sum([o.samples for o in outcomes])
    return sum([losses[o.client] * o.samples for o in outcomes]) / samples if samples else None

"""How far a reply that is admitted may go: how long its step may be, and what it may weigh.

A step (a reply's weights less those that it was sent; of statistics and logits, where no weights
travel, these themselves) is held against the median of the last replies' and this round's: who goes
`server.most_step` times as far is brought back to that, in the direction it took. What is long is
the root mean square over the entries, so that a small piece and a large one can be compared. What
clients weigh is bounded by `server.most_share`: here their rows, and in every mean over views each
entry (`trust.weighing`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nestling.attacks import TOLD, WEIGHTS
from nestling.message import Message
from nestling.methods import Reply
from nestling.methods.server import KEPT
from nestling.runs.admission import Round
from nestling.runs.federation import Federation
from nestling.runs.received import received_by
from nestling.trust.weighing import fair_cap
from nestling.views import Tensors

STEPS = f"{KEPT}steps"
"""Where the lengths of the last steps are kept: a run that is resumed holds replies to the same."""

REMEMBERED = 64
"""So many of them. Few enough that they follow a learning rate that falls, enough that the few
replies of one round do not make the median."""


def hold(federation: Federation, round: Round, replies: Sequence[Reply]) -> None:
    """Brings replies back to their bounds, and writes down whose and why."""
    # A fleet becomes one of real devices after it was put together, so this is told every round.
    federation.method.most_share = federation.most_share
    # Where data are unlike, one client may well have most rows of a class: only if it is asked for.
    federation.method.most_of_class = federation.server.most_share
    if math.isfinite(federation.most_step):
        _hold_steps(federation, round, replies)
    federation.method.lowered = {} if federation.most_share < 1 else None
    if federation.most_share < 1:
        _hold_rows(federation.most_share, round, replies)
    round.rows = {reply.device.id: reply.samples for reply in replies}


def note_lowered(federation: Federation, round: Round) -> None:
    """After the merge, writes down whose weight it brought down in single entries."""
    for client, found in (federation.method.lowered or {}).items():
        round.clip(
            client,
            f"its weight was brought down in {found.entries} entries, to {found.least:.2g} of what "
            f"it says at the least: nobody has more than "
            f"{federation.most_share:.0%} of an entry (server.most_share)",
        )


def _hold_rows(most: float, round: Round, replies: Sequence[Reply]) -> None:
    cap = fair_cap([float(reply.samples) for reply in replies], most)
    for reply in replies:
        if (rows := reply.samples) > cap:
            reply.most = max(1, int(cap))
            round.clip(
                reply.device.id,
                f"its {rows} rows count as {reply.most}: nobody has more than {most:.0%} of a "
                "round's weight (server.most_share)",
            )


def _hold_steps(federation: Federation, round: Round, replies: Sequence[Reply]) -> None:
    begun = [_begun(federation, reply) for reply in replies]
    lengths = [_length(r.message, b) for r, b in zip(replies, begun, strict=True)]
    known = federation.kept.get(STEPS, {}).get("lengths", torch.zeros(0, dtype=torch.float64))
    # What is not finite was not looked at yet where a device computes it: the round is played again
    # without it.
    real = [length for length in lengths if math.isfinite(length)]
    middle = _median([*known.tolist(), *real])
    limit = middle * federation.most_step if middle else math.inf
    for reply, base, length in zip(replies, begun, lengths, strict=True):
        if math.isfinite(length) and length > limit:
            reply.message = _shortened(reply.message, base, limit / length)
            round.clip(
                reply.device.id,
                f"its step was {length / middle:.3g} times the median and counts as "
                f"{federation.most_step:g} times (server.most_step)",
            )
    last = [*known.tolist(), *(min(length, limit) for length in real)][-REMEMBERED:]
    kept = {"lengths": torch.tensor(last, dtype=torch.float64)}
    federation.kept = {**federation.kept, STEPS: kept}


def _begun(federation: Federation, reply: Reply) -> Mapping[str, Tensors]:
    """By part, what the steps of a reply are counted from; only those parts that have any."""
    parts = reply.message.parts
    if set(WEIGHTS) & parts.keys():
        received = received_by(federation.method, reply.piece, reply.sent, reply.message)
        return {kind: received for kind in WEIGHTS if kind in parts}
    return {kind: {} for kind in TOLD if kind in parts}


def _length(reply: Message, begun: Mapping[str, Tensors]) -> float:
    squares, entries = 0.0, 0
    for kind, base in begun.items():
        for name, tensor in _floats(reply.parts[kind]):
            squares += float(_step(name, tensor, base).square().sum())
            entries += tensor.numel()
    return math.sqrt(squares / max(entries, 1))


def _shortened(reply: Message, begun: Mapping[str, Tensors], times: float) -> Message:
    """The reply with its step made so many times as long."""
    parts = dict(reply.parts)
    for kind, base in begun.items():
        part = reply.parts[kind]
        parts[kind] = {
            **part,
            **{
                name: (tensor.double() + (times - 1) * _step(name, tensor, base)).to(tensor.dtype)
                for name, tensor in _floats(part)
            },
        }
    return Message(parts, reply.facts)


def _floats(part: Tensors) -> list[tuple[str, Tensor]]:
    return [(name, t) for name, t in part.items() if t.is_floating_point() and t.numel()]


def _step(name: str, tensor: Tensor, base: Tensors) -> Tensor:
    start = base.get(name)
    wide = tensor.to(torch.float64)
    return wide if start is None or start.shape != tensor.shape else wide - start.to(wide)


def _median(values: Sequence[float]) -> float:
    """Of two middle ones the smaller; 0 where there are none."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0

"""Which replies of a round count: what each must look like, whether it came in time, and why the
others do not."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nestling.devices import Timing
from nestling.engines import Refusal
from nestling.errors import InputError
from nestling.message import LARGEST, Message, faults, norms, small_enough
from nestling.methods import Method, Reply
from nestling.methods.part import Part
from nestling.runs.federation import Federation
from nestling.training.client import Outcome
from nestling.views import State
from nestling.views.flat import Fetched, Row, layout_of
from nestling.world import Device, Piece, World

Expected = Mapping[str, Mapping[str, Tensor]]

NOT_FINITE = f"values that are not finite, or too large to be merged (beyond {LARGEST:g})"
TOO_LARGE = "the largest values of a round whose merge is not finite, or too large"


@dataclass
class Sent:
    """One client's share of a round."""

    device: Device
    piece: Piece
    message: Message
    dropped: bool


@dataclass
class Round:
    """A round under way: merged, but perhaps still being computed on a device."""

    number: int
    before: dict[str, State]
    # whose replies had to be left out when the round was played before, and why
    spoilt: Mapping[int, str]
    sent: dict[int, Sent] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    void: set[int] = field(default_factory=set)  # whose outcomes do not count: refused, or too late
    # clients whose reply counted before its values were looked at
    unsure: list[tuple[int, Row]] = field(default_factory=list)
    sizes: list[Fetched] = field(default_factory=list)  # norms of what the merge made
    boards: list[Mapping[str, Any]] = field(default_factory=list)
    clipped: dict[int, list[str]] = field(default_factory=dict)  # whose replies count for less, why
    rows: dict[int, int] = field(default_factory=dict)  # as how many rows those that count do
    # what those trained whose replies count, which may be less than they were sent
    trained: dict[int, Piece] = field(default_factory=dict)
    merged: int = 0
    late: int = 0
    seconds: float = 0.0
    joules: float = 0.0
    tested: dict[str, Any] | None = None
    gate: dict[str, Any] | None = None  # what the gate behind the merge found
    error: Exception | None = None

    @property
    def dropped(self) -> int:
        """How many clients were never heard of."""
        heard = {
            *self.outcomes,
            *(told.client for told in self.refusals if told.round == self.number),
        }
        return len(self.sent.keys() - heard)

    def measure(self, state: Mapping[str, State]) -> None:
        """Has the size of what the merge changed found, without waiting for it."""
        old = {id(tensor) for tensor in _floats(self.before)}
        new = [tensor for tensor in _floats(state) if id(tensor) not in old]
        self.sizes = [Fetched(norm.reshape(1)) for norm in norms(new)]

    def broken(self) -> dict[int, str]:
        """Whose replies counted and must not, and why; waits for the device that computes them."""
        odd = [client for client, row in self.unsure if not row.stack.finite[row.number]]
        return dict.fromkeys(odd, NOT_FINITE) if odd else self._overflown()

    def _overflown(self) -> dict[int, str]:
        """Nobody, if what the merge made can be; else the client whose reply has the largest
        values. If that does not help the two next ones follow, then four, so that few of many tries
        do. Where the state could not be before, no reply is to blame."""
        if not self.sizes or small_enough(size.values()[0] for size in self.sizes):
            return {}
        if not small_enough(norms(_floats(self.before))):
            return {}
        counted = {c: o.reply.parts for c, o in self.outcomes.items() if c not in self.void}
        largest = sorted(
            counted, key=lambda c: -max(map(float, norms(_floats(counted[c]))), default=0)
        )
        told = sum(reason == TOO_LARGE for reason in self.spoilt.values())
        return dict.fromkeys(largest[: told + 1], TOO_LARGE)

    def refuse(self, client: int, reason: str) -> None:
        """An outcome that does not count, and why."""
        self.refusals.append(Refusal(client, self.number, reason))
        self.void.add(client)

    def clip(self, client: int, reason: str) -> None:
        """A reply that counts for less than it says, and why."""
        self.clipped.setdefault(client, []).append(reason)


def admit(federation: Federation, round: Round) -> list[Reply]:
    """The replies that count; writes down what happened to the others and to the clock."""
    deadline, most, replies = federation.world.fleet.deadline, federation.most_rows, []
    clock, forms = _Clock(federation.world, round), dict[Hashable, Expected]()
    checked = [part for part in federation.method.travelling() if part.can]
    for client, outcome in round.outcomes.items():
        sent = round.sent[client]
        piece, reason = _returned(federation.method, sent, outcome.reply)
        form = (piece, id(sent.message))  # of clients that got the same, who must send alike
        spent = clock.of(form, sent, piece, outcome)
        round.joules += spent.energy_j
        round.seconds = max(round.seconds, min(spent.total_s, deadline or spent.total_s))
        if deadline and spent.total_s > deadline:
            round.late += 1
            round.void.add(client)
            continue
        if client in round.spoilt:
            reason = round.spoilt[client]
        if not reason:
            if form not in forms:
                forms[form] = federation.method.expects(piece, sent.message)
            reason = _faults(forms[form], sent, outcome.reply, round)
        if checked and not reason:
            reason = _cannot(checked, federation.method, outcome.reply)
        if reason:
            round.refuse(client, reason)
        else:
            replies.append(Reply(sent.device, piece, sent.message, outcome.reply, most))
    if deadline and round.dropped:
        round.seconds = deadline  # the server waited for those that never answered
    round.merged = len(replies)
    round.trained = {reply.device.id: reply.piece for reply in replies}
    return replies


@dataclass
class _Clock:
    """How long clients take. Those with equal work take equally long, unless devices slow down by
    chance."""

    world: World
    round: Round
    known: dict[Hashable, Timing] = field(default_factory=dict)

    def of(self, form: Hashable, sent: Sent, piece: Piece, outcome: Outcome) -> Timing:
        same = (form, sent.device.tier, outcome.samples, outcome.reply.nbytes)
        if same in self.known:
            return self.known[same]
        slowdown = self.world.fleet.slowdown(sent.device.id, self.round.number)
        down, up = sent.message.nbytes, outcome.reply.nbytes
        spent = self.world.timing(sent.device.tier, piece, outcome.samples, down, up, slowdown)
        if self.world.fleet.steady:
            self.known[same] = spent
        return spent


def _floats(states: Mapping[str, Mapping[str, Tensor]]) -> Iterator[Tensor]:
    """The floating-point tensors of some states, those in one buffer as one."""
    for state in states.values():
        flat = getattr(state, "flat", None)
        if flat is not None:
            yield flat
        names = state if flat is None else layout_of(state).others
        yield from (state[name] for name in names if state[name].is_floating_point())


def _returned(method: Method, sent: Sent, reply: Message) -> tuple[Piece, str | None]:
    """The piece that a reply is of, and why it is refused where it names none that it could be."""
    try:
        return method.returned(sent.piece, sent.message, reply.facts), None
    except InputError as error:
        return sent.piece, error.message


def _faults(expected: Expected, sent: Sent, reply: Message, round: Round) -> str | None:
    """Why a reply is refused. Rows of a stack are known to be well-formed by their layout; whether
    they are finite is asked later."""
    rows = []
    for kind, part in reply.parts.items():
        if isinstance(part, Row) and kind in expected and part.layout is layout_of(expected[kind]):
            part.stack.start_norms()
            round.unsure.append((sent.device.id, part))
            rows.append(kind)
    if len(rows) < len(reply.parts) or len(rows) < len(expected):
        rest = Message(
            {kind: part for kind, part in reply.parts.items() if kind not in rows}, reply.facts
        )
        reason = faults(rest, {kind: like for kind, like in expected.items() if kind not in rows})
        if reason:
            return reason
    return wrong_count(reply, sent.device.samples)


def _cannot(checked: Sequence[Part], method: Method, reply: Message) -> str | None:
    """Why what parts say cannot be so, or nothing."""
    for part in checked:
        if part.name in reply and part.can and not part.can(method, reply):
            return (
                f"{part.name}: values that a client with {reply.facts['samples']} rows cannot have"
            )
    return None


def wrong_count(reply: Message, known: int) -> str | None:
    """Why the number of samples that a reply claims cannot be, or nothing. It is the reply's weight
    in the merge, so nobody claims more than it is known to have; a method may train on fewer."""
    samples = reply.facts.get("samples")
    if type(samples) is not int or samples <= 0:
        return f"the number of samples is {repr(samples)[:60]}"
    return f"it claims {samples!r:.60} samples and has {known}" if samples > known else None

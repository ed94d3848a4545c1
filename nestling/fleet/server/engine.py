"""The engine whose clients are real devices behind nodes.

A round's errands become orders, one per node. Delivery is at most once, so what gets no answer is
sent again, under the same key: a device gives a result it already has instead of working twice, and
the first valid result of a key is the only one that counts. What comes after its round, or for
another run, round, client or errand, is refused, and the reason is noted.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nestling.engines import Engine, Event, Refusal
from nestling.errors import InputError
from nestling.fleet.care.logs import Note
from nestling.fleet.protocol.courier import Courier, Failure
from nestling.fleet.protocol.wire import Answer, Failed, JobDone, JobOrder, Order, Parcel, key_of
from nestling.fleet.server.greeter import Greeter
from nestling.fleet.server.quota import Allow
from nestling.fleet.server.roster import Roster
from nestling.message import Message
from nestling.training.client import ClientSide, Errand, Outcome, Site

KEPT_TICKETS = 4096
"""How many letters of earlier rounds are still asked for, so that a late answer is recognised and
not left lying."""

KEPT_REFUSALS = 2**16
CLOSE = 5.0
"""Seconds before a deadline in which nobody is greeted: a look for nodes may take as long as one
for answers (3 s, where somebody stalls), and both together would hold a round for too long."""
HEADER = 2**18
"""Bytes of what an answer says of one client besides its tensors, at most."""


@dataclass(frozen=True)
class Patience:
    """How long a round waits.

    deadline: seconds after which it goes on without those that have not answered, if anybody has,
              and at least `quorum` have.
    most:     seconds after which a round that has no quorum is given up, and the run with it; so is
              one where those who answered were refused and too few are left.
    resend:   seconds without an answer after which an order is sent again.
    poll:     seconds between two looks for answers; refresh: between two looks for nodes that come
              and go.
    largest:  bytes of the largest answer that is read.
    """

    deadline: float = 600.0
    quorum: int = 0
    most: float = 3600.0
    resend: float = 120.0
    poll: float = 0.5
    refresh: float = 3.0
    largest: int = 2**28


class NoQuorum(RuntimeError):
    """Too few clients answered; the run stops where it stands and can be resumed."""


@dataclass(eq=False)
class _Wanted:
    """One client's errand that has no result yet."""

    errand: Errand
    job: JobOrder
    size: int  # bytes of the reply that is expected, at most
    sent: float = -1e18
    attempts: int = 0
    node: int | None = None


@dataclass(frozen=True)
class _Letter:
    """An order that was sent: to which node, for which clients, in which round."""

    node: int
    clients: tuple[int, ...]
    round: int


class FleetEngine(Engine):
    """Gives the errands of a round to real devices.

    counts:  what happened to letters: sent, answers, resent, failures, and refused by kind ("late",
             "foreign", "broken", ...).
    watch:   called whenever answers were looked for, and once a round waits for no more; see
             `progress`.
    allow:   told how many bytes nodes are expected to answer, before orders leave.
    size:    bytes of the reply to an errand, at most.
    """

    name = "fleet"

    def __init__(
        self,
        courier: Courier,
        roster: Roster,
        greeter: Greeter | None = None,
        patience: Patience | None = None,
        transport: str = "float32",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Reaches nodes through `courier` and knows clients by `roster`; `greeter` welcomes nodes
        while a round waits."""
        self.courier, self.roster, self.greeter, self.transport = (
            courier,
            roster,
            greeter,
            transport,
        )
        self.patience = patience or Patience()
        self.clock, self.sleep = clock, sleep
        self.notes: list[str] = []
        self.counts: Counter[str] = Counter()
        self._refused: list[Refusal] = []  # what was refused and not told yet
        self.watch: Callable[[], None] = lambda: None
        self.allow: Allow = lambda _: None
        self.size: Callable[[Errand], int] = lambda errand: errand.message.nbytes
        self._letters: OrderedDict[str, _Letter] = OrderedDict()  # by ticket
        self._wanted: dict[int, _Wanted] = {}
        self._round = self._done = 0
        self._chosen: tuple[int, ...] = ()
        self._start = self._heard = 0.0  # when the round began, and when a client was last heard
        self._site: Site | None = None

    def open(self, _method: ClientSide, site: Site) -> None:
        """Remembers the site, which knows how many samples each client has; devices make the method
        themselves."""
        self._site = site

    def close(self) -> None:
        """Forgets what is wanted and which letters are out; devices are not told."""
        self._wanted.clear()
        self._letters.clear()

    def run(self, errands: Sequence[Errand]) -> Iterator[Event]:
        """Orders a round's work, and gives outcomes and refusals as they come, until all have
        answered or time is up."""
        self._round, self._done = (errands[0].round if errands else self._round), 0
        self._wanted = self._prepared(errands)
        self._chosen = tuple(errand.client for errand in errands)
        needed, short = min(max(1, self.patience.quorum), len(errands)), False
        start = looked = self._start = self._heard = self.clock()
        while self._wanted:
            self._send()
            for outcome in self._collect():
                self._done += 1
                self._heard = self.clock()
                yield outcome
            yield from self._told()
            self.watch()
            now = self.clock()
            over = now - start >= self.patience.deadline
            if not self._wanted or (over and self._done >= needed):
                break
            if over and not short:
                short = True
                self._note_short(needed)
            if now - start >= max(self.patience.most, self.patience.deadline):
                raise NoQuorum(
                    f"round {self._round}: {self._done} clients answered within "
                    f"{now - start:.0f} s, {needed} are needed"
                )
            due = now - looked >= self.patience.refresh and self._has_time(now - start)
            if self.greeter is not None and due:
                self.greeter.refresh()
                looked = now
            self.sleep(self.patience.poll)
        if self._done < min(self.patience.quorum, len(errands)):
            raise NoQuorum(
                f"round {self._round}: {self._done} clients gave a reply that counts, {needed} "
                "are needed"
            )
        for client in sorted(self._wanted):
            name = self.roster.name_of(client)
            text = f"round {self._round}: client {client} ({name}) gave no reply in time"
            self.notes.append(Note(text, "missing", round=self._round, client=client, name=name))
        self._wanted, self._chosen = {}, ()
        self.roster.save()  # before a checkpoint can rely on whose results counted
        self.watch()

    def _note_short(self, needed: int) -> None:
        """Says that a round lasts longer than its deadline, and why."""
        text = (
            f"round {self._round}: at its deadline {self._done} of the {needed} replies that it "
            "needs are there; it waits for them"
        )
        self.notes.append(Note(text, "short", round=self._round))

    def _has_time(self, spent: float) -> bool:
        """Whether there is time for others than those who are asked: not just before the
        deadline."""
        left = self.patience.deadline - spent
        return not 0 < left < min(CLOSE, self.patience.deadline / 2)

    def discard(self, client: int, round: int) -> None:
        """What a client answered was refused when it was looked at: its device goes on from what it
        had before that round."""
        self.roster.discount(client, round)

    def progress(self) -> dict[str, Any]:
        """How the round stands: who was asked, who has not answered, and for how many seconds.
        Empty between rounds."""
        if not self._chosen:
            return {}
        now = self.clock()
        missing = [
            {
                "client": client,
                "name": self.roster.name_of(client),
                "node": self.roster.node_of(client),
                "attempts": w.attempts,
            }
            for client, w in sorted(self._wanted.items())
        ]
        return {
            "round": self._round,
            "chosen": list(self._chosen),
            "answered": self._done,
            "needed": min(max(1, self.patience.quorum), len(self._chosen)),
            "missing": missing,
            "seconds": now - self._start,
            "silent": now - self._heard,
            "deadline": self.patience.deadline,
            "most": max(self.patience.most, self.patience.deadline),
        }

    # -- orders ------------------------------------------------------------------------------------

    def _prepared(self, errands: Sequence[Errand]) -> dict[int, _Wanted]:
        parcels: dict[int, Parcel] = {}
        alike: dict[str, Parcel] = {}
        wanted = {}
        for errand in errands:
            parcel = parcels.get(id(errand.message))
            if parcel is None:
                parcel = Parcel.of(errand.message, self.transport)
                # Clients behind one node that are sent the same share one parcel.
                parcel = parcels[id(errand.message)] = alike.setdefault(parcel.digest, parcel)
                # the exact size is that of what is sent
                errand.message.__dict__["nbytes"] = parcel.nbytes
            base = self.roster.counted(errand.client)
            key = key_of(
                self.roster.run,
                errand.round,
                errand.client,
                errand.network,
                errand.spec,
                parcel,
                base,
            )
            job = JobOrder(
                errand.client,
                self.roster.name_of(errand.client),
                key,
                errand.network,
                errand.spec,
                parcel,
                base,
            )
            wanted[errand.client] = _Wanted(errand, job, self.size(errand) + HEADER)
        return wanted

    def _send(self) -> None:
        """Sends what was not sent yet, what has waited too long, and what was on its way to a node
        that is gone."""
        now, due = self.clock(), dict[int, list[_Wanted]]()
        for client, wanted in self._wanted.items():
            node = self.roster.node_of(client)
            # A device that is slow is asked less and less often: its order is with it already.
            pause = self.patience.resend * 2 ** min(5, max(0, wanted.attempts - 1))
            if node is not None and (node != wanted.node or now - wanted.sent >= pause):
                due.setdefault(node, []).append(wanted)
        letters = {}
        for node, those in due.items():
            for wanted in those:
                wanted.sent, wanted.node, wanted.attempts = now, node, wanted.attempts + 1
            attempt = max(wanted.attempts for wanted in those)
            self.counts["resent"] += sum(wanted.attempts > 1 for wanted in those)
            jobs = [wanted.job for wanted in those]
            order = Order(
                self.roster.run,
                self._round,
                self._round - 1,
                jobs,
                self.transport,
                attempt,
                self.roster.start,
            )
            letters[node] = order.to_bytes()
        if letters:
            self.allow({node: sum(wanted.size for wanted in due[node]) for node in letters})
        tickets = self.courier.push(letters) if letters else {}
        for node, those in due.items():
            if node in tickets:
                self._letters[tickets[node]] = _Letter(
                    node, tuple(wanted.job.client for wanted in those), self._round
                )
                self.counts["sent"] += 1
            else:
                self._retry([wanted.job.client for wanted in those])
        while len(self._letters) > KEPT_TICKETS:
            self._letters.popitem(last=False)

    def _retry(self, clients: Sequence[int]) -> None:
        """What failed is sent again after a pause that grows."""
        for client in clients:
            if client in self._wanted:
                wanted = self._wanted[client]
                pause = min(
                    self.patience.resend, self.patience.poll * 2 ** min(10, wanted.attempts)
                )
                wanted.sent = (
                    self.clock()
                    + pause
                    - self.patience.resend * 2 ** min(5, max(0, wanted.attempts - 1))
                )

    # -- answers -----------------------------------------------------------------------------------

    def _collect(self) -> Iterator[Outcome]:
        for ticket, answer in self.courier.pull(list(self._letters)) if self._letters else []:
            letter = self._letters.pop(ticket)
            node, clients = letter.node, letter.clients
            if isinstance(answer, Failure):
                self.counts["failures"] += 1
                if letter.round != self._round:
                    continue
                if any(client in self._wanted for client in clients):
                    text = f"round {self._round}: an order to node {node} failed: {answer.reason}"
                    self.notes.append(
                        Note(text, "failed", round=self._round, node=node, reason=answer.reason)
                    )
                self._retry(clients)
                continue
            self.counts["answers"] += 1
            if letter.round == self._round:
                yield from self.take(node, clients, answer)
            else:
                self._late(letter)

    def _late(self, letter: _Letter) -> None:
        """An answer after its round. Where the client's result counted, this is only the answer to
        an order that was sent twice."""
        known = [
            client for client in letter.clients if self.roster.has_counted(client, letter.round)
        ]
        self.counts["repeated"] += len(known)
        missed = [client for client in letter.clients if client not in known]
        if missed:
            told = f"node {letter.node}: an answer to round {letter.round} in round {self._round}"
            self._refuse(missed, "late", told, letter.round)

    def take(self, node: int, clients: Sequence[int], data: bytes) -> Iterator[Outcome]:
        """What of an answer counts: the results that are asked for, from the node that was asked
        for them."""
        try:
            if len(data) > self.patience.largest:
                raise InputError(
                    f"an answer of {len(data)} bytes is over the limit of {self.patience.largest}"
                )
            answer = Answer.from_bytes(data)
        except ValueError as error:
            self._give_up(clients, "broken", f"node {node}: {error}")
            return
        if not self._current(node, clients, answer):
            return
        for name, free in answer.free.items():
            entry = self.roster.entry_named(name)
            if entry is not None and entry.node == node:
                self.roster.report(name, free)
        seen: set[int] = set()
        for result in answer.results:
            outcome = self._result(node, clients, result, seen)
            if outcome is not None:
                yield outcome
        # Clients that the answer left out are asked again.
        self._retry([client for client in clients if client not in seen])

    def _current(self, node: int, clients: Sequence[int], answer: Answer) -> bool:
        """Whether an answer is to this run and round."""
        if answer.run != self.roster.run:
            self._refuse(clients, "foreign", f"node {node}: an answer for the run {answer.run}")
        elif answer.unknown:
            if self.greeter is not None:
                self.greeter.forget(node)
            self._retry(clients)
        elif answer.round != self._round:
            self._refuse(
                clients,
                "late",
                f"node {node}: an answer to round {answer.round} in round {self._round}",
                answer.round,
            )
        elif answer.error:
            self._give_up(clients, "failed", f"node {node}: {answer.error}")
        else:
            return True
        return False

    def _result(
        self, node: int, clients: Sequence[int], result: JobDone | Failed, seen: set[int]
    ) -> Outcome | None:
        client = result.client
        if client not in clients:
            self._refuse([client], "foreign", f"node {node} was not asked for client {client}")
            return None
        if client in seen:
            self._refuse([client], "repeated", f"client {client} answers twice at once")
            return None
        seen.add(client)
        wanted = self._wanted.get(client)
        if wanted is None:
            self.counts["repeated"] += 1  # an order that was sent twice is answered twice
            return None
        if result.key != wanted.job.key:
            self._refuse(
                [client], "foreign", f"client {client} answers to other work than it was given"
            )
            return None
        if isinstance(result, Failed):
            self._give_up([client], "failed", f"client {client} failed: {result.error}")
            return None
        try:
            reply = self._reply(client, result)
        except ValueError as error:
            self._give_up([client], "broken", f"client {client}: {error}")
            return None
        del self._wanted[client]
        self.roster.count(client, self._round)
        return Outcome(client, reply, {}, result.loss, result.steps, result.samples)

    def _reply(self, client: int, result: JobDone) -> Message:
        reply = result.parcel.open()
        told = reply.facts.get("samples")
        if self._site is not None and told != self._site.split.size(client):
            raise InputError(
                f"it says {_short(told)} samples and has {self._site.split.size(client)}"
            )
        return reply

    def _give_up(self, clients: Sequence[int], kind: str, reason: str) -> None:
        """Refuses an answer and waits no more for those who gave it: asked again they would give
        the same."""
        wanted = [client for client in clients if self._wanted.pop(client, None) is not None]
        self._refuse(wanted or clients, kind, reason)

    def _refuse(
        self, clients: Sequence[int], kind: str, reason: str, round: int | None = None
    ) -> None:
        self.counts[kind] += 1
        self._refused += [
            Refusal(client, self._round if round is None else round, reason) for client in clients
        ]
        del self._refused[:-KEPT_REFUSALS]

    def _told(self) -> Iterator[Refusal]:
        """What was refused since this was last asked."""
        told, self._refused = self._refused, []
        yield from told


def _short(value: object) -> str:
    """A client's word, for a message: short whatever it is."""
    return (
        repr(value)
        if isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**64)
        else type(value).__name__
    )

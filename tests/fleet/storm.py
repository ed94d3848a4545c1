"""Bad weather: a courier in this process to which anything can happen, by a plan, in a time that
only moves when somebody sleeps.

What happens to a client's n-th letter is a `Fate`; the server is cut off at given steps, a worker
at given steps of its own. A step is anything that can be seen from outside: a letter that is sent
or asked for, or a file that is put in its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from nestling import Evaluation, Experiment, FleetConfig, Named, SplitConfig, Tier
from nestling.engines.inline import Inline
from nestling.errors import InputError
from nestling.fleet.node.worker import Worker
from nestling.fleet.protocol.courier import Failure
from nestling.fleet.protocol.wire import Answer, JobDone, Member, Parcel, kind_of
from nestling.fleet.server import serving
from nestling.fleet.server.engine import FleetEngine, NoQuorum, Patience
from nestling.fleet.server.greeter import Greeter
from nestling.message import Message
from nestling.methods import method_class
from nestling.runs.assemble import assemble, site_of
from nestling.runs.loop import play
from nestling.runs.run import Result, Watcher
from nestling.store import ClientStore
from nestling.training.client import Errand, Outcome
from tests.fleet.loop import six, state_of

CLIENTS, ROUNDS = 3, 3
PARTS = (
    Tier(name="board", ratio=0.25, count=1),
    Tier(name="phone", ratio=0.5, count=1),
    Tier(name="server", ratio=1.0, count=1),
)
NETWORKS = tuple(
    Tier(name=tier.name, model="tinycnn", model_options={"channels": [4, 4, width]}, count=1)
    for tier, width in zip(PARTS, (4, 6, 8), strict=True)
)
PATIENCE = Patience(deadline=100.0, most=400.0, resend=10.0, poll=1.0, refresh=2.0)


def three(method: str) -> Experiment:
    """Three clients of three tiers with twenty rows each: a run takes a moment."""
    return six(
        method,
        rounds=ROUNDS,
        fleet=FleetConfig(tiers=NETWORKS if method_class(method).info.personal else PARTS),
        model=Named("tinycnn", {"channels": [4, 4, 8]}),
        split=SplitConfig(kind="dirichlet", alpha=1.0, size=20, public=0.005),
        evaluate=Evaluation(every=ROUNDS, clients=1, calibration=20),
    )


@dataclass(frozen=True)
class Fate:
    """What happens to a letter: `kind`, and the seconds, the step or the number that belongs to it.

    lost        it never arrives
    unanswered  it arrives, the answer does not
    fails       an error comes back
    slow        it arrives that much later, after younger ones perhaps
    late        the answer comes that much later
    twice       it arrives again that much later
    restart     the worker is a new process
    moved       the node has come back under another number
    killed      the worker is killed at that step of its work, and starts again
    garbled     the answer ends after so many bytes
    lie         the answer is not what it should be: see `LIES`
    gone        the node is never seen again
    """

    kind: str
    value: int = 0


HARMLESS = ("lost", "unanswered", "fails", "slow", "late", "twice", "restart", "moved", "killed")
"""What may cost time, but no reply as long as it happens rarely."""


class Cut(BaseException):
    """The power is cut."""


class Killed(BaseException):
    """A worker is killed."""


@dataclass(eq=False)
class _Letter:
    due: float
    client: int
    data: bytes
    ticket: str | None  # None: its answer interests nobody
    fate: Fate


class Storm:
    """The courier. `plan`: (client, number of its letter) → fate; `cuts`: the steps at which the
    server is cut off.

    told: the results that honest workers gave, by (client, key): what a liar makes of them is not
          among these.
    """

    def __init__(
        self, home: Path, plan: Mapping[tuple[int, int], Fate], cuts: Collection[int] = ()
    ) -> None:
        self.home, self.plan, self.cuts = home, plan, set(cuts)
        self.now, self.steps, self.restarts = 0.0, 0, 0
        self.nodes_now = {100 + client: client for client in range(CLIENTS)}
        self.members = [Member(f"device {client}", client) for client in range(CLIENTS)]
        self.workers = {client: self._started(client) for client in range(CLIENTS)}
        self.count = dict.fromkeys(range(CLIENTS), 0)
        self.happened: list[str] = []
        self._numbers = iter(range(10**9))
        self._flying: list[_Letter] = []
        self._answers: dict[str, tuple[float, bytes | Failure]] = {}
        self._inside: int | None = None  # the client whose worker works now
        self._left: int | None = None  # its steps until it is killed

    # -- time and steps ----------------------------------------------------------------------------

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def step(self) -> None:
        """Something is about to be seen from outside."""
        if self._inside is not None:
            if self._left is not None:
                self._left -= 1
                if self._left < 0:
                    raise Killed
            return
        self.steps += 1
        if self.steps in self.cuts:
            self.happened.append(f"cut at {self.steps}")
            raise Cut

    # -- the courier -------------------------------------------------------------------------------

    def nodes(self) -> Collection[int]:
        self.step()
        return list(self.nodes_now)

    def push(self, letters: Mapping[int, bytes]) -> dict[int, str]:
        tickets = {}
        for node, data in letters.items():
            self.step()
            ticket = tickets[node] = f"letter {next(self._numbers)}"
            self._send(node, data, ticket)
        return tickets

    def pull(self, tickets: Collection[str]) -> list[tuple[str, bytes | Failure]]:
        self.step()
        self._arrive()
        due = [t for t in tickets if t in self._answers and self._answers[t][0] <= self.now]
        return [(ticket, self._answers.pop(ticket)[1]) for ticket in due]

    # -- what happens ------------------------------------------------------------------------------

    def _send(self, node: int, data: bytes, ticket: str) -> None:
        client = self.nodes_now.get(node)
        if client is None:
            self._answers[ticket] = (self.now, Failure("the node is gone"))
            return
        self.count[client] += 1
        fate = self.plan.get((client, self.count[client]), Fate("fine"))
        if fate.kind != "fine":
            self.happened.append(f"{kind_of(data)} {self.count[client]} of {client} {fate.kind}")
        if fate.kind in ("fails", "moved", "gone"):
            self._answers[ticket] = (self.now, Failure("the node cannot be reached"))
        if fate.kind in ("moved", "gone"):
            del self.nodes_now[node]
            if fate.kind == "moved":
                self.nodes_now[1000 + next(self._numbers)] = client
        if fate.kind in ("lost", "fails", "moved", "gone"):
            return
        late = fate.value if fate.kind == "slow" else 0
        self._flying.append(_Letter(self.now + late, client, data, ticket, fate))
        if fate.kind == "twice":
            self._flying.append(_Letter(self.now + fate.value, client, data, None, Fate("fine")))

    def _arrive(self) -> None:
        for letter in sorted((x for x in self._flying if x.due <= self.now), key=lambda x: x.due):
            self._flying.remove(letter)
            answer = self._worked(letter.client, letter.data, letter.fate)
            if answer is None or letter.ticket is None or letter.fate.kind == "unanswered":
                continue
            late = letter.fate.value if letter.fate.kind == "late" else 0
            self._answers[letter.ticket] = (self.now + late, answer)

    def _worked(self, client: int, data: bytes, fate: Fate) -> bytes | Failure | None:
        if client not in self.nodes_now.values():
            return None
        if fate.kind == "restart":
            self.workers[client] = self._started(client)
        self._inside, self._left = client, fate.value if fate.kind == "killed" else None
        try:
            answer = self.workers[client].handle(data)
        except Killed:
            self.workers[client] = self._started(client)
            return None
        except InputError as error:
            return Failure(str(error))
        finally:
            self._inside = None
        if fate.kind == "garbled":
            return answer[: fate.value % len(answer)]
        if fate.kind == "lie" and kind_of(answer) == "answer":
            return LIES[fate.value % len(LIES)](Answer.from_bytes(answer), self).to_bytes()
        return answer

    def _started(self, client: int) -> Worker:
        return Worker(self.home / f"device-{client}", [self.members[client]])


# -- lies ------------------------------------------------------------------------------------------


def _changed(answer: Answer, change: Callable[[JobDone], Any]) -> Answer:
    answer.results = [change(r) if isinstance(r, JobDone) else r for r in answer.results]
    return answer


def _with_message(done: JobDone, change: Callable[[Message], Message]) -> JobDone:
    return replace(done, parcel=Parcel.of(change(done.parcel.open())))


def _nan(message: Message) -> Message:
    return Message(
        {k: {n: t * float("nan") for n, t in part.items()} for k, part in message.parts.items()},
        message.facts,
    )


def _cut_short(message: Message) -> Message:
    return Message(
        {k: {n: t.reshape(-1)[:1] for n, t in part.items()} for k, part in message.parts.items()},
        message.facts,
    )


LIES: tuple[Callable[[Answer, Storm], Answer], ...] = (
    lambda answer, storm: _changed(answer, lambda d: replace(d, client=(d.client + 1) % CLIENTS)),
    lambda answer, storm: _changed(answer, lambda d: replace(d, key="0" * 32)),
    lambda answer, storm: _changed(
        answer,
        lambda d: _with_message(d, lambda m: Message(m.parts, {**m.facts, "samples": 10**9})),
    ),
    lambda answer, storm: _changed(answer, lambda d: _with_message(d, _cut_short)),
    lambda answer, storm: _changed(
        answer, lambda d: _with_message(d, lambda m: Message({}, m.facts))
    ),
    lambda answer, storm: replace(answer, results=[*answer.results, *answer.results]),
    lambda answer, storm: replace(answer, round=answer.round + 1),
    lambda answer, storm: replace(answer, run="0" * 16),
    lambda answer, storm: replace(answer, results=[]),
    lambda answer, storm: _changed(answer, lambda d: _with_message(d, _nan)),
)


# -- a run in it, and the run it must equal --------------------------------------------------------


@contextmanager
def weather(storm: Storm) -> Iterator[None]:
    """Everybody lives in the storm's time, and a file that is put in its place is a step."""
    real, sync = os.replace, ClientStore.sync

    def replaced(a: Any, b: Any) -> None:
        storm.step()
        real(a, b)

    def synced(store: ClientStore) -> None:
        storm.step()
        sync(store)

    times = {"clock": storm.clock}
    with (
        patch.object(os, "replace", replaced),
        patch.object(ClientStore, "sync", synced),
        patch.object(serving, "FleetEngine", partial(FleetEngine, **times, sleep=storm.sleep)),
        patch.object(serving, "Greeter", partial(Greeter, **times)),
    ):
        yield


def served(
    storm: Storm, method: str, folder: Path, most: int = 60
) -> tuple[Result, frozenset[tuple[int, int]]]:
    """The run in a storm: whenever the server is cut off, the same command starts it again. Also
    says whose replies came in which round and were refused for what was in them."""
    refused: dict[int, list[int]] = {}

    def started(experiment: Experiment, description: dict[str, Any], done: int) -> None:
        for round in [r for r in refused if r > done]:
            del refused[round]  # it is played again

    def refusal(client: int, round: int, reason: str) -> None:
        # those are the engine's: an answer that was no outcome
        if not reason.startswith(("node ", "client ")):
            refused.setdefault(round, []).append(client)

    watcher = Watcher(started=started, refusal=refusal)
    with weather(storm):
        for _ in range(most):
            try:
                result = serving.play(
                    storm,
                    three(method),
                    folder,
                    deadline=PATIENCE.deadline,
                    patience=PATIENCE,
                    watcher=watcher,
                )
                gone = {(c, row["round"]) for row in result.metrics for c in row["missed"]}
                return result, frozenset(
                    (c, r) for r, those in refused.items() for c in those if (c, r) not in gone
                )
            except (Cut, NoQuorum) as ended:
                storm.restarts += 1
                storm.happened.append(type(ended).__name__)
    raise AssertionError(f"the run does not end: {storm.happened}")


class Spoiling(Inline):
    """The plain engine, with clients whose replies are no numbers in some rounds: these are
    refused, as others with faults are."""

    spoiled: frozenset[tuple[int, int]] = frozenset()

    def run(self, errands: Sequence[Errand]) -> Iterator[Outcome]:
        for errand, outcome in zip(errands, super().run(errands), strict=True):
            bad = (errand.client, errand.round) in self.spoiled
            yield replace(outcome, reply=_nan(outcome.reply)) if bad else outcome


Places = frozenset[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class End:
    """How a run ended: the server's state, what clients kept, and the metrics."""

    state: dict[str, torch.Tensor]
    kept: list[dict[str, torch.Tensor]]
    rows: list[dict[str, Any]]


@lru_cache(maxsize=256)
def reference(method: str, missed: Places = frozenset(), spoiled: Places = frozenset()) -> End:
    """The run in this process in which some (client, round) give nothing, and others nothing
    good."""
    settled, federation = assemble(three(method))
    federation.engine = engine = Spoiling()
    engine.spoiled = spoiled
    federation.world.fleet.drops = lambda i, round: (i, round) in missed  # type: ignore[method-assign]
    engine.open(settled.make_method(), site_of(federation))
    rows = list(play(federation))
    return End(
        state_of(federation),
        [federation.world.store.get(client) for client in range(CLIENTS)],
        rows,
    )


def missed_in(rows: Sequence[Mapping[str, Any]], clients: int) -> frozenset[tuple[int, int]]:
    """Who gave no outcome in which round, as the run's own metrics say."""
    gave = {(c, row["round"]) for row in rows for c in row["clients"] if c not in row["missed"]}
    return frozenset({(c, row["round"]) for row in rows for c in range(clients)} - gave)


def memory_at(home: Path, client: int, round: int, run: str = "*") -> dict[str, torch.Tensor]:
    """What a client had on its device after a round; without its name, of the only run that the
    device took part in."""
    (found,) = (home / "runs").glob(run)
    store = ClientStore(found / str(client) / "memory")
    versions = [
        int(path.name.split(".")[1])
        for path in (found / str(client) / "memory").glob(f"{client}.*.bin")
    ]
    # `resume` would remove the younger ones
    store._versions = {client: sorted(v for v in versions if v <= round)}
    return store.get(client)

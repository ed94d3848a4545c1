"""The server's side of a run with real devices: the same rounds, the same run folder, and an engine
that asks instead of computing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nestling.errors import InputError
from nestling.experiment import Experiment
from nestling.fleet.care.audit import ACCEPTED, MERGED, STARTED, Audit, digest_of
from nestling.fleet.care.certs import KeyHolder
from nestling.fleet.care.disk import Room
from nestling.fleet.care.logs import BELIEVING, Note
from nestling.fleet.care.status import DONE, GATHERING, MERGING, ROUND, STATUS, STOPPED, StatusFile
from nestling.fleet.protocol.courier import Courier
from nestling.fleet.protocol.wire import Order, Parcel, Welcome
from nestling.fleet.server.engine import FleetEngine, NoQuorum, Patience
from nestling.fleet.server.greeter import Greeter
from nestling.fleet.server.quota import Allow
from nestling.fleet.server.roster import LiveFleet, LiveSplit, Roster, blank
from nestling.message import Message
from nestling.runfiles import AUDIT, EXPERIMENT, FEDERATION, ROSTER
from nestling.runs import fingerprint
from nestling.runs import folder as run_folder
from nestling.runs.assemble import assemble
from nestling.runs.describe import describe
from nestling.runs.federation import Federation, Metrics
from nestling.runs.folder import RunFolder
from nestling.runs.run import Result, Watcher, one_thread, play_rounds, restored
from nestling.store import ClientStore
from nestling.tasks import Regression
from nestling.training.client import Errand, Outcome
from nestling.version import __version__

AUDITED = ("joined", "left", "clipped", "refused")
"""What of a node's coming and going stands in the audit log."""

MOST_REFUSALS = 1000
"""How many refusals of a round have a line of their own: who is refused can make more of them."""


def play(
    courier: Courier,
    experiment: Experiment | None,
    folder: str | Path | None = None,
    *,
    min_clients: int = 1,
    deadline: float = 600.0,
    quorum: int = 0,
    wait: float = 600.0,
    keys: Mapping[int, KeyHolder] | None = None,
    patience: Patience | None = None,
    watcher: Watcher | None = None,
    leave: float = 0.0,
    allow: Allow = lambda _: None,
    room: Room | None = None,
) -> Result:
    """Runs an experiment on real devices; where the folder holds a run already, that run goes on
    from its last checkpoint.

    min_clients: how many must be there before a round starts; it waits for them at most `wait`
                 seconds, then the run stops where it stands (`NoQuorum`).
    deadline, quorum: when a round goes on without those that have not answered (see `Patience`);
                      `patience` says all of it.
    leave:       how many seconds to wait at the end for nodes to hear that the run is over (0: they
                 are not told).
    keys:        node → whom its key stands for. A node may then speak for that device only, or
                 for those behind that gateway.
    allow:       told how many bytes each node is expected to answer, before letters leave.
    room:        no round begins while this is too little.
    """
    patience = replace(patience or Patience(), deadline=deadline, quorum=quorum)
    home: RunFolder | None = None
    live: Live | None = None
    try:
        with one_thread():
            settled, federation, home = _begin(
                experiment, Path(folder) if folder is not None else None
            )
            # whose rows are whose, only the devices know
            began = {k: v for k, v in federation.world.fingerprint.items() if k != "split"}
            live = enliven(
                settled, federation, courier, home, keys, patience, watcher or Watcher(), allow
            )
            live.room = room
            live.say_who_is_believed()
            live.gather(min_clients, wait)
            description = describe(settled, federation)
            if home:
                made = fingerprint.of_run(settled, began)
                home.write(FEDERATION, json.dumps({**description, "fingerprint": made}, indent=1))
            result = play_rounds(
                settled,
                federation,
                description,
                home,
                live.watcher(min_clients, wait),
                fresh=False,
                every=0.0,
            )
            live.ended(DONE)
            live.take_leave(leave)
            return result
    except BaseException as error:
        if live is not None:
            live.ended(STOPPED, str(error) or type(error).__name__)
        raise
    finally:
        if home:
            home.close()


@dataclass
class Live:
    """A federation whose clients are real, and what keeps it going."""

    federation: Federation
    engine: FleetEngine
    greeter: Greeter
    roster: Roster
    folder: Path | None
    told: Watcher
    panel: list[int]  # the clients whose models are tested as soon as enough is known of them
    phase: str = MERGING
    since: float = field(default_factory=time.time)
    doing: dict[str, Any] = field(default_factory=dict)
    room: Room | None = None

    def __post_init__(self) -> None:
        """Opens the status file and the audit log, and has the engine, the greeter and the rounds
        report to them."""
        self.status = StatusFile(self.folder / STATUS if self.folder else None)
        self.audit = Audit(self.folder / AUDIT) if self.folder else None
        self.refused = 0  # in this round
        self.engine.watch, self.greeter.note = self._look, self._hear
        self.federation.on_merged = self._merged

    def gather(self, clients: int, seconds: float) -> None:
        """Waits until there is room on the disk and enough clients are there, and tells the bench
        whose models can be tested."""
        while self.room is not None and self.room.trouble():
            self._tell(MERGING, {})
            self.engine.sleep(1.0)
        wanted = min(max(1, clients), len(self.roster.fleet))

        def sleep(pause: float) -> None:
            self._tell(
                GATHERING, {"here": len(self.roster.here()), "needed": wanted, "most": seconds}
            )
            self.engine.sleep(pause)

        here = self.greeter.wait(wanted, seconds, max(self.engine.patience.poll, 0.01), sleep)
        if here < wanted:
            raise NoQuorum(f"{here} clients are there after {seconds:.0f} s, {wanted} are needed")
        self._tell(MERGING, {})
        self.federation.bench.panel = [client for client in self.panel if self._known(client)]

    def say_who_is_believed(self) -> None:
        """Says where one device can ruin what all the others learned, and what would bear it."""
        method = self.federation.method
        if method.robust is not None:
            return
        bears = method.shares_weights or method.by_rule
        other = (
            'server.merge = "aligned" bears some that lie'
            if bears
            else f"{method.as_set.title} has no merge that bears any"
        )
        self.told.note(
            Note(
                f'server.merge = "mean" believes every device: one that lies may ruin the model; '
                f"{other} (docs/trust.md)",
                BELIEVING,
            )
        )

    def _known(self, client: int) -> bool:
        """Whether the mix of classes of a client is known, by which its model is judged."""
        entry = self.roster.entry(client)
        return entry is not None and (entry.member.rows is None or entry.member.counts is not None)

    def watcher(self, clients: int, seconds: float) -> Watcher:
        """The watcher of the run, which also writes down how the fleet is and waits for clients
        between rounds."""

        def after_round(row: Metrics) -> None:
            self._tell(MERGING, {}, now=True)
            self.roster.save()
            self.told.round(row)
            if row["round"] < self.federation.rounds:
                self.gather(clients, seconds)

        def refusal(client: int, round: int, reason: str) -> None:
            self.status.refused(reason, round, client, self.roster.node_of(client))
            self.refused += 1
            if self.audit and self.refused <= MOST_REFUSALS:
                name = self.roster.name_of(client)
                self.audit.add("refused", round=round, client=client, name=name, reason=reason)
            self.told.refusal(client, round, reason)

        def clipped(client: int, round: int, reason: str) -> None:
            if self.audit:
                name = self.roster.name_of(client)
                self.audit.add("clipped", round=round, client=client, name=name, reason=reason)
            self.told.clipped(client, round, reason)

        return replace(self.told, round=after_round, refusal=refusal, clipped=clipped)

    def ended(self, phase: str, reason: str = "") -> None:
        """Writes that the run is over."""
        self._tell(phase, {"reason": reason} if reason else {}, now=True)

    def start(self, experiment: Experiment) -> None:
        """Writes to the audit log what the run begins with, or goes on from."""
        if self.audit:
            self.audit.add(
                STARTED,
                run=self.roster.run,
                start=self.roster.start,
                round=self.federation.totals.round,
                state=digest_of(self.federation.state()),
                experiment=hashlib.sha256(experiment.to_toml().encode()).hexdigest(),
                version=__version__,
                cut=self.audit.cut,
            )

    def _merged(self, round: int, outcomes: Mapping[int, Outcome], rows: Mapping[int, int]) -> None:
        """Writes to the audit log what a round merged, and what it made of it."""
        if self.audit is None:
            return
        counted = {client: one.reply for client, one in outcomes.items() if client in rows}
        for client, reply in counted.items():
            self.audit.add(
                ACCEPTED,
                round=round,
                client=client,
                name=self.roster.name_of(client),
                rows=int(reply.facts["samples"]),
                counts_as=rows[client],
                reply=digest_of(reply.parts),
            )
        state = digest_of(self.federation.state())
        told = {"accepted": len(counted), "refused": self.refused, "state": state}
        self.audit.add(MERGED, flush=True, round=round, **told)
        self.refused = 0

    def take_leave(self, seconds: float) -> None:
        """Tells nodes that the run is over, and waits so long at most for them to have heard."""
        if not seconds:
            return
        courier, round = self.greeter.courier, self.federation.totals.round
        nodes = {entry.node for entry in self.roster.entries if entry.node is not None}
        last, until = Order(self.roster.run, round, round, []), time.monotonic() + seconds
        # All is written: whatever goes wrong now must not make the run a failed one.
        with contextlib.suppress(Exception):
            waiting = set(courier.push(dict.fromkeys(nodes, last.to_bytes())).values())
            while waiting and time.monotonic() < until:
                waiting -= {ticket for ticket, _ in courier.pull(list(waiting))}
                self.engine.sleep(max(self.engine.patience.poll, 0.01))

    def _look(self) -> None:
        """Writes how the round stands."""
        progress = self.engine.progress()
        self._tell(ROUND if progress else MERGING, progress)

    def _hear(self, text: str) -> None:
        facts = getattr(text, "facts", {})
        if facts.get("event") == "refused":
            self.status.refused(facts["reason"], node=facts["node"])
        if self.audit and facts.get("event") in AUDITED:
            # numbers of nodes are larger than JSON's readers can hold
            kept: dict[str, Any] = {k: str(v) if k == "node" else v for k, v in facts.items()}
            self.audit.add(**kept)
        self.told.note(text)

    def _tell(self, phase: str, doing: dict[str, Any], now: bool = False) -> None:
        if (phase, doing.get("round")) != (self.phase, self.doing.get("round")):
            self.since, now = time.time(), True
        self.phase, self.doing = phase, doing
        self.status.write(self._table, now)

    def _table(self) -> dict[str, Any]:
        """How the fleet is now."""
        clients = [
            {
                "client": entry.client,
                "name": entry.member.name,
                "tier": self.roster.fleet.tier_of(entry.client).name,
                "device": entry.member.device,
                "here": entry.node is not None,
                "node": entry.node,
                "seen": entry.seen,
                "ram": entry.member.ram,
                "free": entry.member.free,
            }
            for entry in self.roster.entries
        ]
        return {
            "run": self.roster.run,
            "round": self.federation.totals.round,
            "phase": self.phase,
            "since": self.since,
            "doing": self.doing,
            "letters": dict(self.engine.counts),
            "clients": clients,
        }


def enliven(
    experiment: Experiment,
    federation: Federation,
    courier: Courier,
    home: RunFolder | None = None,
    keys: Mapping[int, KeyHolder] | None = None,
    patience: Patience | None = None,
    watcher: Watcher | None = None,
    allow: Allow = lambda _: None,
) -> Live:
    """Makes a simulated federation a real one: its fleet, its clients' rows and its engine become
    those of the devices."""
    world, told = federation.world, watcher or Watcher()
    roster = Roster(world.fleet, home.path / ROSTER if home else None)
    roster.go_back(federation.totals.round)
    roster.save()
    world.use_fleet(LiveFleet(world.fleet, roster), LiveSplit(world.split, roster, world.classes))
    greeter = Greeter(
        courier,
        roster,
        welcome_of(roster.run, experiment, federation),
        told.note,
        keys=keys,
        most=federation.most_rows,
        allow=allow,
    )
    engine = FleetEngine(courier, roster, greeter, patience, experiment.engine.transport)
    engine.allow, engine.size = allow, lambda errand: largest_reply(federation, errand)
    federation.engine = engine
    # Models that only devices have cannot be tested here, and no number is better than a wrong one.
    tested = [] if federation.method.as_set.personal else list(federation.bench.panel)
    federation.bench.panel = []
    live = Live(federation, engine, greeter, roster, home.path if home else None, told, tested)
    live.start(experiment)
    return live


def largest_reply(federation: Federation, errand: Errand) -> int:
    """Bytes of the reply to an errand, at most: what must come up, and no less than what went
    down."""
    piece = federation.method.piece(
        federation.world.device(errand.client, errand.round), errand.round
    )
    up = federation.method.largest(piece, errand.message)
    return max(errand.message.nbytes, Message(up).nbytes)


def welcome_of(run: str, experiment: Experiment, federation: Federation) -> bytes:
    """What nodes are told of a run. Public inputs travel where the method's clients use them."""
    world, bench = federation.world, federation.bench
    public = None
    if world.public is not None and federation.method.as_set.auxiliary.startswith("public"):
        public = Parcel.of(Message({"public": {"x": world.public}}))
    shape = tuple(bench.x.shape[1:])
    values = world.task if isinstance(world.task, Regression) else None
    return Welcome(
        run,
        experiment.to_toml(),
        shape,
        world.classes,
        world.class_names,
        len(bench.y),
        public,
        tokens=not bench.x.is_floating_point(),
        mean=values.mean if values else (),
        scale=values.scale if values else (),
    ).to_bytes()


def _begin(
    experiment: Experiment | None, path: Path | None
) -> tuple[Experiment, Federation, RunFolder | None]:
    """The run in a folder as of its last checkpoint, or a new one."""
    if path is not None and (path / EXPERIMENT).exists():
        home = run_folder.reopen(path, field="--out").take(field="--out")
        try:
            settled, federation = restored(
                home, ("engine.name=inline", "engine.device=cpu"), experiment
            )
            return _unattacked(settled), federation, home
        except BaseException:
            home.close()
            raise
    if experiment is None:
        raise InputError(f"there is no run in {path}", field="--out", fix="name an experiment")
    _unattacked(experiment)
    if path is not None:
        run_folder.check_new(path)
    # what the server itself computes
    engine = replace(experiment.engine, name="inline", device="cpu")
    store = ClientStore(path / "clients" if path else None)
    settled, federation = assemble(experiment.with_changes(engine=engine), store)
    if path is None:
        return settled, federation, None
    return (
        settled,
        federation,
        run_folder.create(path, {EXPERIMENT: settled.to_toml(), ROSTER: blank()}).take(
            field="--out"
        ),
    )


def _unattacked(experiment: Experiment) -> Experiment:
    """Refuses to have real devices' replies changed."""
    if experiment.attack.on:
        raise InputError(
            "attacks are for simulations, not for real devices",
            field="attack.kind",
            fix='set attack.kind = "none"',
        )
    return experiment

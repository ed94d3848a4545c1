"""Who is there: names, which stay, their clients' numbers, which stay too, and the nodes they are
reached through, which change.

A name belongs to the node that told it first, recognised by the node's token; what is known is kept
in one file of the run folder.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nestling.data.split import Split
from nestling.devices.fleet import Fleet
from nestling.errors import InputError
from nestling.files import SUM, read_summed, summed, write_atomic
from nestling.fleet.protocol.wire import Member
from nestling.runfiles import ROSTER

KEYS = ("run", "start", "clients")
"""What a roster's file has beside its sum: a name that has changed is no roster's."""


@dataclass
class RosterEntry:
    """One client: what it said of itself, its number, whose it is, and where and when it was last
    seen (seconds since 1970). `counted` are the last two rounds in which a result of it counted:
    the server may go back one round, but no further."""

    member: Member
    client: int
    token: str  # a digest of the token of the node that told the name first
    node: int | None = None
    seen: float = 0.0
    counted: tuple[int, ...] = ()


class Roster:
    """The clients of one run. `path` is the file to keep it in, or None."""

    def __init__(self, fleet: Fleet, path: Path | None = None, run: str = "") -> None:
        """Reads the file where there is one, and the run's number with it; else the number is
        `run`, or a random one."""
        self.fleet, self.path = fleet, path
        self.run = run or secrets.token_hex(8)
        self.start = 1  # how often the server has been started
        self._entries: dict[str, RosterEntry] = {}
        self._names: dict[int, str] = {}
        if path is not None and path.exists():
            self._read(path)

    @property
    def entries(self) -> list[RosterEntry]:
        """All clients ever seen, by number."""
        return sorted(self._entries.values(), key=lambda entry: entry.client)

    def admit(self, node: int, token: str, member: Member) -> RosterEntry:
        """Takes a client in, or recognises it; an `InputError` says why not."""
        digest = hashlib.sha256(token.encode()).hexdigest()
        known = self._entries.get(member.name)
        if known is not None and not hmac.compare_digest(known.token, digest):
            raise InputError(
                f"the name {member.name!r} belongs to another device",
                fix=f"join under another name, or remove the name and the {SUM!r} from {ROSTER} of "
                "the run folder while the server is stopped",
            )
        if known is not None and member.client not in (None, known.client):
            raise InputError(
                f"{member.name!r} is client {known.client} of this run, not {member.client}"
            )
        client = known.client if known is not None else self._place(member)
        self._check(member, client)
        entry = RosterEntry(
            member, client, digest, node, time.time(), known.counted if known is not None else ()
        )
        self._entries[member.name], self._names[client] = entry, member.name
        return entry

    def present(self, nodes: Collection[int]) -> None:
        """Tells which nodes can be reached now; the clients behind others are away."""
        for entry in self._entries.values():
            if entry.node in nodes:
                entry.seen = time.time()
            else:
                entry.node = None

    def report(self, name: str, free: int) -> None:
        """Free memory of a client now."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.member = replace(entry.member, free=free)

    def node_of(self, client: int) -> int | None:
        """The node that a client is reached through now."""
        entry = self.entry(client)
        return entry.node if entry is not None else None

    def name_of(self, client: int) -> str:
        """A client's name."""
        return self._names.get(client, "")

    def entry(self, client: int) -> RosterEntry | None:
        """What is known of a client."""
        return self._entries.get(self._names.get(client, ""))

    def entry_named(self, name: str) -> RosterEntry | None:
        """What is known of a client, by its name."""
        return self._entries.get(name)

    def count(self, client: int, round: int) -> None:
        """A result of a client counted in a round."""
        entry = self.entry(client)
        if entry is not None:
            entry.counted = (*(r for r in entry.counted if r < round), round)[-2:]

    def discount(self, client: int, round: int) -> None:
        """A result of a client did not count after all."""
        entry = self.entry(client)
        if entry is not None:
            entry.counted = tuple(r for r in entry.counted if r != round)

    def counted(self, client: int) -> int:
        """The last round in which a result of a client counted; 0 for none."""
        entry = self.entry(client)
        return entry.counted[-1] if entry is not None and entry.counted else 0

    def has_counted(self, client: int, round: int) -> bool:
        """Whether a client's result counted in one of the last rounds."""
        entry = self.entry(client)
        return entry is not None and round in entry.counted

    def go_back(self, round: int) -> None:
        """The run stands at a round: what came later did not count."""
        for entry in self._entries.values():
            entry.counted = tuple(r for r in entry.counted if r <= round)

    def here(self) -> list[int]:
        """The clients that can be reached now."""
        return [entry.client for entry in self.entries if entry.node is not None]

    def free_percent(self, client: int) -> float | None:
        """How much of its kind's memory is free on a client's device; None where it has not said,
        or its tier names no device: what it trains is then settled by the experiment."""
        entry = self.entry(client)
        if entry is None or not entry.member.free or not self.fleet.tier_of(client).device:
            return None
        return min(
            100.0, 100.0 * entry.member.free / float(self.fleet.profile_of(client).ram_bytes)
        )

    def save(self) -> None:
        """Writes the file, whole or not at all."""
        if self.path is not None:
            rows = [
                {
                    "client": e.client,
                    "token": e.token,
                    "seen": e.seen,
                    "counted": list(e.counted),
                    "member": e.member.table(),
                }
                for e in self.entries
            ]
            write_atomic(self.path, summed({"run": self.run, "start": self.start, "clients": rows}))

    def _read(self, path: Path) -> None:
        fix = f"restore the file, or take the {SUM!r} out of it if you changed it yourself"
        table = read_summed(path, "--out", fix, by_hand=True)
        try:
            if set(table) != set(KEYS):
                raise ValueError(f"it has {', '.join(table)}, not {', '.join(KEYS)}")
            self.run, self.start = str(table["run"]), int(table["start"]) + 1
            for row in table["clients"]:
                counted = tuple(int(r) for r in row["counted"])
                member, client, seen = (
                    Member.read(row["member"]),
                    int(row["client"]),
                    float(row["seen"]),
                )
                entry = RosterEntry(member, client, str(row["token"]), None, seen, counted)
                self._entries[entry.member.name], self._names[entry.client] = (
                    entry,
                    entry.member.name,
                )
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise InputError(
                f"{path} cannot be read: {error}",
                field="--out",
                fix="restore the file, or start the run again",
            ) from error

    def _place(self, member: Member) -> int:
        """The number of a new client: the one it asks for, or the first free one of its kind."""
        if member.client is not None:
            return member.client
        for client in range(len(self.fleet)):
            if client not in self._names and self._suits(member, client):
                return client
        kinds = sorted({tier.name for tier in self.fleet.tiers})
        raise InputError(
            f"there is no place left for {member.name!r} ({member.device or 'any device'})",
            fix=f"the experiment's fleet has {len(self.fleet)} clients: {', '.join(kinds)}",
        )

    def _check(self, member: Member, client: int) -> None:
        if member.counts is not None and sum(member.counts) != member.rows:
            raise InputError(
                f"{member.name!r} says it has {member.rows} rows, and {sum(member.counts)} of all "
                "classes together"
            )
        if client >= len(self.fleet):
            raise InputError(
                f"client {client} of a fleet of {len(self.fleet)}",
                fix=f"use 0..{len(self.fleet) - 1}",
            )
        if self._names.get(client, member.name) != member.name:
            raise InputError(
                f"client {client} is {self._names[client]!r} already",
                fix="ask for another number, or for none",
            )
        if not self._suits(member, client):
            tier = self.fleet.tier_of(client)
            raise InputError(
                f"client {client} of the experiment is of tier {tier.name!r}, {member.name!r} is "
                f"{member.device!r}"
            )

    def _suits(self, member: Member, client: int) -> bool:
        tier = self.fleet.tier_of(client)
        return member.device in ("", tier.name, tier.device)


def blank() -> str:
    """The file of a run that nobody has joined: a folder is marked as a fleet's from its first
    moment."""
    return summed({"run": secrets.token_hex(8), "start": 0, "clients": []})


class LiveFleet(Fleet):
    """A fleet of real devices: who can be reached, and what memory is free, is what they say;
    nothing is left to chance."""

    live = True

    def __init__(self, fleet: Fleet, roster: Roster) -> None:
        """Has the tiers and devices of `fleet`, without its deadline; `roster` says how the real
        ones are."""
        super().__init__(fleet.tiers, fleet.counts, fleet.profiles, 0.0, fleet.seed)
        self.roster = roster

    def available(self, i: int, _round: int) -> bool:
        """Whether device `i` can be reached now."""
        return self.roster.node_of(i) is not None

    def drops(self, _i: int, _round: int) -> bool:
        """Real devices that vanish are noticed, not drawn."""
        return False

    @property
    def steady(self) -> bool:
        """Always true, since no slowdown is drawn."""
        return True

    def slowdown(self, _i: int, _round: int) -> float:
        """No slowdown is drawn."""
        return 1.0

    def free_memory(self, i: int, round: int) -> float:
        """Percent free on device `i` now, as it said; where it said nothing, what the experiment
        supposes."""
        told = self.roster.free_percent(i)
        return told if told is not None else super().free_memory(i, round)


class LiveSplit(Split):
    """How many rows clients have: as they said, or else their share of the experiment's own
    data."""

    def __init__(self, split: Split, roster: Roster, classes: int) -> None:
        """Takes the split of the experiment's own data, for clients that `roster` knows no rows
        of."""
        super().__init__(split.clients, np.zeros(0, np.int64), classes, 0.0)
        self._split, self._roster = split, roster

    def indices(self, client: int) -> np.ndarray:
        """A client's rows of the experiment's data; refused where the client brought its own."""
        self._refuse(client)
        return self._split.indices(client)

    def holdout(self, client: int) -> np.ndarray:
        """A client's held-out rows of the experiment's data; none where it brought its own."""
        return (
            np.zeros(0, np.int64) if self._own(client) is not None else self._split.holdout(client)
        )

    def size(self, client: int) -> int:
        """How many rows a client said it has, or its share of the experiment's data."""
        own = self._own(client)
        return own.rows or 0 if own is not None else self._split.size(client)

    def counts(self, client: int) -> np.ndarray:
        """A client's rows by class, as it said; all zero where it brought data and did not say."""
        own = self._own(client)
        if own is None:
            return self._split.counts(client)
        return np.asarray(own.counts if own.counts is not None else [0] * self._classes, np.int64)

    def _own(self, client: int) -> Member | None:
        """The client, where it has brought data of its own."""
        entry = self._roster.entry(client)
        return entry.member if entry is not None and entry.member.rows is not None else None

    def _rows(self, client: int) -> np.ndarray:
        self._refuse(client)
        return self._split._rows(client)

    def _refuse(self, client: int) -> None:
        if self._own(client) is not None:
            raise InputError(f"the rows of client {client} are on its device and stay there")

"""Getting to know nodes: every new one is welcomed, says who is behind it, and is taken into the
roster."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from nestling.errors import InputError
from nestling.fleet.care.certs import KeyHolder
from nestling.fleet.care.logs import Note
from nestling.fleet.protocol.courier import Courier, Failure
from nestling.fleet.protocol.wire import Hello, Member, Welcome
from nestling.fleet.server.quota import Allow
from nestling.fleet.server.roster import Roster, RosterEntry

AGAIN_SECONDS = 20.0
"""After so long without an answer, or after a refusal, a node is welcomed again."""

MEMBER = 2**13
"""Bytes of what a node says of one client as it joins, at most."""


@dataclass(eq=False)
class _Asked:
    """A node that was welcomed and has not said who it is. What it was sent first may still be
    answered: on a busy device an answer takes longer than the pause, and one that is asked again
    and again must still be heard."""

    tickets: list[str] = field(default_factory=list)
    last: float = 0.0
    times: int = 0

    def due(self, again: float) -> float:
        """When to welcome it again: later and later, since every welcome costs the device a new
        process."""
        return self.last + again * 2 ** min(3, self.times - 1)


class Greeter:
    """Welcomes nodes. `note` hears of who joins, leaves or is refused; `keys` says whom nodes' keys
    stand for, where there are keys: a node then speaks for the one device of that name only, or as
    a gateway for as many as it may, whose names begin with its own and a slash. `most` is as how
    many rows a client counts at most, however many it says it has (0: no limit). `allow` is told
    how many bytes nodes may answer, before welcomes leave."""

    def __init__(
        self,
        courier: Courier,
        roster: Roster,
        welcome: bytes,
        note: Callable[[str], None] = lambda _: None,
        again: float = AGAIN_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        keys: Mapping[int, KeyHolder] | None = None,
        most: int = 0,
        allow: Allow = lambda _: None,
    ) -> None:
        """Knows no node yet; `again` is the first pause, in seconds, before a node is welcomed once
        more."""
        self.courier, self.roster, self.welcome, self.note = courier, roster, welcome, note
        self.again, self.clock, self.keys, self.most = again, clock, keys, most
        self.allow = allow
        self._known: set[int] = set()  # nodes whose clients are in the roster
        self._asked: dict[int, _Asked] = {}
        # known nodes that speak for others → when they last said for whom
        self._gateways: dict[int, float] = {}
        # the last refusal told of a node, not to be told again and again
        self._said: dict[int, str] = {}

    def refresh(self, more: bool = False) -> bool:
        """Looks who is there, welcomes new nodes and takes in what they said; waits for nobody.
        Says whether anything changed. `more`: gateways are asked again, too, since devices may have
        come to them."""
        nodes, before = set(self.courier.nodes()), self.roster.here()
        self._known &= nodes
        self._asked = {node: asked for node, asked in self._asked.items() if node in nodes}
        self.roster.present(self._known)
        self._gateways = {
            node: heard for node, heard in self._gateways.items() if node in self._known
        }
        again = {
            node
            for node, heard in self._gateways.items()
            if more and self.clock() - heard >= self.again
        }
        self._welcome((nodes - self._known) | again)
        self._listen()
        now = self.roster.here()
        for client in sorted(set(before) - set(now)):
            name = self.roster.name_of(client)
            self.note(
                Note(
                    f"client {client} ({name}) cannot be reached any more",
                    "left",
                    client=client,
                    name=name,
                )
            )
        if now != before:
            self.roster.save()
        return now != before

    def forget(self, node: int) -> None:
        """A node that does not know the run any more is welcomed again."""
        self._known.discard(node)
        self._asked.pop(node, None)

    def wait(
        self,
        clients: int,
        seconds: float,
        poll: float = 0.5,
        sleep: Callable[[float], None] = time.sleep,
    ) -> int:
        """Waits until so many clients are there, but no longer than that; gives how many are."""
        until, told = self.clock() + seconds, -1
        while True:
            self.refresh(more=True)
            here = len(self.roster.here())
            if here >= clients or self.clock() >= until:
                return here
            if here != told:
                self.note(
                    Note(
                        f"waiting for clients: {here} of {clients} are there",
                        "waiting",
                        here=here,
                        needed=clients,
                    )
                )
                told = here
            sleep(poll)

    def _welcome(self, nodes: set[int]) -> None:
        now = self.clock()
        due = [
            node
            for node in sorted(nodes)
            if node not in self._asked or now >= self._asked[node].due(self.again)
        ]
        if due:
            self.allow(dict.fromkeys(due, MEMBER * len(self.roster.fleet)))
        tickets = self.courier.push({node: self._letter(node) for node in due}) if due else {}
        for node, ticket in tickets.items():
            asked = self._asked.setdefault(node, _Asked())
            asked.tickets.append(ticket)
            asked.last, asked.times = now, asked.times + 1

    def _letter(self, node: int) -> bytes:
        """The welcome of a node; one that was refused is told why, so that its owner can see it."""
        reason = self._said.get(node)
        if reason is None:
            return self.welcome
        return replace(Welcome.from_bytes(self.welcome), refused=reason).to_bytes()

    def _listen(self) -> None:
        nodes = {ticket: node for node, asked in self._asked.items() for ticket in asked.tickets}
        for ticket, answer in self.courier.pull(list(nodes)) if nodes else []:
            node = nodes[ticket]
            if node in self._asked:
                self._asked[node].tickets.remove(ticket)
            try:
                if isinstance(answer, Failure):
                    raise InputError(answer.reason)
                self._take(node, Hello.from_bytes(answer))
            except InputError as error:
                self._refuse(node, str(error))

    def _take(self, node: int, hello: Hello) -> None:
        if hello.run != self.roster.run:
            raise InputError(f"it answers for the run {hello.run}")
        if hello.error:
            raise InputError(hello.error)
        taken, here = 0, {entry.member.name for entry in self.roster.entries if entry.node == node}
        for member in hello.members:
            try:
                entry = self.roster.admit(node, hello.token, self._entitled(node, member))
            except InputError as error:
                self._refuse(node, str(error))
                continue
            taken += 1
            if member.name in here:
                continue
            text = (
                f"client {entry.client} ({member.name}, "
                f"{self.roster.fleet.tier_of(entry.client).name}) is there"
            )
            self.note(Note(text, "joined", client=entry.client, name=member.name, node=node))
            self._say_clipped(entry)
        if taken:
            self._known.add(node)
            if any("/" in member.name for member in hello.members):
                self._gateways[node] = self.clock()
            self._asked.pop(node, None)
            self._said.pop(node, None)
            self.roster.save()

    def _say_clipped(self, entry: RosterEntry) -> None:
        """Says where a client has more rows than it counts for."""
        rows, name = entry.member.rows or 0, entry.member.name
        if self.most and rows > self.most:
            text = (
                f"client {entry.client} ({name}) says it has {rows} rows and counts as "
                f"{self.most} (server.most_rows)"
            )
            self.note(Note(text, "clipped", client=entry.client, name=name, node=entry.node))

    def _entitled(self, node: int, member: Member) -> Member:
        """A client that a node may speak for by its key, of the tier that the key is for."""
        if self.keys is None:
            return member
        name, holder = member.name, self.keys.get(node)
        if holder is None:
            raise InputError(f"it is not registered, and calls itself {name!r}")
        if holder.devices:
            self._check_behind(holder, name)
        elif name != holder.name:
            raise InputError(
                f"it is registered as the device {holder.name!r} and calls itself {name!r}",
                fix=f"only a gateway speaks for others: certs --gateway {holder.name}=MOST --force",
            )
        if holder.tier and member.device not in ("", holder.tier):
            raise InputError(
                f"the key of {holder.name!r} is for a {holder.tier!r}, and it calls itself a "
                f"{member.device!r}"
            )
        return replace(member, device=holder.tier) if holder.tier else member

    def _check_behind(self, holder: KeyHolder, name: str) -> None:
        """Names that a gateway told once keep their places, so they all count."""
        behind = f"{holder.name}/"
        if not name.startswith(behind):
            raise InputError(f"it is registered as the gateway {holder.name!r} and names {name!r}")
        known = {e.member.name for e in self.roster.entries if e.member.name.startswith(behind)}
        if len(known | {name}) > holder.devices:
            raise InputError(
                f"the gateway {holder.name!r} may speak for {holder.devices} devices, and "
                f"{name!r} is one more",
                fix=f"let it: gateway=MOST in {holder.name}.pub",
            )

    def _refuse(self, node: int, reason: str) -> None:
        """Leaves the node among those that were asked, so that it is asked again after a while."""
        if self._said.get(node) != reason:
            self.note(
                Note(f"node {node} is refused: {reason}", "refused", node=node, reason=reason)
            )
            self._said[node] = reason

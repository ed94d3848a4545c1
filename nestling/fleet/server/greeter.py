"""Getting to know nodes: every new one is welcomed, says who is behind it, and is taken into the
roster."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nestling.errors import InputError
from nestling.fleet.care.logs import Note
from nestling.fleet.protocol.courier import Courier, Failure
from nestling.fleet.protocol.wire import Hello
from nestling.fleet.server.roster import Roster, RosterEntry

AGAIN_SECONDS = 20.0
"""After so long without an answer, or after a refusal, a node is welcomed again."""


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
    """Welcomes nodes. `note` hears of who joins, leaves or is refused; `names` are those that
    nodes' keys are registered under, where there are keys: a node then speaks for that name only,
    and for those that begin with it and a slash. `most` is as how many rows a client counts at
    most, however many it says it has (0: no limit)."""

    def __init__(
        self,
        courier: Courier,
        roster: Roster,
        welcome: bytes,
        note: Callable[[str], None] = lambda _: None,
        again: float = AGAIN_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        names: Mapping[int, str] | None = None,
        most: int = 0,
    ) -> None:
        """Knows no node yet; `again` is the first pause, in seconds, before a node is welcomed once
        more."""
        self.courier, self.roster, self.welcome, self.note = courier, roster, welcome, note
        self.again, self.clock, self.names, self.most = again, clock, names, most
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
        tickets = self.courier.push(dict.fromkeys(due, self.welcome)) if due else {}
        for node, ticket in tickets.items():
            asked = self._asked.setdefault(node, _Asked())
            asked.tickets.append(ticket)
            asked.last, asked.times = now, asked.times + 1

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
                self._check_name(node, member.name)
                entry = self.roster.admit(node, hello.token, member)
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

    def _check_name(self, node: int, name: str) -> None:
        if self.names is None:
            return
        own = self.names.get(node)
        if own is None:
            raise InputError(f"it is not registered, and calls itself {name!r}")
        if name != own and not name.startswith(f"{own}/"):
            raise InputError(f"it is registered as {own!r} and calls itself {name!r}")

    def _refuse(self, node: int, reason: str) -> None:
        """Leaves the node among those that were asked, so that it is asked again after a while."""
        if self._said.get(node) != reason:
            self.note(
                Note(f"node {node} is refused: {reason}", "refused", node=node, reason=reason)
            )
            self._said[node] = reason

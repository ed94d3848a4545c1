"""Flower's Grid as a courier."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice

from flwr.app import Message
from flwr.serverapp import Grid

from nestling.errors import InputError
from nestling.fleet.flower.letters import ORDER, WELCOME, pack, unpack
from nestling.fleet.protocol.courier import Failure
from nestling.fleet.protocol.wire import kind_of

KEPT = 4096
TTL = 12 * 3600.0
STUCK = 3.0
"""Seconds after which a fetch is waited for no longer: Flower waits, for hours if it must, for
what a node has announced and not sent, and only then fetches what others sent."""
LOST = "its answer was fetched together with one that did not come whole; asked again"
SOON, ALONE, BROKEN = 0.2, 10, 20
"""Seconds that answers of slow nodes are waited for, which may come later; slow nodes that are
asked at a time; fetches in a row that may fail."""


class GridCourier:
    """Carries letters as Flower messages. `ttl` is how long Flower keeps a letter, and its answer,
    in seconds.

    Which node an answer is from follows from the message it answers: an error that the SuperLink
    reports on a node's behalf names the SuperLink as its sender.

    Answers are fetched together. Where that is stuck or fails, the SuperLink says of those that
    were being fetched that they are gone, so that they are asked for again; from then on their
    nodes' answers are fetched node by node, and a bad one holds up nobody else.
    """

    def __init__(self, grid: Grid, ttl: float = TTL) -> None:
        """Uses a grid over which it has sent nothing yet."""
        self.grid, self.ttl = grid, ttl
        self._round = 0
        self._sent: OrderedDict[str, int] = OrderedDict()
        self._running: list[_Fetch] = []
        self._doubtful: set[str] = set()  # tickets of fetches that were stuck or failed
        self._slow: set[int] = set()  # nodes whose answers are fetched by themselves
        # answers that came when somebody else asked for theirs: greeter and rounds share a courier
        self._ready: OrderedDict[str, bytes | Failure] = OrderedDict()
        self._turn = self._failed = 0

    def nodes(self) -> Collection[int]:
        """The nodes that the grid names now."""
        return list(self.grid.get_node_ids())

    def push(self, letters: Mapping[int, bytes]) -> dict[int, str]:
        """Sends each letter as a message of its kind; what the grid gives no number for was not
        sent."""
        # the same letter to all is uploaded once
        contents = {id(letter): pack(letter) for letter in letters.values()}
        messages = [
            Message(
                content=contents[id(letter)],
                dst_node_id=node,
                message_type=WELCOME if kind_of(letter) == "welcome" else ORDER,
                ttl=self.ttl,
            )
            for node, letter in letters.items()
        ]
        tickets = dict(zip(letters, self.grid.push_messages(messages), strict=True))
        sent = {node: ticket for node, ticket in tickets.items() if ticket}
        self._sent.update({ticket: node for node, ticket in sent.items()})
        while len(self._sent) > KEPT:
            self._sent.popitem(last=False)
        return sent

    def pull(self, tickets: Collection[str]) -> list[tuple[str, bytes | Failure]]:
        """The answers that the grid has for these letters sent from here, each given once. A fetch
        that was stuck may bring those of others, which are kept for them."""
        new = [_Fetch(self.grid, *group) for group in self._groups(tickets)]
        began = time.monotonic()
        for fetch in new:
            until = began + (STUCK if fetch.node is None else SOON)
            fetch.join(max(0.0, until - time.monotonic()))
        fetches, self._running = [*self._running, *new], []
        for fetch in fetches:
            if fetch.is_alive():
                self._running.append(fetch)
                self._doubtful |= set(fetch.tickets)
            else:
                self._ready.update(self._answers(fetch))
        self._doubtful &= self._sent.keys()
        found = [(ticket, self._ready.pop(ticket)) for ticket in tickets if ticket in self._ready]
        while len(self._ready) > KEPT:
            self._ready.popitem(last=False)
        return found

    def _groups(self, tickets: Collection[str]) -> Iterator[tuple[int | None, list[str]]]:
        """What is fetched at once: from a slow node nothing, while something is."""
        known = [ticket for ticket in tickets if ticket in self._sent]
        together = [ticket for ticket in known if self._sent[ticket] not in self._slow]
        if together:
            yield None, together
        waiting = {self._sent[ticket] for ticket in known} & self._slow
        nodes = deque(sorted(waiting - {fetch.node for fetch in self._running}))
        nodes.rotate(-self._turn)
        self._turn += ALONE
        for node in islice(nodes, ALONE):
            yield node, [ticket for ticket in known if self._sent[ticket] == node]

    def _answers(self, fetch: _Fetch) -> Iterator[tuple[str, bytes | Failure]]:
        """What a fetch brought, of what is still waited for. One may fail over what a node made;
        many in a row fail over something else."""
        self._failed = self._failed + 1 if fetch.error and fetch.node is None else 0
        if fetch.error and self._failed > BROKEN:
            raise fetch.error
        if fetch.error and fetch.node is None:
            self._doubtful |= set(fetch.tickets)
        elif fetch.error:
            reason = f"an answer that cannot be read: {type(fetch.error).__name__}"
            for ticket in fetch.tickets:
                if self._sent.pop(ticket, None) is not None:
                    yield ticket, Failure(reason)
        for message in fetch.found:
            ticket = message.metadata.reply_to_message_id
            node = self._sent.pop(ticket, None)
            if node is not None and message.has_error() and ticket in self._doubtful:
                self._slow.add(node)
                yield ticket, Failure(LOST)
            elif node is not None:
                yield ticket, _answer(message)


class _Fetch(threading.Thread):
    """Answers being fetched: those of one node, or together."""

    def __init__(self, grid: Grid, node: int | None, tickets: Sequence[str]) -> None:
        super().__init__(daemon=True)
        self.grid, self.node, self.tickets = grid, node, tickets
        self.found: list[Message] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.found = list(self.grid.pull_messages(self.tickets))
        except Exception as error:
            self.error = error


def _answer(message: Message) -> bytes | Failure:
    if message.has_error():
        return Failure(f"{message.error.reason} (Flower's error {message.error.code})")
    try:
        return unpack(message.content)
    except InputError as error:
        return Failure(str(error))

"""Flower's Grid as a courier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping

from flwr.app import Message
from flwr.serverapp import Grid

from nestling.errors import InputError
from nestling.fleet.flower.letters import ORDER, WELCOME, pack, unpack
from nestling.fleet.protocol.courier import Failure
from nestling.fleet.protocol.wire import kind_of

KEPT = 4096
TTL = 12 * 3600.0


class GridCourier:
    """Carries letters as Flower messages. `ttl` is how long Flower keeps a letter, and its answer,
    in seconds.

    Which node an answer is from follows from the message it answers: an error that the SuperLink
    reports on a node's behalf names the SuperLink as its sender.
    """

    def __init__(self, grid: Grid, ttl: float = TTL) -> None:
        """Uses a grid over which it has sent nothing yet."""
        self.grid, self.ttl = grid, ttl
        self._round = 0
        self._sent: OrderedDict[str, int] = OrderedDict()

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
        """The answers that the grid has for letters sent from here, each given once."""
        known = [ticket for ticket in tickets if ticket in self._sent]
        found = []
        for message in self.grid.pull_messages(known) if known else []:
            ticket = message.metadata.reply_to_message_id
            if self._sent.pop(ticket, None) is not None:
                found.append((ticket, _answer(message)))
        return found


def _answer(message: Message) -> bytes | Failure:
    if message.has_error():
        return Failure(f"{message.error.reason} (Flower's error {message.error.code})")
    try:
        return unpack(message.content)
    except InputError as error:
        return Failure(str(error))

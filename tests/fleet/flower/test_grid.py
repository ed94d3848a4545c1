"""Flower's grid as a courier: letters, answers, and errors that the SuperLink reports for a
node."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed (nestling[fleet])")

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from nestling.fleet.flower import GridCourier, InProcessGrid
from nestling.fleet.flower import grid as grid_module
from nestling.fleet.flower.letters import ACTION, pack, unpack
from nestling.fleet.protocol.courier import Failure
from nestling.fleet.protocol.wire import Hello, Order

RUN = "ab" * 8
ORDER, HELLO = Order(RUN, 1, 0, []).to_bytes(), Hello(RUN, "1" * 32, ()).to_bytes()


class Silent(InProcessGrid):
    """Node 3's answers are lost, and errors come from the SuperLink, as they do."""

    def _reply(self, message: Message) -> Message:
        reply = super()._reply(message)
        if reply.has_error():
            reply.metadata.__dict__["_src_node_id"] = 1
        return reply

    def pull_messages(self, message_ids: Any) -> Any:
        lost = [
            t
            for t in message_ids
            if t in self._replies and self._replies[t].metadata.src_node_id == 3
        ]
        return super().pull_messages([t for t in message_ids if t not in lost])


def app() -> ClientApp:
    found, seen = ClientApp(), dict[int, list[str]]()

    @found.train(ACTION)
    @found.query(ACTION)
    def handle(message: Message, context: Context) -> Message:
        seen.setdefault(context.node_id, []).append(message.metadata.message_type)
        if context.node_config["partition-id"] == 2:
            raise RuntimeError("out of memory")
        if context.node_config["partition-id"] == 3:
            return Message(RecordDict({"x": ConfigRecord({"a": 1})}), reply_to=message)
        return Message(pack(unpack(message.content)[::-1]), reply_to=message)

    found.seen = seen  # type: ignore[attr-defined]
    return found


def test_answers_are_matched_by_what_they_answer() -> None:
    client = app()
    grid = Silent(client, 4)
    courier = GridCourier(grid)
    assert sorted(courier.nodes()) == [2, 3, 4, 5]
    tickets = courier.push({**dict.fromkeys([2, 3, 4, 5], ORDER), 99: ORDER})
    found = dict(courier.pull(list(tickets.values())))
    assert found.pop(tickets[2]) == ORDER[::-1]
    failures = {node: found.get(ticket) for node, ticket in tickets.items()}
    assert isinstance(failures[4], Failure) and "out of memory" in failures[4].reason
    assert isinstance(failures[5], Failure) and "without a letter" in failures[5].reason
    assert isinstance(failures[99], Failure) and "no such node" in failures[99].reason
    assert failures[3] is None  # it did not answer, and nobody says so
    assert courier.pull(list(tickets.values())) == []  # each is given once
    assert courier.pull(["nobody's"]) == [] and client.seen[2] == ["train.nestling"]  # type: ignore[attr-defined]


def test_welcomes_are_queries_and_orders_are_trained() -> None:
    from nestling.fleet.protocol.wire import Welcome

    client = app()
    courier = GridCourier(InProcessGrid(client, 1))
    courier.push({2: Welcome(RUN, "", (1,), 2, ("0", "1"), 5).to_bytes()})
    courier.push({2: ORDER})
    assert client.seen[2] == ["query.nestling", "train.nestling"]  # type: ignore[attr-defined]


def test_a_message_can_be_made_in_this_process() -> None:
    """Flower allows it only in processes that know their task; the grid sees to that, and to
    nothing else."""
    InProcessGrid(app(), 1)
    message = Message(RecordDict(), 7, "train")
    assert message.metadata.dst_node_id == 7
    assert Message(Error(2, "no"), reply_to=message).has_error()


class Spoilt(InProcessGrid):
    """An answer of node 3 cannot be read, and takes with it what is fetched together with it; what
    was being fetched cannot be fetched again. As with Flower's own grid."""

    def pull_messages(self, message_ids: Any) -> Any:
        found = list(super().pull_messages(message_ids))
        if any(r.metadata.src_node_id == 3 and not r.has_error() for r in found):
            for reply in found:
                gone = Message(Error(3, "the message is gone"), reply_to=self.asked(reply))
                self._replies[reply.metadata.reply_to_message_id] = self._numbered(gone)
            raise KeyError("Array")
        return found

    def asked(self, reply: Message) -> Message:
        """The message that a reply answers."""
        message = Message(RecordDict(), reply.metadata.src_node_id, "train")
        message.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
        message.metadata.__dict__["_src_node_id"] = 1
        return message


def test_an_answer_that_cannot_be_read_is_its_own_node_s_only() -> None:
    courier = GridCourier(Spoilt(app(), [{"partition-id": 0}] * 3))
    for attempt in (1, 2, 3):
        tickets = courier.push(dict.fromkeys([2, 3, 4], ORDER))
        found = dict[str, Any]()
        while len(found) < 3:
            found.update(courier.pull(list(tickets.values())))
        if attempt > 1:
            assert found[tickets[2]] == found[tickets[4]] == ORDER[::-1]
        assert isinstance(found[tickets[3]], Failure)


class Stuck(InProcessGrid):
    """Whoever fetches first waits until it is let go."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.go, self.first = threading.Event(), True

    def pull_messages(self, message_ids: Any) -> Any:
        waits, self.first = self.first, False
        if waits:
            assert self.go.wait(60)
        return super().pull_messages(message_ids)


def test_an_answer_that_comes_late_is_given_to_whoever_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greeter and rounds share a courier: what one's stuck fetch brings is not the other's."""
    monkeypatch.setattr(grid_module, "STUCK", 0.01)
    grid = Stuck(app(), [{"partition-id": 0}] * 2)
    courier = GridCourier(grid)
    first, second = courier.push({2: ORDER})[2], courier.push({3: ORDER})[3]
    assert courier.pull([first]) == []
    grid.go.set()
    courier._running[0].join(60)
    monkeypatch.setattr(grid_module, "STUCK", 60.0)
    assert courier.pull([second]) == [(second, ORDER[::-1])]
    assert courier.pull([first]) == [(first, ORDER[::-1])]
    assert courier.pull([first, second]) == []

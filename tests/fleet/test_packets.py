"""Bytes in small messages over a channel that loses, doubles and mixes them."""

from __future__ import annotations

import itertools
import random

import pytest

from nestling.errors import InputError
from nestling.fleet.protocol import packets
from nestling.fleet.protocol.packets import ACK, JOB, PART, RESULT, WINDOW, Packet, Receiver, Sender


def carried(data: bytes, seed: int, lost: float) -> bytes:
    """What arrives of data over a channel that loses this share of all packets, doubles some and
    mixes them."""
    chance, sender, receiver = (
        random.Random(seed),
        Sender(JOB, 7, data),
        Receiver(7, -(-len(data) // PART), len(data)),
    )
    now = 0.0
    for _ in range(10_000):
        on_way = [
            packet
            for packet in sender.due(now)
            for _ in range(chance.choice((1, 1, 2)))
            if chance.random() >= lost
        ]
        chance.shuffle(on_way)
        for packet in on_way:
            ack = receiver.take(Packet.from_bytes(packet))
            if ack is not None and chance.random() >= lost:
                sender.acknowledge(Packet.from_bytes(ack.to_bytes()), now)
        if sender.finished:
            return receiver.data()
        now += 1.0
    raise AssertionError("it never arrived")


@pytest.mark.parametrize("size", [1, PART - 1, PART, PART + 1, 5 * PART, 3 * WINDOW * PART + 17])
def test_bytes_arrive_whole_whatever_is_lost(size: int) -> None:
    data = random.Random(size).randbytes(size)
    for seed in range(5):
        for lost in (0.0, 0.3, 0.7):
            assert carried(data, seed, lost) == data


def test_nothing_is_sent_twice_on_a_good_channel() -> None:
    data = bytes(5 * WINDOW * PART)
    sender, receiver = Sender(JOB, 1, data), Receiver(1, 5 * WINDOW, len(data))
    on_way, sent = list(sender.due(0.0)), 0
    while on_way:
        assert sent - receiver._arrived + len(on_way) <= WINDOW
        packet = on_way.pop(0)
        sent += 1
        ack = receiver.take(Packet.from_bytes(packet))
        if ack is not None:
            sender.acknowledge(ack, 0.0)
            on_way += sender.due(0.0)
    assert receiver.complete and sender.finished and sent == 5 * WINDOW and sender.again == 0


def test_a_silent_receiver_is_asked_less_and_less_often() -> None:
    sender = Sender(JOB, 1, b"x")
    times = [now for now in range(400) if sender.due(float(now))]
    pauses = [b - a for a, b in itertools.pairwise(times)]
    assert (
        pauses == sorted(pauses)
        and pauses[0] == packets.FIRST_PAUSE
        and max(pauses) == packets.LONGEST_PAUSE
    )


def test_one_that_forgot_everything_gets_it_all_again() -> None:
    data = bytes(3 * PART)
    sender = Sender(RESULT, 1, data)
    first = sender.due(0.0)
    sender.acknowledge(Packet(ACK, 1, 3, 3), 0.0)
    assert sender.finished and not sender.due(100.0)
    sender.restart()
    assert sender.due(100.0) == first


def test_an_ack_of_something_else_changes_nothing() -> None:
    sender = Sender(JOB, 1, bytes(3 * PART))
    sender.due(0.0)
    for wrong in (Packet(ACK, 2, 3, 3), Packet(ACK, 1, 3, 4), Packet(ACK, 1, 0, 3)):
        sender.acknowledge(wrong, 0.0)
    assert sender.arrived == 0


def test_every_damaged_packet_is_refused() -> None:
    whole = Packet(JOB, 9, 1, 2, b"payload").to_bytes()
    assert Packet.from_bytes(whole) == Packet(JOB, 9, 1, 2, b"payload")
    for place in range(len(whole)):
        with pytest.raises(InputError):
            Packet.from_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with pytest.raises(InputError):
            Packet.from_bytes(whole[:place])
    with pytest.raises(InputError):
        Packet.from_bytes(whole + bytes(PART))


@pytest.mark.parametrize(
    "wrong",
    [
        Packet(JOB, 1, 2, 2, b"x"),
        Packet(JOB, 1, 0, 2, b"not full"),
        Packet(JOB, 1, 0, 1, b""),
        Packet(ACK, 1, 3, 2),
        Packet(ACK, 1, 0, 2, b"x"),
        Packet(4, 1, 0, 1, b"x"),
    ],
)
def test_a_packet_that_contradicts_itself_is_refused(wrong: Packet) -> None:
    with pytest.raises(InputError):
        Packet.from_bytes(wrong.to_bytes())


def test_no_more_is_taken_than_was_agreed() -> None:
    with pytest.raises(InputError, match="announced"):
        Receiver(1, 60000, 10 * PART)
    receiver = Receiver(1, 3, 3 * PART)
    with pytest.raises(InputError, match="announced"):
        receiver.take(Packet(JOB, 1, 0, 2, bytes(PART)))
    with pytest.raises(InputError, match="do not travel"):
        Sender(JOB, 1, b"")

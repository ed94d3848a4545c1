"""What travels: exact sizes, a serial form without pickle, and nothing trusted."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.errors import InputError
from nestling.message import Message, faults


def sample() -> Message:
    weights = {
        "a.weight": torch.randn(3, 4),
        "count": torch.tensor(7),
        "half": torch.randn(5).half(),
    }
    return Message(
        {"weights": weights, "mask": {"a.weight": torch.rand(3, 4) > 0.5}, "empty": {}},
        {"samples": 12, "rate": 0.5},
    )


def test_a_message_survives_its_serial_form() -> None:
    message = sample()
    back = Message.from_bytes(message.to_bytes())
    assert back.facts == message.facts and list(back.parts) == list(message.parts)
    for kind, part in message.parts.items():
        assert set(back[kind]) == set(part)
        assert all(
            torch.equal(back[kind][n], t) and back[kind][n].dtype == t.dtype
            for n, t in part.items()
        )


def test_the_size_is_the_payload_and_flags_are_bits() -> None:
    assert sample().nbytes == 12 * 4 + 8 + 5 * 2 + 2


def test_views_of_one_storage_are_sent_as_what_they_are() -> None:
    base = torch.arange(10.0)
    message = Message({"weights": {"a": base[2:4], "b": base[::2]}})
    back = Message.from_bytes(message.to_bytes())
    assert torch.equal(back["weights"]["a"], base[2:4]) and torch.equal(
        back["weights"]["b"], base[::2]
    )


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(InputError):
        Message.from_bytes(noise)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_damaged_message_is_refused_or_still_a_message(where: int, flip: int) -> None:
    data = bytearray(sample().to_bytes())
    data[where % len(data)] ^= flip
    with contextlib.suppress(InputError):
        assert isinstance(Message.from_bytes(bytes(data)), Message)


def test_a_pickle_is_not_read() -> None:
    import pickle

    with pytest.raises(InputError):
        Message.from_bytes(pickle.dumps({"weights": {}}))


GOOD = {"weights": {"w": torch.zeros(2, 3)}}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({}, "missing"),
        ({"weights": {}}, "names differ"),
        ({"weights": {"w": torch.zeros(2, 3), "x": torch.zeros(1)}}, "names differ"),
        ({"weights": {"w": torch.zeros(3, 2)}}, "was expected"),
        ({"weights": {"w": torch.zeros(2, 3).double()}}, "was expected"),
        ({"weights": {"w": torch.full((2, 3), torch.nan)}}, "not finite"),
        ({"weights": {"w": torch.full((2, 3), torch.inf)}}, "not finite"),
        (
            {"weights": {"w": torch.zeros(2, 3)}, "extra": {"e": torch.tensor([torch.nan])}},
            "not finite",
        ),
    ],
)
def test_faulty_replies_are_told(parts: dict[str, dict[str, torch.Tensor]], reason: str) -> None:
    found = faults(Message(parts), GOOD)
    assert found is not None and reason in found


def test_a_good_reply_has_no_fault() -> None:
    assert faults(Message(GOOD), GOOD) is None


def test_the_order_of_names_survives() -> None:
    """Sums over a state are rounded by the order of its tensors, and a resumed run must be the same
    to the bit."""
    names = [f"{number:02d}" for number in range(40)]
    shuffled = [*names[1::2], *names[::2][::-1]]
    flags = {name: torch.tensor([True, False]) for name in shuffled[:3]}
    back = Message.from_bytes(
        Message({"b": {name: torch.ones(2) for name in shuffled}, "a": flags}).to_bytes()
    )
    assert list(back.parts) == ["b", "a"]
    assert list(back["b"]) == shuffled and list(back["a"]) == shuffled[:3]


def test_one_tensor_may_stand_in_a_message_twice() -> None:
    tensor, empty = torch.arange(4.0), torch.zeros(0)
    parts = {"a": {"x": tensor, "none": empty}, "b": {"x": tensor, "none": empty}}
    back = Message.from_bytes(Message(parts).to_bytes())
    assert all(torch.equal(back[kind]["x"], tensor) for kind in "ab")

"""Whatever is done to good bytes, they are read or refused: no other exception, no hang, and no
memory out of proportion. `benchmarks/fuzz.py` is the same for longer."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.errors import InputError
from tests.fuzz import formats
from tests.fuzz.formats import Format
from tests.fuzz.mutate import put, text_of
from tests.fuzz.trying import tally

ALL = {**formats.messages(), **formats.files(), **formats.reports()}
COUNTS = {
    **dict.fromkeys(formats.messages(), 2500),
    **dict.fromkeys(formats.files(), 800),
    **dict.fromkeys(formats.reports(), 120),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ALL)
def test_what_is_damaged_is_read_or_refused(name: str) -> None:
    found = tally(name, ALL[name], range(COUNTS[name]))
    assert not found.faults
    assert found.read  # some changes must get past the door, or nothing is tried


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ALL)
def test_much_more_of_it_is_read_or_refused(name: str) -> None:
    assert not tally(name, ALL[name], range(COUNTS[name], 15 * COUNTS[name])).faults


@pytest.mark.parametrize("name", ALL)
def test_the_samples_are_good(name: str) -> None:
    for sample in ALL[name].samples:
        ALL[name].read(sample)


def test_a_fault_is_found() -> None:
    """The fuzzer sees an exception, a large piece of memory and a refusal that cannot be said."""

    large: list[int] = []

    def read(data: bytes) -> None:
        if data[:1] == b"\0":
            raise KeyError("zero")
        if data[:1] == b"\xff" and not large:
            # Far more than is allowed: on a machine that is short of memory the system takes back
            # pages of libraries meanwhile, and the process grows by less than it was given.
            large.append(len(b"x" * (800 * 2**20)))
        if len(data) < 2:
            raise InputError("half a character: \ud800")

    found = tally("made up", Format((b"abcd",), read), range(1000))
    said = {what.partition(":")[0] for _, what in found.faults}
    assert {"KeyError", "a refusal that no file takes"} <= said
    assert any("MB of memory" in what for what in said)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=10,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(formats.messages()["wire"].samples), st.integers(0, 10**6), values)
def test_any_value_at_any_place_of_a_letter_is_read_or_refused(
    letter: bytes, place: int, value: Any
) -> None:
    head, body = formats.opened_letter(letter)
    data = formats.closed_letter(letter, text_of(put(head, place, value)), body)
    with contextlib.suppress(InputError):
        ALL["wire"].read(data)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), values)
def test_any_value_at_any_place_of_an_experiment_is_read_or_refused(place: int, value: Any) -> None:
    with contextlib.suppress(InputError):
        formats.Experiment.from_table(put(formats.small().to_table(), place, value))

"""What travels: it comes back as it was, is as large as it says, and anything else is refused with
a reason."""

from __future__ import annotations

import json
import random
import struct
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from nestling.errors import InputError
from nestling.fleet.protocol import wire
from nestling.fleet.protocol.wire import (
    Answer,
    Failed,
    Hello,
    JobDone,
    JobOrder,
    Member,
    Order,
    Parcel,
    Welcome,
    key_of,
)
from nestling.message import Message

RUN, KEY = "0123456789abcdef", "a" * 32


def message() -> Message:
    torch.manual_seed(0)
    weights: dict[str, Tensor] = {
        "b": torch.randn(3),
        "a": torch.randn(2, 3, 3),
        "steps": torch.tensor(7),
        "none": torch.zeros(0, 4),
    }
    mask = {"m": torch.rand(3, 5) > 0.5}
    others = {
        "h": torch.randn(4).half(),
        "bf": torch.randn(4).bfloat16(),
        "d": torch.randn(2).double(),
        "u": torch.arange(5).byte(),
    }
    return Message(
        {"weights": weights, "mask": mask, "others": others, "empty": {}},
        {"samples": 12, "note": [1, "é", 2.5, None]},
    )


def order(transport: str = "float32") -> Order:
    parcel = Parcel.of(message(), transport)
    spec = {"index": {"x": 3}, "dropped": [], "private": []}
    jobs = [
        JobOrder(c, f"device {c}", key_of(RUN, 4, c, "main", spec, parcel), "main", spec, parcel)
        for c in range(3)
    ]
    return Order(RUN, 4, 3, jobs, transport, 2)


def answer() -> Answer:
    done = JobDone(1, KEY, Parcel.of(message()), 0.1 + 0.2, 5, 60)
    return Answer(RUN, 4, [done, Failed(2, KEY, "it broke")], {"device 1": 1000}, "", False)


def equal(a: Message, b: Message) -> bool:
    same = a.facts == b.facts and list(a.parts) == list(b.parts)
    for kind in a.parts:
        same &= list(a[kind]) == list(b[kind])
        same &= all(
            x.dtype == b[kind][n].dtype
            and x.shape == b[kind][n].shape
            and torch.equal(x, b[kind][n])
            for n, x in a[kind].items()
        )
    return same


def test_messages_come_back_as_they_were() -> None:
    parcel = Parcel.of(message())
    assert equal(parcel.open(), message())
    assert parcel.nbytes == message().nbytes == parcel.open().nbytes
    strange = Message(
        {
            "w": {
                "t": torch.arange(12.0).reshape(3, 4).t()[1:],
                "nan": torch.tensor([float("nan"), float("inf")]),
            }
        }
    )
    back = Parcel.of(strange).open()
    assert torch.equal(back["w"]["t"], strange["w"]["t"]) and torch.isnan(back["w"]["nan"][0])


def test_orders_and_answers_come_back_as_they_were() -> None:
    sent, back = order(), Order.from_bytes(order().to_bytes())
    assert (back.run, back.round, back.covered, back.attempt) == (RUN, 4, 3, 2)
    assert [(j.client, j.name, j.key, j.network, j.spec) for j in back.jobs] == [
        (j.client, j.name, j.key, j.network, j.spec) for j in sent.jobs
    ]
    assert all(equal(job.parcel.open(), message()) for job in back.jobs)
    assert back.jobs[0].parcel is back.jobs[2].parcel  # what three clients share travelled once
    assert len(sent.to_bytes()) < 2 * len(Order(RUN, 4, 3, sent.jobs[:1]).to_bytes())
    told = Answer.from_bytes(answer().to_bytes())
    first, second = told.results
    assert isinstance(first, JobDone) and isinstance(second, Failed)
    assert (first.loss, first.steps, first.samples, second.error, told.free) == (
        0.1 + 0.2,
        5,
        60,
        "it broke",
        {"device 1": 1000},
    )
    assert equal(first.parcel.open(), message())


def test_hello_and_welcome_come_back_as_they_were() -> None:
    hello = Hello(RUN, KEY, (Member("pi", 3, "esp32", 100, 50, 1e9, 7, (3, 4)), Member("other")))
    assert Hello.from_bytes(hello.to_bytes()) == hello
    public = Parcel.of(Message({"public": {"x": torch.randn(2, 1, 4, 4)}}))
    welcome = Welcome(RUN, "rounds = 3", (1, 4, 4), 10, tuple("0123456789"), 500, public, "no")
    back = Welcome.from_bytes(welcome.to_bytes())
    assert (back.run, back.experiment, back.shape, back.classes, back.class_names, back.rows) == (
        RUN, "rounds = 3", (1, 4, 4), 10, tuple("0123456789"), 500,
    )  # fmt: skip
    assert back.refused == "no"
    assert back.public is not None and equal(back.public.open(), public.open())
    assert [wire.kind_of(x.to_bytes()) for x in (hello, welcome, order(), answer())] == [
        "hello",
        "welcome",
        "order",
        "answer",
    ]


def test_the_key_stands_for_all_of_the_work() -> None:
    parcel, spec = Parcel.of(message()), {"index": {"a": 1}, "dropped": [], "private": []}
    base: tuple[Any, ...] = (RUN, 4, 1, "main", spec, parcel)
    other = Parcel.of(
        Message(
            {
                **message().parts,
                "weights": {**message()["weights"], "b": message()["weights"]["b"] + 1e-6},
            }
        )
    )
    changed = [
        ("fedcba98", 4, 1, "main", spec, parcel),
        (RUN, 5, 1, "main", spec, parcel),
        (RUN, 4, 2, "main", spec, parcel),
    ]
    changed += [
        (RUN, 4, 1, "own", spec, parcel),
        (RUN, 4, 1, "main", {**spec, "index": {}}, parcel),
        (RUN, 4, 1, "main", spec, other),
    ]
    assert key_of(*base) == key_of(
        RUN, 4, 1, "main", dict(reversed(spec.items())), Parcel.of(message())
    )
    assert len({key_of(*base), *(key_of(*c) for c in changed)}) == 7


@pytest.mark.parametrize(("transport", "size"), [("fp16", 2), ("int8", 1)])
def test_rounded_transport_says_its_size_and_stays_close(transport: str, size: int) -> None:
    torch.manual_seed(1)
    state = {
        "matrix": torch.randn(20, 30),
        "vector": torch.randn(30),
        "large": torch.tensor([1e6, -2.0]),
        "zero": torch.zeros(4, 4),
    }
    counts = {"n": torch.arange(6)}
    sent = Message({"weights": state, "counts": counts}, {"samples": 3})
    parcel = Parcel.of(sent, transport)
    back = parcel.open()
    # what is too large for 16 bits stays
    assert parcel.nbytes == back.nbytes == 616 * size + 30 * 2 + 2 * 4 + 6 * 8
    assert torch.equal(back["counts"]["n"], counts["n"]) and torch.equal(
        back["weights"]["large"], state["large"]
    )
    assert torch.equal(back["weights"]["zero"], state["zero"])
    step = float(state["matrix"].abs().max()) / 127 if transport == "int8" else 0.004
    assert all(t.dtype == torch.float32 for t in back["weights"].values())
    assert float((back["weights"]["matrix"] - state["matrix"]).abs().max()) <= step / 2 + 1e-6
    assert float((back["weights"]["vector"] - state["vector"]).abs().max()) < 0.002
    again = Parcel.of(back, transport).open()["weights"]["matrix"]
    # rounding what was rounded changes nothing
    assert torch.equal(again, back["weights"]["matrix"])


def test_what_is_not_finite_travels_as_it_is() -> None:
    broken = Message({"w": {"m": torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]])}})
    for transport in ("fp16", "int8"):
        back = Parcel.of(broken, transport).open()["w"]["m"]
        assert torch.equal(torch.isfinite(back), torch.isfinite(broken["w"]["m"]))
    with pytest.raises(InputError, match="transport"):
        Parcel.of(broken, "int4")


def frame(
    header: Any,
    body: bytes = b"",
    kind: bytes = b"A",
    length: int | None = None,
    mark: bytes = b"NSTL",
    version: int = 2,
) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = struct.pack("<4sBcI", mark, version, kind, len(text) if length is None else length)
    return checked(head + text + body)


def checked(data: bytes) -> bytes:
    """With the checksum that an enemy would make as well."""
    return data + struct.pack("<I", zlib.crc32(data))


def header(**changes: Any) -> dict[str, Any]:
    row = {"client": 1, "key": KEY, "parcel": 0, "loss": 0.5, "steps": 1, "samples": 2}
    parts = [["weights", [["w", "f32", [2]]]]]
    parcel = {"facts": {"samples": 2}, "parts": parts, "bytes": 8}
    whole = {
        "run": RUN,
        "round": 4,
        "results": [row],
        "free": {},
        "error": "",
        "unknown": False,
        "parcels": [parcel],
    }
    for path, value in changes.items():
        table: Any = whole
        *way, last = path.split("__")
        for step in way:
            table = table[int(step[1:]) if step[0] == "n" and step[1:].isdigit() else step]
        if value is ...:
            del table[last]
        else:
            table[last] = value
    return whole


BODY = b"\0" * 8

BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "random": random.Random(0).randbytes(1000),
    "another mark": frame(header(), BODY, mark=b"ELSE"),
    "another version": frame(header(), BODY, version=9),
    "another kind": frame(header(), BODY, kind=b"O"),
    "no kind": frame(header(), BODY, kind=b"?"),
    "a header longer than the frame": frame(header(), BODY, length=2**31),
    "not JSON": frame(b"{not json", BODY),
    "not UTF-8": frame(b"\xff\xfe{}", BODY),
    "deep JSON": frame(b"[" * 100_000, BODY),
    "a list": frame([], BODY),
    "huge number": frame(b'{"round": ' + b"9" * 5000 + b"}", BODY),
    "truncated body": frame(header(), BODY[:-1]),
    "bytes after the end": frame(header(), BODY + b"x"),
    "no run": frame(header(run=...), BODY),
    "run is a path": frame(header(run="../../etc"), BODY),
    "round is text": frame(header(round="4"), BODY),
    "round is true": frame(header(round=True), BODY),
    "round is negative": frame(header(round=-1), BODY),
    "round is huge": frame(header(round=2**80), BODY),
    "results are text": frame(header(results="x"), BODY),
    "a result is a list": frame(header(results=[[]]), BODY),
    "no key": frame(header(results__n0__key=...), BODY),
    "key is short": frame(header(results__n0__key="ab"), BODY),
    "loss is NaN": frame(header(results__n0__loss=float("nan")), BODY),
    "loss is text": frame(header(results__n0__loss="1"), BODY),
    "steps are negative": frame(header(results__n0__steps=-1), BODY),
    "samples are huge": frame(header(results__n0__samples=2**63), BODY),
    "a parcel that is not there": frame(header(results__n0__parcel=1), BODY),
    "parcel bytes are negative": frame(header(parcels__n0__bytes=-8), BODY),
    "parcel bytes are too many": frame(header(parcels__n0__bytes=2**40), BODY),
    "free memory is text": frame(header(free={"a": "x"}), BODY),
    "free memory of nobody": frame(header(free={"": 1}), BODY),
    "unknown is a number": frame(header(unknown=1), BODY),
    "error is too long": frame(header(error="x" * (2**20 + 1)), BODY),
}

BROKEN_PARCELS: dict[str, bytes] = {
    "facts are a list": frame(header(parcels__n0__facts=[]), BODY),
    "no parts": frame(header(parcels__n0__parts=...), BODY),
    "parts are no pairs": frame(header(parcels__n0__parts=[["weights"]]), BODY),
    "a tensor without shape": frame(header(parcels__n0__parts=[["weights", [["w", "f32"]]]]), BODY),
    "an unknown type": frame(
        header(parcels__n0__parts=[["weights", [["w", "object", [2]]]]]), BODY
    ),
    "a type that is a list": frame(
        header(parcels__n0__parts=[["weights", [["w", [], [2]]]]]), BODY
    ),
    "a negative shape": frame(header(parcels__n0__parts=[["weights", [["w", "f32", [-2]]]]]), BODY),
    "a shape of floats": frame(
        header(parcels__n0__parts=[["weights", [["w", "f32", [2.0]]]]]), BODY
    ),
    "a shape beyond the body": frame(
        header(parcels__n0__parts=[["weights", [["w", "f32", [3]]]]]), BODY
    ),
    "a shape below the body": frame(
        header(parcels__n0__parts=[["weights", [["w", "f32", [1]]]]]), BODY
    ),
    "an enormous shape": frame(
        header(parcels__n0__parts=[["weights", [["w", "f32", [2**30, 2**30, 2**30]]]]]), BODY
    ),
    "many dimensions": frame(
        header(parcels__n0__parts=[["weights", [["w", "f32", [1] * 99]]]]), BODY
    ),
    "one name twice": frame(
        header(parcels__n0__parts=[["weights", [["w", "f32", [1]], ["w", "f32", [1]]]]]), BODY
    ),
    "a name that is a number": frame(
        header(parcels__n0__parts=[["weights", [[3, "f32", [2]]]]]), BODY
    ),
    "text as int8": frame(
        header(parcels__n0__parts=[["weights", [["w", "i64", [8], "i8", 1.0]]]]), BODY
    ),
    "a scale that is NaN": frame(
        header(parcels__n0__parts=[["weights", [["w", "f32", [8], "i8", float("nan")]]]]), BODY
    ),
    "a scale that is text": frame(
        header(parcels__n0__parts=[["weights", [["w", "f32", [8], "i8", "1"]]]]), BODY
    ),
    "too many tensors": frame(
        header(parcels__n0__parts=[["w", [[str(n), "f32", [0]] for n in range(2**16 + 1)]]]), BODY
    ),
}


def test_the_frame_they_are_made_from_is_good() -> None:
    found = Answer.from_bytes(frame(header(), BODY)).results[0]
    assert isinstance(found, JobDone) and found.parcel.open()["weights"]["w"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", BROKEN)
def test_broken_answers_are_refused_with_a_reason(name: str) -> None:
    with pytest.raises(InputError) as caught:
        Answer.from_bytes(BROKEN[name])
    assert 0 < len(str(caught.value)) < 500


@pytest.mark.parametrize("name", BROKEN_PARCELS)
def test_broken_tensors_are_refused_with_a_reason(name: str) -> None:
    result = Answer.from_bytes(BROKEN_PARCELS[name]).results[0]
    assert isinstance(result, JobDone)
    with pytest.raises(InputError) as caught:
        result.parcel.open()
    assert 0 < len(str(caught.value)) < 500


GOOD = {
    Answer: answer().to_bytes(),
    Order: order().to_bytes(),
    Hello: Hello(RUN, KEY, (Member("a"),)).to_bytes(),
    Welcome: Welcome(RUN, "", (1, 4, 4), 10, (), 500, Parcel.of(message())).to_bytes(),
}


@pytest.mark.parametrize("kind", GOOD)
def test_a_changed_byte_and_a_cut_are_always_refused(kind: Any) -> None:
    """Whatever carries a frame may change it: the tensors' own bytes look good whatever they
    are."""
    rng, good = random.Random(4), GOOD[kind]
    assert kind.from_bytes(good)
    for place in range(len(good)):
        changed = bytearray(good)
        changed[place] ^= rng.randint(1, 255)
        for data in (bytes(changed), good[:place]):
            with pytest.raises(InputError):
                kind.from_bytes(data)


def test_any_bytes_are_read_or_refused() -> None:
    """Frames with bytes changed, cut and doubled at random, and a checksum that is right: read, or
    an `InputError`, and nothing else."""
    rng = random.Random(3)
    good = [GOOD[kind][:-4] for kind in (Answer, Order, Hello)]
    read = refused = 0
    for _ in range(3000):
        data = bytearray(rng.choice(good))
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(data))
            if rng.random() < 0.7:
                data[place] = rng.randrange(256)
            elif rng.random() < 0.5:
                del data[place : place + rng.randint(1, 40)]
            else:
                data[place:place] = data[place : place + rng.randint(1, 40)]
            if not data:
                break
        try:
            letter = checked(bytes(data))
            kind = {"answer": Answer, "order": Order, "hello": Hello}.get(wire.kind_of(letter))
            if kind is None:
                continue
            found: Any = kind.from_bytes(letter)
            for part in getattr(found, "results", None) or getattr(found, "jobs", None) or []:
                if not isinstance(part, Failed):
                    part.parcel.open()
            read += 1
        except InputError:
            refused += 1
    assert read > 50 and refused > 1000

"""Hostile frames against the node under AddressSanitizer and UBSan: every one is answered, none
does harm.

The node has exactly the RAM of its plan in a block of its own, so that the first byte beyond it is
seen. Weights and settings that are nonsense are legal; the node may train with them, and what must
hold is that nothing is touched that is not its own.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from nestling.errors import InputError
from nestling.tiny.link import frames
from nestling.tiny.link.frames import Frame, FrameKind, Reader, Status
from nestling.tiny.link.orders import orders_of
from nestling.tiny.runtime import native
from nestling.tiny.runtime.job import Job
from tests.tiny.hostboard import CLASSES, ROWS, client_data, folder, host_program, job, room

SANITISED = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FRAMES = 100_000
WINDOW = 64  # frames on their way at a time: a pipe holds more
SESSION = 77
# types below this are requests; the answers to higher ones would be taken for BEACON and AGAIN
UNKNOWN = 0x70
REQUESTS = (
    FrameKind.HELLO,
    FrameKind.LOAD,
    FrameKind.WRITE,
    FrameKind.READ,
    FrameKind.BEGIN,
    FrameKind.START,
    FrameKind.STEP,
)


def rich_job() -> Job:
    """A job that uses every block."""
    return job(
        steps=4,
        shifts=True,
        anchor=lambda p, r: r.standard_normal(p.trained).astype(np.float32),
        mask=lambda p, r: r.random(p.trained) < 0.6,
        present=lambda p, r: np.ones(CLASSES, np.float32),
        targets=lambda p, r: r.standard_normal((ROWS, CLASSES)).astype(np.float32),
    )


class Node:
    """The sanitised node on stdin and stdout. Requests go out in bundles; every one must come back
    as exactly one answer."""

    def __init__(self, program: Path, home: Path, region: int, blob: bytes) -> None:
        (home / "blob").write_bytes(blob)
        self.errors = home / "errors"
        with open(self.errors, "wb") as errors:
            command = [str(program), "--arena", str(region), "--blob", str(home / "blob")]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        self.reader, self.sequence, self.waiting = Reader(), 0, 0
        self.sent, self.seen = 0, Counter[str]()
        self._collect(1)
        self.ask(FrameKind.HELLO)
        self.sync()

    def ask(self, kind: int, payload: bytes = b"", status: int = 0) -> None:
        self.sequence = (self.sequence + 1) & 0xFFFF
        self.raw(
            frames.encode(
                Frame(kind, SESSION, self.sequence, payload[: frames.MOST_PAYLOAD], status)
            )
        )

    def raw(self, data: bytes) -> None:
        """One frame, good or bad."""
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.sent += 1
        self.waiting += 1
        if self.waiting == WINDOW:
            self.sync()

    def sync(self) -> Frame | None:
        """Waits for all answers; gives the last."""
        assert self.process.stdin is not None
        self.process.stdin.flush()
        last = self._collect(self.waiting)
        self.waiting = 0
        return last

    def _collect(self, count: int) -> Frame | None:
        assert self.process.stdout is not None
        last = None
        while count > 0:
            data = os.read(self.process.stdout.fileno(), 65536)
            assert data, f"the node has ended: {self.errors.read_text()[-3000:]}"
            for frame in self.reader.feed(data):
                assert frame is not None, "the node sent a damaged frame"
                self.seen[_what(frame)] += 1
                last = frame
                count -= 1
        assert count == 0, "more answers than requests"
        return last

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        assert self.process.stdout.read() == b""  # nothing that was not asked for
        assert self.process.wait(60) == 0
        assert self.errors.read_bytes() == b""


def _what(frame: Frame) -> str:
    return (
        FrameKind(frame.kind).name if frame.kind >= FrameKind.BEACON else Status(frame.status).name
    )


class Script:
    """The requests of a whole job, in order, and pieces of it."""

    def __init__(self, told: Job) -> None:
        self.orders = orders_of(told)
        self.descriptor = self.orders.descriptor.tobytes()
        self.room = room(told)

    def load(self, descriptor: bytes) -> Iterator[tuple[int, bytes]]:
        for place in range(0, len(descriptor), 248):
            yield (
                FrameKind.LOAD,
                struct.pack("<2I", place, len(descriptor)) + descriptor[place : place + 248],
            )

    def begin(self) -> Iterator[tuple[int, bytes]]:
        yield FrameKind.BEGIN, struct.pack("<I", 3) + self.orders.settings.tobytes()
        for block, values in (*self.orders.blocks, (native.WEIGHTS, self.orders.weights)):
            raw = b"" if values is None else values.tobytes()
            for place in range(0, len(raw), 248):
                yield FrameKind.WRITE, struct.pack("<2I", block, place) + raw[place : place + 248]
        yield FrameKind.START, struct.pack("<2I", 3, 0)

    def step(self, number: int) -> tuple[int, bytes]:
        orders, at = self.orders, int(self.orders.starts[number])
        rows = orders.rows[at : at + 6]
        assert orders.shifts is not None and orders.targets is not None
        flags = 3
        head = (
            struct.pack("<I3H2B", number + 1, 6, 0, 0, 6, flags)
            + rows.tobytes()
            + orders.shifts[at : at + 6].tobytes()
        )
        return FrameKind.STEP, head + bytes(-len(head) % 4) + orders.targets[rows].tobytes()

    def all(self) -> list[tuple[int, bytes]]:
        reads = [(int(FrameKind.READ), struct.pack("<3I", block, 0, 64)) for block in range(7)]
        steps = [self.step(k) for k in range(4)]
        return [
            (int(FrameKind.HELLO), b""),
            *self.load(self.descriptor),
            *self.begin(),
            *steps,
            *reads,
        ]


def changed(draw: random.Random, data: bytes) -> bytes:
    """A few bytes or a word of `data` changed, or its length."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        what = draw.randrange(5)
        if what == 0 and found:
            found[draw.randrange(len(found))] = draw.randrange(256)
        elif what == 1 and len(found) >= 4:
            place = draw.randrange(len(found) // 4) * 4
            found[place : place + 4] = struct.pack(
                "<I",
                draw.choice(
                    (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFC, draw.randrange(999))
                ),
            )
        elif what == 2 and len(found) >= 4:
            place = draw.randrange(len(found) // 4) * 4
            found[place : place + 4] = struct.pack(
                "<f", draw.choice((float("nan"), float("inf"), -1e38, 1e-45, -0.0, 3e38))
            )
        elif what == 3:
            del found[draw.randrange(len(found) + 1) :]
        else:
            found += draw.randbytes(draw.randrange(1, 8))
    return bytes(found)


def noise(node: Node, draw: random.Random, _: Script) -> None:
    """Bytes that are no frame at all."""
    node.raw(b"\0" + bytes(draw.randrange(1, 256) for _ in range(draw.randrange(1, 400))) + b"\0")


def random_request(node: Node, draw: random.Random, _: Script) -> None:
    """A good frame around nonsense."""
    kind = draw.choice((*REQUESTS, draw.randrange(UNKNOWN)))
    node.ask(
        kind,
        draw.randbytes(draw.choice((0, 4, 8, 12, 44, draw.randrange(257)))),
        draw.randrange(256),
    )


def mutation(node: Node, draw: random.Random, script: Script) -> None:
    """A request of a real job, changed, its checksum put right."""
    kind, payload = draw.choice(script.all())
    node.ask(kind if draw.random() < 0.95 else draw.randrange(UNKNOWN), changed(draw, payload))


def any_order(node: Node, draw: random.Random, script: Script) -> None:
    """A request as it should be, at any time."""
    node.ask(*draw.choice(script.all()))


def other_sessions(node: Node, draw: random.Random, _: Script) -> None:
    """Requests of another session; not HELLO, which would open it."""
    node.raw(
        frames.encode(
            Frame(
                draw.choice(REQUESTS[1:]),
                draw.choice((0, SESSION ^ 1)),
                draw.randrange(1 << 16),
                draw.randbytes(12),
            )
        )
    )


def again(node: Node, draw: random.Random, script: Script) -> None:
    """A request of a real job, and the very same frame once more."""
    node.ask(*draw.choice(script.all()))
    node.sequence = (node.sequence - 1) & 0xFFFF
    node.ask(*draw.choice(script.all()))


def changed_job(node: Node, draw: random.Random, script: Script) -> None:
    """A whole job in order with a changed plan, its checksum put right: what passes the checks is
    trained."""
    descriptor = bytearray(script.descriptor)
    for _ in range(draw.choice((0, 1, 1, 2))):
        place = draw.randrange(16, len(descriptor))
        descriptor[place] = draw.choice((0, 1, 2, 255, descriptor[place] ^ 1 << draw.randrange(8)))
    struct.pack_into("<I", descriptor, 12, zlib.crc32(descriptor[16:]))
    for request in (*script.load(bytes(descriptor)), *script.begin()):
        node.ask(*request)
    for number in range(3):
        kind, payload = script.step(number)
        node.ask(kind, payload if draw.random() < 0.7 else changed(draw, payload))


def within_a_job(node: Node, draw: random.Random, script: Script) -> None:
    """A real job, then changed steps, writes and reads at the very place where the node expects a
    good one."""
    for request in (*script.load(script.descriptor), *script.begin()):
        node.ask(*request)
    done = 0
    for _ in range(20):
        kind, payload = (
            script.step(draw.randrange(4)) if draw.random() < 0.8 else draw.choice(script.all())
        )
        number = struct.pack("<I", done + 1)
        node.ask(
            kind,
            number + changed(draw, payload[4:])
            if kind == FrameKind.STEP
            else changed(draw, payload),
        )
        answer = node.sync()
        if (
            answer is not None
            and answer.kind == FrameKind.STEP | FrameKind.ANSWER
            and answer.status == Status.DONE
        ):
            done = struct.unpack_from("<I", answer.payload)[0]


def hollow_steps(node: Node, draw: random.Random, script: Script) -> None:
    """Steps that promise more than they bring, of rows that are there."""
    for request in (*script.load(script.descriptor), *script.begin()):
        node.ask(*request)
    for _ in range(10):
        count = draw.randrange(256)
        head = struct.pack(
            "<I3H2B",
            1,
            draw.choice((count, 6, 65535)),
            0,
            draw.choice((0, 0, 9, 65535)),
            count,
            draw.randrange(4),
        )
        node.ask(
            FrameKind.STEP,
            head + bytes(draw.choice((0, 2 * count, 4 * count, draw.randrange(245)))),
        )


def endless_plan(node: Node, draw: random.Random, script: Script) -> None:
    """A plan that is longer than the RAM, or that goes on after its end."""
    data = draw.randbytes(draw.choice((script.room + 600, len(script.descriptor))))
    promised = draw.choice((len(data), len(data) + 4, len(data) - 8, 0xFFFFFFFC))
    for place in range(0, len(data), 248):
        node.ask(FrameKind.LOAD, struct.pack("<2I", place, promised) + data[place : place + 248])


ATTACKS: dict[Callable[[Node, random.Random, Script], None], int] = {
    noise: 25,
    random_request: 20,
    mutation: 30,
    any_order: 10,
    other_sessions: 5,
    again: 5,
    changed_job: 2,
    within_a_job: 1,
    hollow_steps: 1,
    endless_plan: 1,
}


def attack(node: Node, script: Script, count: int, seed: int) -> None:
    draw = random.Random(seed)
    while node.sent < count:
        draw.choices(list(ATTACKS), list(ATTACKS.values()))[0](node, draw, script)
    node.sync()


def assert_still_right(node: Node, told: Job, blob: bytes) -> None:
    """After all that the node does a job as if nothing had been."""
    script = Script(told)
    for request in (
        *script.load(script.descriptor),
        *script.begin(),
        *(script.step(k) for k in range(4)),
    ):
        node.ask(*request)
    node.sync()
    found = b""
    for place in range(0, 4 * told.plan.params, 256):
        node.ask(
            FrameKind.READ,
            struct.pack("<3I", native.WEIGHTS, place, min(256, 4 * told.plan.params - place)),
        )
        answer = node.sync()
        assert answer is not None and answer.status == Status.DONE
        found += answer.payload
    assert found == native.run_job(told, blob).weights.tobytes()


@pytest.fixture(scope="module")
def program() -> Path:
    try:
        return host_program(*SANITISED)
    except InputError as error:
        pytest.skip(f"no sanitiser here: {str(error)[-200:]}")


def test_hostile_frames_do_no_harm(program: Path) -> None:
    told, blob = rich_job(), client_data()
    with folder() as home:
        node = Node(program, home, room(told), blob)
        attack(node, Script(told), FRAMES, seed=1)
        seen = Counter(node.seen)
        assert_still_right(node, told, blob)
        node.close()
    print(f"{FRAMES} frames: {dict(seen)}")
    assert sum(seen.values()) >= FRAMES  # an answer each
    # Every way of refusing was met, and the real thing too.
    for status in Status:
        assert seen[status.name] > FRAMES // 1000, (status, seen)
    assert seen["AGAIN"] > FRAMES // 10

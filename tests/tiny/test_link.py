"""Frames, the node's protocol, and sessions that end with the same bits whatever happens to the
line or to the board."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.errors import InputError
from nestling.planning.descriptor import DescriptorSettings
from nestling.tiny.link import frames
from nestling.tiny.link.frames import Frame, FrameKind, Reader, Status
from nestling.tiny.link.line import BoardLine, BoardRefused, LineTiming, Lost
from nestling.tiny.link.orders import orders_of
from nestling.tiny.link.session import Session, State, connect
from nestling.tiny.link.transport import Broken, Noise, open_stream
from nestling.tiny.runtime import native
from nestling.tiny.runtime.job import Job, Step
from tests.tiny.hostboard import (
    CLASSES,
    QUICK,
    ROWS,
    HostBoard,
    assert_same,
    client_data,
    folder,
    host_program,
    job,
    room,
    session_with,
)

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shifted": {"shifts": True},
    "proximal": {
        "settings": DescriptorSettings(lr=0.05, mu=0.1),
        "anchor": lambda p, r: r.standard_normal(p.trained).astype(np.float32),
    },
    "masked": {"mask": lambda p, r: r.random(p.trained) < 0.6},
    "present": {"present": lambda p, r: (np.arange(CLASSES) != 2).astype(np.float32)},
    "distilled": {
        "settings": DescriptorSettings(
            lr=0.05, momentum=0.5, ce=0.5, kd=0.7, mse=0.1, temperature=2.0
        ),
        "targets": lambda p, r: r.standard_normal((ROWS, CLASSES)).astype(np.float32),
    },
    "distilled and shifted": {
        "settings": DescriptorSettings(lr=0.05, kd=1.0),
        "shifts": True,
        "targets": lambda p, r: r.standard_normal((ROWS, CLASSES)).astype(np.float32),
    },
    "inner": {"settings": DescriptorSettings(lr=0.05, inner=0.5), "inner": 16},
    "batches of many frames": {"size": 100, "steps": 3},
}


@pytest.fixture
def home() -> Iterator[Path]:
    with folder() as path:
        yield path


# -- frames ----------------------------------------------------------------------------------------


@given(st.binary(max_size=600))
def test_cobs_has_no_zeros_and_comes_back(raw: bytes) -> None:
    coded = frames.cobs(raw)
    assert 0 not in coded
    assert frames.uncobs(coded) == raw


@pytest.mark.parametrize("length", [0, 1, 240, 241, 242, 243, 244, 245, 255, 256])
def test_a_frame_comes_back_at_every_length_where_blocks_end(length: int) -> None:
    frame = Frame(FrameKind.WRITE, 7, 65535, bytes(1 + k % 255 for k in range(length)), 3)
    assert Reader().feed(frames.encode(frame)) == [frame]


@given(st.binary(max_size=80), st.integers(0, 2**16 - 1), st.data())
def test_one_changed_bit_is_seen_and_the_next_frame_is_read(
    payload: bytes, sequence: int, draw: st.DataObject
) -> None:
    frame = Frame(FrameKind.READ, 1, sequence, payload)
    sent = bytearray(frames.encode(frame))
    place = draw.draw(st.integers(1, len(sent) - 2))
    sent[place] ^= 1 << draw.draw(st.integers(0, 7))
    reader = Reader()
    assert frame not in reader.feed(bytes(sent))
    assert reader.feed(frames.encode(frame))[-1] == frame


def test_a_stream_without_zeros_is_not_kept() -> None:
    reader = Reader()
    for _ in range(100):
        assert reader.feed(b"\x55" * 1000) == []
    assert len(reader._rest) < 1000
    assert reader.feed(b"\0") == [None]


# -- the node --------------------------------------------------------------------------------------


class Wire:
    """Frames by hand, to a node on stdin and stdout."""

    def __init__(self, home: Path, region: int, blob: bytes | None) -> None:
        command = [str(host_program()), "--arena", str(region)]
        if blob is not None:
            (home / "blob").write_bytes(blob)
            command += ["--blob", str(home / "blob")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.reader, self.sequence = Reader(), 0
        assert self.next().kind == FrameKind.BEACON
        self.ask(FrameKind.HELLO)

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def next(self) -> Frame:
        assert self.process.stdout is not None
        while True:
            data = os.read(self.process.stdout.fileno(), 4096)
            assert data, "the node has ended"
            found = self.reader.feed(data)
            if found:
                assert len(found) == 1 and found[0] is not None
                return found[0]

    def ask(self, kind: int, payload: bytes = b"", session: int = 9) -> Frame:
        self.sequence += 1
        self.send(frames.encode(Frame(kind, session, self.sequence, payload)))
        return self.next()

    def steps(self) -> int:
        return struct.unpack_from("<16I", self.ask(FrameKind.HELLO).payload)[8]

    def begin(self, job: Job, first: int = 0) -> None:
        """All of a job up to START."""
        orders = orders_of(job)
        descriptor = orders.descriptor.tobytes()
        for place in range(0, len(descriptor), 240):
            assert (
                self.ask(
                    FrameKind.LOAD,
                    struct.pack("<2I", place, len(descriptor)) + descriptor[place : place + 240],
                ).status
                == 0
            )
        assert (
            self.ask(FrameKind.BEGIN, struct.pack("<I", 5) + orders.settings.tobytes()).status == 0
        )
        weights = orders.weights.tobytes()
        for place in range(0, len(weights), 240):
            assert (
                self.ask(
                    FrameKind.WRITE, struct.pack("<2I", 0, place) + weights[place : place + 240]
                ).status
                == 0
            )
        assert self.ask(FrameKind.START, struct.pack("<2I", 5, first)).status == 0

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(30) == 0


def step(
    number: int,
    rows: list[int],
    batch: int | None = None,
    first: int = 0,
    inner: int = 0,
    flags: int = 0,
) -> bytes:
    head = struct.pack(
        "<I3H2B", number, len(rows) if batch is None else batch, first, inner, len(rows), flags
    )
    return head + np.asarray(rows, "<u2").tobytes()


@pytest.fixture
def wire(home: Path) -> Iterator[Wire]:
    found = Wire(home, room(job()), client_data())
    yield found
    found.close()


def test_a_repeated_request_is_answered_again_and_done_once(wire: Wire) -> None:
    wire.begin(job())
    first = wire.ask(FrameKind.STEP, step(1, [1, 2, 3]))
    assert struct.unpack_from("<2I", first.payload) == (1, 0)
    for _ in range(3):
        wire.sequence -= 1
        assert wire.ask(FrameKind.STEP, step(1, [1, 2, 3])) == first
    assert wire.steps() == 1


def test_an_older_request_is_ignored(wire: Wire) -> None:
    wire.begin(job())
    old = frames.encode(Frame(FrameKind.STEP, 9, wire.sequence + 1, step(1, [1, 2])))
    wire.ask(FrameKind.STEP, step(1, [1, 2]))
    wire.ask(FrameKind.STEP, step(2, [1, 2]))
    wire.send(old)
    assert wire.steps() == 2  # and the next answer is that of HELLO: the straggler got none


def test_a_step_that_is_done_is_acknowledged_and_any_other_refused(wire: Wire) -> None:
    wire.begin(job(), first=6)
    # done, but not since START: its loss is not known
    assert wire.ask(FrameKind.STEP, step(6, [1, 2])).status == Status.NUMBER
    first = wire.ask(FrameKind.STEP, step(7, [1, 2]))
    again = wire.ask(FrameKind.STEP, step(7, [1, 2]))
    assert again.status == 0 and again.payload[:12] == first.payload[:12]
    assert wire.ask(FrameKind.STEP, step(9, [1, 2])).status == Status.NUMBER
    assert wire.ask(FrameKind.STEP, step(6, [1, 2])).status == Status.NUMBER
    assert wire.steps() == 7


def test_a_batch_in_pieces_must_come_in_order_and_of_one_kind(wire: Wire) -> None:
    wire.begin(job())
    assert struct.unpack_from(
        "<2I", wire.ask(FrameKind.STEP, step(1, [1, 2], batch=6)).payload
    ) == (0, 2)
    assert wire.ask(FrameKind.STEP, step(1, [5], batch=6, first=3)).status == Status.NUMBER
    assert wire.ask(FrameKind.STEP, step(1, [5], batch=7, first=2)).status == Status.NUMBER
    assert wire.ask(FrameKind.STEP, step(1, [5], batch=6, first=2, inner=1)).status == Status.NUMBER
    # done already
    assert struct.unpack_from(
        "<2I", wire.ask(FrameKind.STEP, step(1, [1, 2], batch=6)).payload
    ) == (0, 2)
    assert struct.unpack_from(
        "<2I", wire.ask(FrameKind.STEP, step(1, [3, 4, 5, 6], batch=6, first=2)).payload
    ) == (1, 0)


def test_what_cannot_be_is_refused(wire: Wire) -> None:
    word = struct.Struct("<I").pack
    assert wire.ask(FrameKind.STEP, step(1, [1])).status == Status.ORDER
    assert wire.ask(FrameKind.READ, word(0) + word(0) + word(4)).status == Status.ORDER
    assert wire.ask(FrameKind.BEGIN, bytes(44)).status == Status.ORDER
    assert wire.ask(FrameKind.START, bytes(8)).status == Status.ORDER
    assert wire.ask(FrameKind.LOAD, word(0) + word(1 << 30) + b"1234").status == Status.RANGE
    assert wire.ask(FrameKind.LOAD, word(0) + word(6) + b"1234").status == Status.RANGE
    assert wire.ask(FrameKind.LOAD, word(4) + word(8) + b"1234").status == Status.ORDER
    assert wire.ask(FrameKind.LOAD, word(0) + word(4) + b"1234").status == Status.ENGINE
    assert wire.ask(77).status == Status.TYPE
    wire.begin(job())
    size = 4 * job().plan.params
    for kind, tail in ((FrameKind.WRITE, b"1234"), (FrameKind.READ, word(4))):
        assert wire.ask(kind, word(0) + word(size - 3) + tail).status == Status.RANGE
        assert wire.ask(kind, word(0) + word(0xFFFFFFFF) + tail).status == Status.RANGE
        # the plan has no anchor
        assert wire.ask(kind, word(2) + word(0) + tail).status == Status.RANGE
        assert wire.ask(kind, word(99) + word(0) + tail).status == Status.RANGE
    assert wire.ask(FrameKind.READ, word(0) + word(0) + word(257)).status == Status.RANGE
    assert wire.ask(FrameKind.READ, word(0) + word(0) + word(0)).status == Status.RANGE
    assert wire.ask(FrameKind.STEP, step(1, [ROWS])).status == Status.RANGE
    assert wire.ask(FrameKind.STEP, step(1, [1, 2], batch=1)).status == Status.RANGE
    assert wire.ask(FrameKind.STEP, step(1, [])).status == Status.RANGE
    assert wire.ask(FrameKind.STEP, step(1, [1], flags=1) + b"\x03\x00").status == Status.RANGE
    assert wire.ask(FrameKind.STEP, step(1, [1], flags=4)).status == Status.RANGE
    assert wire.ask(FrameKind.STEP, step(1, [1])[:-1]).status == Status.LENGTH
    for kind in (
        FrameKind.HELLO,
        FrameKind.LOAD,
        FrameKind.WRITE,
        FrameKind.READ,
        FrameKind.BEGIN,
        FrameKind.START,
        FrameKind.STEP,
    ):
        assert wire.ask(kind, b"123").status == Status.LENGTH
    assert (
        wire.ask(FrameKind.BEGIN, word(5) + np.full(10, np.nan, "<f4").tobytes()).status
        == Status.ENGINE
    )


def test_other_sessions_are_told_so_and_damage_is_complained_of(wire: Wire) -> None:
    assert wire.ask(FrameKind.READ, bytes(12), session=8).status == Status.SESSION
    assert wire.ask(FrameKind.HELLO, session=0).status == Status.SESSION
    wire.send(b"\0garbage\0")
    assert wire.next().kind == FrameKind.AGAIN
    wire.send(b"\0\0\0" + b"\x01" * 5000 + b"\0")
    assert wire.next().kind == FrameKind.AGAIN
    # an echo is not answered
    wire.send(frames.encode(Frame(FrameKind.READ | FrameKind.ANSWER, 9, wire.sequence + 1)))
    wire.sequence -= 2  # the two requests above were not of this session and do not count
    assert wire.ask(FrameKind.HELLO).kind == FrameKind.HELLO | FrameKind.ANSWER


def test_whoever_writes_into_a_job_ends_it(wire: Wire) -> None:
    wire.begin(job())
    wire.ask(FrameKind.STEP, step(1, [1]))
    assert wire.ask(FrameKind.WRITE, bytes(12)).status == 0
    assert wire.ask(FrameKind.STEP, step(2, [1])).status == Status.ORDER
    assert wire.ask(FrameKind.START, struct.pack("<2I", 5, 1)).status == Status.ORDER


# -- the sessions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_gives_the_bits_of_the_host_build(home: Path, kind: str) -> None:
    told, blob = job(**KINDS[kind]), client_data()
    with HostBoard(home, room(told), blob) as board:
        assert_same(session_with(board, every=4).run(told), native.run_job(told, blob))


def test_many_jobs_on_one_board_load_a_plan_only_when_it_changes(home: Path) -> None:
    blob = client_data()
    wide = job(width=6)
    with HostBoard(home, room(wide), blob) as board:
        session = session_with(board)
        for told in (wide, job(width=6, steps=3), job(seed=4), job(seed=5), wide):
            assert_same(session.run(told), native.run_job(told, blob))
        assert session.notes.loads == 3


def test_a_fifth_of_the_frames_spoilt_changes_nothing(home: Path) -> None:
    told, blob = job(steps=30), client_data()
    with HostBoard(home, room(told), blob) as board:
        session = session_with(board, Noise(0.2, seed=3), every=7)
        assert_same(session.run(told), native.run_job(told, blob))
        assert session.line.counts.resent > 20
        assert session.hello().damaged > 5


def cut_off(board: HostBoard, at: set[int]) -> Any:
    """Cuts the board's power after these steps, each once."""

    def after(number: int, _: float) -> None:
        if number in at:
            at.discard(number)
            board.restart()

    return after


@pytest.mark.parametrize("noise", [None, Noise(0.2, seed=1)])
def test_a_board_killed_three_times_ends_with_the_same_bits(
    home: Path, noise: Noise | None
) -> None:
    told, blob = job(steps=30), client_data()
    with HostBoard(home, room(told), blob) as board:
        session = session_with(board, noise, every=5)
        assert_same(
            session.run(told, on_step=cut_off(board, {3, 12, 29})), native.run_job(told, blob)
        )
        assert board.starts == 4
        assert session.notes.restored == 2  # the first time there was no checkpoint yet


def test_a_new_gateway_goes_on_where_the_board_is(home: Path) -> None:
    told, blob = job(steps=20), client_data()
    kept: list[State] = []
    losses: list[float] = []

    class Killed(Exception):
        pass

    def note(number: int, loss: float) -> None:
        if number == 14:
            raise Killed  # after the board has done the step and before it is noted
        losses.append(loss)

    with HostBoard(home, room(told), blob) as board:
        first = session_with(board, every=6)
        with pytest.raises(Killed):
            first.run(told, checkpoint=kept.append, on_step=note)
        first.close()
        second = session_with(board)
        seen: list[int] = []
        state = State(
            kept[-1].step, kept[-1].weights, kept[-1].momentum, kept[-1].loss, tuple(losses[12:])
        )
        found = second.run(told, resume=state, on_step=lambda number, _: seen.append(number))
        assert_same(found, native.run_job(told, blob))
        assert seen == list(range(14, 21))  # the 14th was only asked for
        assert second.notes.restored == 0 and second.notes.loads == 0
        second.close()
        # Without the losses since the checkpoint it goes back to that.
        third = session_with(board)
        assert_same(third.run(told, resume=kept[0]), native.run_job(told, blob))
        assert third.notes.restored == 1


def test_a_gateway_that_ends_within_a_batch_is_followed_within_it(home: Path) -> None:
    told, blob = job(size=80, steps=2), client_data()
    with HostBoard(home, room(told), blob) as board:
        first, asked = session_with(board), []
        ask = first.line.ask

        def counted(kind: FrameKind, payload: bytes, extra: float = 0.0) -> bytes:
            asked.append(kind)
            if asked.count(FrameKind.STEP) == 3:
                raise KeyboardInterrupt
            return ask(kind, payload, extra)

        first.line.ask = counted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            first.run(told)
        first.close()
        second = session_with(board)
        assert second.hello().samples == 64
        assert_same(second.run(told), native.run_job(told, blob))
        assert second.notes.loads == 0


def test_a_lost_frame_does_not_make_the_board_look_slow(home: Path) -> None:
    """Else every loss makes the wait for the next one longer."""
    told, blob = job(), client_data()
    with HostBoard(home, room(told), blob) as board:
        session = session_with(board)
        write, sent = session.line._write, []

        def forgetful(data: bytes) -> None:
            frame = frames.decode(data.strip(b"\0"))
            assert frame is not None
            sent.append((frame.kind, frame.sequence))
            if frame.kind != FrameKind.STEP or sent.count(sent[-1]) > 1:
                write(data)

        session.line._write = forgetful  # type: ignore[method-assign]
        assert_same(session.run(told), native.run_job(told, blob))
        assert session.line.counts.resent >= len(told.steps) and session._pace is None


@pytest.mark.parametrize("lie", [b"", b"1234", bytes(100)])
@pytest.mark.parametrize("kind", [FrameKind.HELLO, FrameKind.STEP, FrameKind.READ])
def test_a_board_that_lies_is_refused(home: Path, kind: FrameKind, lie: bytes) -> None:
    told = job()
    with HostBoard(home, room(told), client_data()) as board:
        session = session_with(board)
        exchange = session.line._exchange

        def lying(asked: FrameKind, *rest: Any) -> bytes:
            answer = exchange(asked, *rest)
            return lie if asked == kind else answer

        session.line._exchange = lying  # type: ignore[method-assign]
        with pytest.raises(BoardRefused):
            session.run(told)


def test_a_board_that_is_too_small_or_empty_says_so(home: Path) -> None:
    told = job()
    with (
        HostBoard(home, room(told) - 4, client_data(), "small") as small,
        pytest.raises(BoardRefused, match="bytes of RAM"),
    ):
        session_with(small).run(told)
    with (
        HostBoard(home, room(told), None, "empty") as empty,
        pytest.raises(BoardRefused, match="no readable data"),
    ):
        session_with(empty).run(told)
    torn = client_data()[:-1] + b"\x7f"
    with (
        HostBoard(home, room(told), torn, "torn") as broken,
        pytest.raises(BoardRefused, match="no readable data"),
    ):
        session_with(broken).run(told)


def test_the_engines_refusals_arrive_in_words(home: Path) -> None:
    told = job()
    wrong = Job(told.plan, told.weights, DescriptorSettings(lr=-1.0), told.steps)
    far = Job(told.plan, told.weights, told.settings, [Step(np.array([ROWS]))])
    with HostBoard(home, room(told), client_data()) as board:
        session = session_with(board)
        with pytest.raises(BoardRefused, match="not finite or out of its range"):
            session.run(wrong)
        with pytest.raises(BoardRefused, match="STEP: outside"):
            session.run(far)
        assert_same(session.run(told), native.run_job(told, client_data()))


def test_a_board_that_never_comes_is_given_up(home: Path) -> None:
    line = BoardLine(connect(f"unix:{home / 'nobody'}"), LineTiming(revival=0.2))
    with pytest.raises(Lost, match="did not come back"):
        Session(line).run(job())


@pytest.mark.parametrize(
    ("fault", "change"),
    [
        ("weights", {"weights": np.zeros(3, np.float32)}),
        ("steps", {"steps": [Step(np.array([70000]))]}),
        ("steps", {"steps": [Step(np.array([], np.int64))]}),
        ("anchor", {"settings": DescriptorSettings(lr=0.1, mu=0.1)}),
        ("targets", {"settings": DescriptorSettings(lr=0.1, kd=0.1)}),
        ("mask", {"mask": np.ones(5, bool)}),
        ("present", {"present": np.ones(CLASSES, np.float32)}),
    ],
)
def test_a_job_whose_parts_do_not_belong_together_names_the_part(
    fault: str, change: dict[str, Any]
) -> None:
    told = job()
    parts = {
        "plan": told.plan,
        "weights": told.weights,
        "settings": told.settings,
        "steps": told.steps,
        **change,
    }
    with pytest.raises(InputError) as error:
        orders_of(Job(**parts))
    assert error.value.field == fault


# -- the transports --------------------------------------------------------------------------------


def test_over_tcp(home: Path) -> None:
    told, blob = job(), client_data()
    (home / "blob").write_bytes(blob)
    server = socket.create_server(("127.0.0.1", 0))
    children: list[subprocess.Popen[bytes]] = []

    def serve() -> None:
        link, _ = server.accept()
        command = [str(host_program()), "--arena", str(room(told)), "--blob", str(home / "blob")]
        children.append(subprocess.Popen(command, stdin=link, stdout=link))
        link.close()

    thread = threading.Thread(target=serve)
    thread.start()
    session = Session(BoardLine(connect(f"tcp:127.0.0.1:{server.getsockname()[1]}"), QUICK))
    assert_same(session.run(told), native.run_job(told, blob))
    session.close()
    thread.join()
    server.close()
    assert children[0].wait(30) == 0


def test_over_a_serial_port(home: Path) -> None:
    pytest.importorskip("serial", reason="pyserial is not installed: pip install nestling[tiny]")
    import tty

    told, blob = job(), client_data()
    (home / "blob").write_bytes(blob)
    ours, theirs = os.openpty()
    tty.setraw(ours)
    command = [str(host_program()), "--arena", str(room(told)), "--blob", str(home / "blob")]
    board = subprocess.Popen(command, stdin=ours, stdout=ours)
    try:
        session = Session(BoardLine(connect(f"serial:{os.ttyname(theirs)}:115200"), QUICK))
        assert_same(session.run(told), native.run_job(told, blob))
        session.close()
    finally:
        board.kill()
        board.wait()
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("address", ["", "unix:", "tcp:host", "tcp:host:x", "carrier-pigeon:1"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(InputError, match="no address"):
        open_stream(address)


def test_nobody_there_is_broken_and_not_wrong(home: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(Broken):
        open_stream(f"unix:{home / 'none'}")
    with pytest.raises(Broken):
        open_stream("tcp:127.0.0.1:9", timeout=2)
    assert time.monotonic() - begun < 60

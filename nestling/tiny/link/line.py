"""Request and answer with one board over a stream that may lose, damage, repeat and invent frames.

One request is on its way at a time. It is sent again until its answer comes; the board knows by the
number whether it has done it already. When the board has started anew, or the stream is gone, or
nothing comes for too long, that is `Lost`: `hello` begins again.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from nestling.errors import InputError
from nestling.planning.descriptor import NONE
from nestling.tiny.link.frames import Frame, FrameKind, Reader, Status, encode
from nestling.tiny.link.transport import Broken, Stream
from nestling.tiny.runtime.native import REASONS

PROTOCOL = 1
_INFO = struct.Struct("<2H15I")
_ENGINE = struct.Struct("<2I")
_SHORTEST = 0.03  # seconds; below that a busy machine sends again what was only late
_HELLO = 3.0  # seconds after which the stream is opened again
_READY = 4
_HAS_DATA = 8
_LOADED = 1
_REASONS: dict[int, str] = {
    Status.TYPE: "it does not know this request",
    Status.LENGTH: "a request of the wrong length",
    Status.ORDER: "not now: there is no plan, no job or no data",
    Status.RANGE: "outside of what it has",
    Status.NUMBER: "not the step that comes next",
}


class Lost(ConnectionError):
    """The board does not answer, or has started anew."""


class Gone(Lost):
    """The board was lost and did not come back."""


class BoardRefused(InputError):
    """The board will not do what it was asked for."""


@dataclass(frozen=True)
class LineTiming:
    """Seconds. answer: until a request is sent again for the first time (then twice as long each
    time, at most `longest`), less where answers are seen to come sooner. sample: added for each
    sample of a step until the first has been timed. patience: without an answer the board counts as
    lost. revival: how long it is waited for after that."""

    answer: float = 0.5
    longest: float = 8.0
    sample: float = 0.5
    patience: float = 60.0
    revival: float = 300.0


@dataclass
class Counts:
    """What happened on the line."""

    frames: int = 0
    resent: int = 0
    damaged: int = 0
    opened: int = 0
    restarts: int = 0
    lost: int = 0


@dataclass(frozen=True)
class BoardInfo:
    """A board's state. `plan`: CRC of its descriptor; `samples`: of the batch at work; `data`: CRC
    of its data."""

    payload: int
    build: int
    region: int
    stack: int
    stack_reserved: int
    loaded: bool
    ready: bool
    has_data: bool
    plan: int
    job: int
    steps: int
    samples: int
    rows: int
    shape: tuple[int, int, int]
    data: int
    damaged: int
    repeated: int


def info_from(payload: bytes) -> BoardInfo:
    """The state in an answer to HELLO."""
    if len(payload) != _INFO.size:
        raise BoardRefused(
            f"a state of {len(payload)} bytes from the board", fix="update its firmware"
        )
    protocol, room, build, region, stack, reserved, flags, *rest = _INFO.unpack(payload)
    if protocol != PROTOCOL:
        raise BoardRefused(
            f"the board speaks protocol {protocol}, this is {PROTOCOL}", fix="update its firmware"
        )
    plan, job, steps, samples, rows, channels, sides, data, damaged, repeated = rest
    shape = (channels & 0xFFFF, sides & 0xFFFF, sides >> 16)
    marks = (bool(flags & _LOADED), bool(flags & _READY), bool(flags & _HAS_DATA))
    return BoardInfo(
        room,
        build,
        region,
        stack,
        reserved,
        *marks,
        plan,
        job,
        steps,
        samples,
        rows,
        shape,
        data,
        damaged,
        repeated,
    )


@dataclass
class BoardLine:
    """Speaks to one board. `connect` opens the stream, or raises `Broken`."""

    connect: Callable[[], Stream]
    timing: LineTiming = field(default_factory=LineTiming)
    counts: Counts = field(default_factory=Counts)
    _stream: Stream | None = None
    _reader: Reader = field(default_factory=Reader)
    _session: int = 0
    _sequence: int = 0
    _usual: float = 0.0  # seconds until an answer comes,
    _spread: float = 0.0  # and how far that varies; 0: not known yet

    def hello(self) -> BoardInfo:
        """Begins a session, with a board that may still be starting; waits for it for
        `timing.revival` seconds."""
        end = time.monotonic() + self.timing.revival
        pause = 0.02
        while True:
            try:
                self._open()
                # what a board did not hear because it was starting is soon said again
                wait = self.timing.answer / 2
                return info_from(
                    self._exchange(
                        FrameKind.HELLO, b"", min(_HELLO, self.timing.patience), wait, wait
                    )
                )
            except Lost as error:
                if time.monotonic() + pause > end:
                    raise Gone(
                        f"the board did not come back in {self.timing.revival:g} s: {error}"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def ask(self, kind: FrameKind, payload: bytes, extra: float = 0.0) -> bytes:
        """The answer to a request; `extra` seconds are granted for the work that it takes."""
        begun, resent = time.monotonic(), self.counts.resent
        wait = self._wait() + extra
        answer = self._exchange(
            kind, payload, self.timing.patience + extra, wait, max(wait, self.timing.longest)
        )
        # else it is not known which of them was answered
        if not extra and self.counts.resent == resent:
            self._learn(time.monotonic() - begun)
        return answer

    def close(self) -> None:
        """Closes the stream; `hello` opens it again."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    def _wait(self) -> float:
        """Seconds after which a request counts as lost, computed as TCP does."""
        return (
            min(self.timing.answer, max(_SHORTEST, self._usual + 4 * self._spread))
            if self._spread
            else self.timing.answer
        )

    def _learn(self, seconds: float) -> None:
        if not self._spread:
            self._usual, self._spread = seconds, seconds / 2
        self._spread += (abs(seconds - self._usual) - self._spread) / 4
        self._usual += (seconds - self._usual) / 8

    def _open(self) -> None:
        if self._stream is None:
            try:
                self._stream = self.connect()
            except Broken as error:
                raise Lost(str(error)) from error
            self._reader = Reader()
            self.counts.opened += 1
        # Another number than before, never 0: what is still on its way to us belongs to another
        # session. Not from `random`, whose state is the experiment's.
        self._session = (self._session + secrets.randbelow(0xFFFE)) % 0xFFFF + 1
        self._sequence = secrets.randbelow(1 << 16)

    def _exchange(
        self, kind: FrameKind, payload: bytes, patience: float, wait: float, longest: float
    ) -> bytes:
        self._sequence = (self._sequence + 1) & 0xFFFF
        request = encode(Frame(kind, self._session, self._sequence, payload))
        end = time.monotonic() + patience
        try:
            while time.monotonic() < end:
                self._write(request)
                answer = self._answer(kind, min(end, time.monotonic() + wait))
                if answer is not None:
                    return self._read(answer)
                self.counts.resent += 1
                wait = min(2 * wait, longest)
        except Broken as error:
            self.close()
            self.counts.lost += 1
            raise Lost(str(error)) from error
        self.counts.lost += 1
        self.close()
        raise Lost(f"no answer in {patience:g} s")

    def _write(self, data: bytes) -> None:
        if self._stream is None:
            raise Broken("not connected")
        self.counts.frames += 1
        self._stream.write(data)

    def _answer(self, kind: FrameKind, until: float) -> Frame | None:
        """The answer to the request at work; None: it is time to send it again."""
        while True:
            again = False
            data = self._stream.read(until - time.monotonic()) if self._stream is not None else b""
            for frame in self._reader.feed(data):
                if frame is None:
                    self.counts.damaged += 1
                    again = True
                elif self._is_answer(frame, kind):
                    return frame
                elif frame.kind == FrameKind.BEACON and kind != FrameKind.HELLO:
                    self.counts.restarts += 1
                    raise Lost("the board has started anew")
                elif frame.kind in (FrameKind.AGAIN, FrameKind.BEACON):
                    again = True
            if again or time.monotonic() >= until:
                return None

    def _is_answer(self, frame: Frame, kind: FrameKind) -> bool:
        return (frame.kind, frame.session, frame.sequence) == (
            kind | FrameKind.ANSWER,
            self._session,
            self._sequence,
        )

    def _read(self, answer: Frame) -> bytes:
        if answer.status == Status.DONE:
            return answer.payload
        if answer.status == Status.SESSION:
            self.counts.restarts += 1
            raise Lost("the board has started anew")
        if answer.status == Status.ENGINE and len(answer.payload) == _ENGINE.size:
            raise BoardRefused(
                f"the board refused it: {_engine_reason(*_ENGINE.unpack(answer.payload))}",
                field="board",
            )
        kind = FrameKind(answer.kind & ~FrameKind.ANSWER).name
        reason = _REASONS.get(answer.status, f"status {answer.status}")
        raise BoardRefused(f"the board refused {kind}: {reason}", field="board")


def _engine_reason(code: int, op: int) -> str:
    where = "" if op == NONE else f" (operation {op})"
    return f"{REASONS[code] if code < len(REASONS) else f'code {code}'}{where}"

"""One board at work on jobs, whatever happens to the board or to the line.

The state of a job is its weights, its momentum and the number of steps done, and a step depends on
nothing else: a board that lost its power goes on from the last checkpoint, one that only lost its
gateway from where it is, and both end with the same bits as if nothing had happened.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from nestling.planning.descriptor import NONE
from nestling.tiny.link.frames import MOST_PAYLOAD, FrameKind
from nestling.tiny.link.line import BoardInfo, BoardLine, BoardRefused, Gone, Lost
from nestling.tiny.link.orders import Orders, orders_of
from nestling.tiny.link.transport import Noise, Noisy, Stream, open_stream
from nestling.tiny.runtime.job import Done, Job
from nestling.tiny.runtime.native import MOMENTUM, WEIGHTS

__all__ = ["BoardInfo", "BoardRefused", "Lost", "Session", "State", "connect", "first_state"]

_PLACE = struct.Struct("<2I")  # in front of what is loaded or written
_READ = struct.Struct("<3I")
_START = struct.Struct("<2I")
_STEP = struct.Struct("<I3H2B")
_PROGRESS = struct.Struct("<2IfI")
_SHIFTS, _TARGETS = 1, 2
_MOST_SAMPLES = 32  # in one frame, so that a slow board gives a sign of life
_MOST_LOSSES_OF_A_BOARD = 20  # in a row without a step done: then it is not bad luck


@dataclass(frozen=True, eq=False)
class State:
    """Where a job is after `step` steps. `later`: losses of steps that were done after that."""

    step: int
    weights: np.ndarray
    momentum: np.ndarray | None
    loss: float
    later: tuple[float, ...] = ()


@dataclass
class Notes:
    """What the jobs so far cost. ticks: of the board's own counter, over all samples. stack,
    region, used: bytes of RAM."""

    ticks: int = 0
    restored: int = 0
    loads: int = 0
    checkpoints: int = 0
    stack: int = 0
    region: int = 0
    used: int = 0


@dataclass
class _Progress:
    """The last state that is safe, and how far the losses are known beyond it."""

    state: State
    done: int
    loss: float

    @classmethod
    def of(cls, state: State) -> _Progress:
        loss = state.loss
        for value in state.later:
            loss += value
        return cls(replace(state, later=()), state.step + len(state.later), loss)

    def back(self) -> None:
        self.done, self.loss = self.state.step, self.state.loss


def connect(address: str, noise: Noise | None = None) -> Callable[[], Stream]:
    """Opens the stream at an address (see `transport`), with faults if they are wanted."""

    opened = itertools.count()  # the same faults again after every loss might lose it for ever

    def fresh() -> Stream:
        stream = open_stream(address)
        return Noisy(stream, noise, next(opened)) if noise else stream

    return fresh


@dataclass
class Session:
    """Speaks to one board.

    every: steps between two checkpoints (0: none). on_lost: told why, whenever the board is lost
           and looked for again.
    """

    line: BoardLine
    every: int = 0
    on_lost: Callable[[str], None] | None = None
    notes: Notes = field(default_factory=Notes)
    _pace: float | None = None  # seconds that a sample takes; a slow one is remembered for a while

    def hello(self) -> BoardInfo:
        """The board's state; waits for a board that is not there yet."""
        info = self.line.hello()
        self.notes.stack, self.notes.region = info.stack, info.region
        return info

    def close(self) -> None:
        """Closes the line to the board."""
        self.line.close()

    def run(
        self,
        job: Job | Orders,
        checkpoint: Callable[[State], None] | None = None,
        resume: State | None = None,
        on_step: Callable[[int, float], None] | None = None,
    ) -> Done:
        """Does a job, from `resume` on if it is given. Raises `Refused`, or `Lost` when the board
        does not come back.

        checkpoint: given every checkpoint. on_step: told the number and the loss of every step
                    before the next one is begun.
        """
        orders = job if isinstance(job, Orders) else orders_of(job)
        work = _Work(self, orders, _Progress.of(resume or first_state(orders)), checkpoint, on_step)
        tries, before = 0, -1
        while True:
            try:
                return work.go()
            except Gone:  # noqa: PERF203 (a lost board is tried again)
                raise
            except Lost as error:
                if self.on_lost is not None:
                    self.on_lost(str(error))
                tries = tries + 1 if work.progress.done == before else 0
                before = work.progress.done
                if tries >= _MOST_LOSSES_OF_A_BOARD:
                    raise Gone(
                        f"the board was lost {tries} times at step {before + 1}: {error}"
                    ) from error

    def read(self, block: int, size: int) -> bytes:
        """`size` bytes of a block of the board's arena."""
        parts = []
        for place in range(0, size, MOST_PAYLOAD):
            count = min(MOST_PAYLOAD, size - place)
            part = self.line.ask(FrameKind.READ, _READ.pack(block, place, count))
            if len(part) != count:
                raise BoardRefused(f"the board gave {len(part)} bytes of {count}", field="board")
            parts.append(part)
        return b"".join(parts)

    def write(self, block: int, data: bytes) -> None:
        """Fills a block of the board's arena from its start."""
        room = MOST_PAYLOAD - _PLACE.size
        for place in range(0, len(data), room):
            self.line.ask(FrameKind.WRITE, _PLACE.pack(block, place) + data[place : place + room])

    def load(self, descriptor: bytes) -> None:
        """Gives the board a plan."""
        room = MOST_PAYLOAD - _PLACE.size
        for place in range(0, len(descriptor), room):
            self.line.ask(
                FrameKind.LOAD,
                _PLACE.pack(place, len(descriptor)) + descriptor[place : place + room],
            )
        self.notes.loads += 1

    def train(self, request: bytes, samples: int) -> bytes:
        """The answer to a STEP of so many samples, for which the time is granted that they have
        needed so far."""
        extra = samples * (self.line.timing.sample if self._pace is None else 4 * self._pace)
        begun, resent = time.monotonic(), self.line.counts.resent
        answer = self.line.ask(FrameKind.STEP, request, extra)
        if self.line.counts.resent == resent:  # else it is not the board that needed the time
            pace = (time.monotonic() - begun) / samples
            self._pace = pace if self._pace is None else max(pace, 0.9 * self._pace)
        if len(answer) != _PROGRESS.size:
            raise BoardRefused(f"the board answered a step with {len(answer)} bytes", field="board")
        return answer


@dataclass
class _Work:
    """One job on one board."""

    session: Session
    orders: Orders
    progress: _Progress
    checkpoint: Callable[[State], None] | None
    on_step: Callable[[int, float], None] | None

    def go(self) -> Done:
        """Runs the job to its end, if the board stays."""
        info = self.session.hello()
        self._check(info)
        first = info.samples if self._goes_on(info) else self._restore(info)
        for index in range(self.progress.done, len(self.orders.sizes)):
            self._step(index, first)
            first = 0
            self._keep(index + 1)
        return Done(
            self._weights(), self.progress.loss, len(self.orders.sizes), len(self.orders.rows)
        )

    def _check(self, info: BoardInfo) -> None:
        needed = len(self.orders.descriptor) + self.orders.header.arena
        self.session.notes.used = needed
        if not info.has_data:
            raise BoardRefused(
                "the board has no readable data",
                field="board",
                fix="write the client's data to its flash",
            )
        if needed > info.region:
            fix = "a smaller view, a frozen prefix, or plain SGD"
            raise BoardRefused(
                f"the plan needs {needed} bytes of RAM, the board has {info.region} for it",
                field="board",
                fix=fix,
            )

    def _goes_on(self, info: BoardInfo) -> bool:
        """Whether the board is at work on this very job, no further than one step beyond the losses
        that are known."""
        if not info.ready or info.job != self.orders.number or info.plan != self._plan_crc():
            return False
        ahead = info.steps - self.progress.done
        if ahead == 1 and info.samples == 0:
            # Its last answer was lost: the board still has it.
            self._step(
                self.progress.done, int(self.orders.sizes[self.progress.done]), ask_only=True
            )
            return True
        return ahead == 0

    def _plan_crc(self) -> int:
        return int.from_bytes(self.orders.descriptor[12:16].tobytes(), "little")

    def _restore(self, info: BoardInfo) -> int:
        """Brings the board to the last safe state."""
        self.progress.back()
        state, orders, session = self.progress.state, self.orders, self.session
        if not info.loaded or info.plan != self._plan_crc():
            session.load(orders.descriptor.tobytes())
        session.line.ask(
            FrameKind.BEGIN, struct.pack("<I", orders.number) + orders.settings.tobytes()
        )
        for block, values in (*orders.blocks, (WEIGHTS, state.weights), (MOMENTUM, state.momentum)):
            if values is not None:
                session.write(block, values.tobytes())
        session.line.ask(FrameKind.START, _START.pack(orders.number, state.step))
        session.notes.restored += state.step > 0
        return 0

    def _step(self, index: int, first: int, *, ask_only: bool = False) -> None:
        """One step from its sample `first` on; `ask_only`: the board has done it, and only the
        answer is wanted."""
        size = int(self.orders.sizes[index])
        room = self._room()
        loss = 0.0
        if ask_only:
            first = max(0, size - room)
        while first < size:
            count = min(room, size - first)
            steps, samples, loss, ticks = _PROGRESS.unpack(
                self.session.train(self._samples(index, first, count), count)
            )
            if steps + (samples > 0) != index + 1:
                raise Lost(f"the board is at step {steps} and not at {index + 1}")
            self.session.notes.ticks += ticks
            first += count
        self.progress.done = index + 1
        self.progress.loss += loss
        if self.on_step is not None:
            self.on_step(index + 1, loss)

    def _room(self) -> int:
        """Samples that go into one frame."""
        each = 2 + (2 if self.orders.shifts is not None else 0)
        if self.orders.targets is not None:
            each += 4 * self.orders.header.classes
        room = (MOST_PAYLOAD - _STEP.size - 2) // each
        if room < 1:
            raise BoardRefused(
                f"targets of {self.orders.header.classes} classes do not go into a frame",
                field="targets",
                fix="train on labels",
            )
        return min(_MOST_SAMPLES, room)

    def _samples(self, index: int, first: int, count: int) -> bytes:
        orders = self.orders
        start = int(orders.starts[index]) + first
        rows = orders.rows[start : start + count]
        flags = (_SHIFTS if orders.shifts is not None else 0) | (
            _TARGETS if orders.targets is not None else 0
        )
        data = (
            _STEP.pack(
                index + 1, int(orders.sizes[index]), first, int(orders.inner[index]), count, flags
            )
            + rows.tobytes()
        )
        if orders.shifts is not None:
            data += orders.shifts[start : start + count].tobytes()
        if orders.targets is not None:
            data += bytes(-len(data) % 4) + orders.targets[rows].tobytes()
        return data

    def _keep(self, step: int) -> None:
        """A checkpoint, where one is due. The end needs none: the result is read there."""
        if not self.session.every or step % self.session.every or step == len(self.orders.sizes):
            return
        momentum = (
            self._floats(MOMENTUM, self.orders.header.trained)
            if self.orders.header.momentum != NONE
            else None
        )
        state = State(step, self._weights(), momentum, self.progress.loss)
        self.session.notes.checkpoints += 1
        if self.checkpoint is not None:
            self.checkpoint(state)
        self.progress.state = state

    def _weights(self) -> np.ndarray:
        return self._floats(WEIGHTS, self.orders.header.params)

    def _floats(self, block: int, count: int) -> np.ndarray:
        return np.frombuffer(self.session.read(block, 4 * count), "<f4").astype(np.float32)


def first_state(orders: Orders) -> State:
    """Where a job begins."""
    return State(0, orders.weights, None, 0.0)

"""The gateway's notes on disk: for each board the job that it is at work on, and how far it is.

A checkpoint is one file, whole or not there, and on disk before anything relies on it. The losses
of the steps after it are appended to a second one, which may end anywhere. A new job of a board
replaces the old one's files.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nestling.errors import InputError
from nestling.files import write_atomic
from nestling.tiny.link import bundle
from nestling.tiny.link.session import State
from nestling.tiny.runtime.job import Done

_RECORD = struct.Struct("<2IfI")  # job, step, loss, CRC-32 of these


@dataclass(frozen=True, eq=False)
class Found:
    """What is known of a job: its result, or where to go on."""

    done: Done | None = None
    state: State | None = None


@dataclass(frozen=True)
class JournalEntry:
    """The notes on one job of one board. `data`: CRC of the board's data, since the result depends
    on it as much as on the job."""

    folder: Path
    board: str
    digest: str
    data: int

    def find(self) -> Found:
        """What was noted of this job, if anything; damaged notes are none."""
        try:
            facts, arrays = bundle.unpack(self._checkpoint.read_bytes())
            if (facts["digest"], facts["data"]) != (self.digest, self.data):
                return Found()
            _check(facts, arrays)
            if facts["finished"]:
                return Found(
                    done=Done(arrays["weights"], facts["loss"], facts["step"], facts["samples"])
                )
            state = State(facts["step"], arrays["weights"], arrays.get("momentum"), facts["loss"])
        except (OSError, InputError, KeyError):
            return Found()
        return Found(
            state=State(
                state.step,
                state.weights,
                state.momentum,
                state.loss,
                self._losses_after(state.step),
            )
        )

    def begin(self, state: State) -> None:
        """Notes a job that is new: whatever was there of an older one is gone."""
        self._later.unlink(missing_ok=True)
        self.checkpoint(state)

    def checkpoint(self, state: State) -> None:
        """Notes a state, and only then forgets the losses before it."""
        arrays = {"weights": state.weights} | (
            {} if state.momentum is None else {"momentum": state.momentum}
        )
        self._write({"finished": False, "step": state.step, "loss": state.loss}, arrays)
        self._later.write_bytes(b"")

    def step(self, step: int, loss: float) -> None:
        """Notes the loss of a step. Not flushed to disk: it only saves work if the gateway alone
        dies."""
        record = _RECORD.pack(self._number, step, loss, 0)[:-4]
        with open(self._later, "ab") as file:
            file.write(record + struct.pack("<I", zlib.crc32(record)))

    def finish(self, done: Done) -> None:
        """Notes the result, so that whoever asks again is answered without doing it again."""
        self._write(
            {"finished": True, "step": done.steps, "loss": done.loss, "samples": done.samples},
            {"weights": done.weights},
        )
        self._later.unlink(missing_ok=True)

    @property
    def _number(self) -> int:
        return int(self.digest[:8], 16)

    @property
    def _checkpoint(self) -> Path:
        return self.folder / f"{self.board}.job"

    @property
    def _later(self) -> Path:
        return self.folder / f"{self.board}.losses"

    def _write(self, facts: dict[str, object], arrays: dict[str, np.ndarray]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(
            self._checkpoint,
            bundle.pack({"digest": self.digest, "data": self.data, **facts}, arrays),
        )

    def _losses_after(self, step: int) -> tuple[float, ...]:
        """The losses of the steps step+1, step+2, … as far as they were noted."""
        try:
            raw = self._later.read_bytes()
        except OSError:
            return ()
        found: list[float] = []
        for place in range(0, len(raw) - _RECORD.size + 1, _RECORD.size):
            number, at, loss, crc = _RECORD.unpack_from(raw, place)
            if crc != zlib.crc32(raw[place : place + _RECORD.size - 4]) or number != self._number:
                continue
            if at == step + len(found) + 1:
                found.append(loss)
        return tuple(found)


def _check(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Refuses notes of other types than `JournalEntry` writes."""
    whole = [facts["step"], facts["samples"] if facts["finished"] else 0]
    if (
        any(type(number) is not int for number in whole)
        or type(facts["loss"]) is not float
        or any(array.dtype != np.float32 for array in arrays.values())
    ):
        raise InputError("notes of other types than a journal's")

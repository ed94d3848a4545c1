"""A gateway killed at any step of its notes: what it finds again is a state that was, no older than
what it had noted."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from nestling.tiny.link.journal import JournalEntry
from nestling.tiny.link.session import State
from nestling.tiny.runtime.job import Done
from tests.runs.crash_points import Steps, in_child

LOSSES = tuple(1 / 2**step for step in range(1, 7))
CHECKPOINTS = (0, 3)
DONE = len(LOSSES)


def weights(step: int) -> np.ndarray:
    return np.full(4, step, np.float32)


def noted(entry: JournalEntry) -> None:
    """A job of six steps with a checkpoint after three."""
    entry.begin(State(0, weights(0), None, 0.0))
    for step, loss in enumerate(LOSSES, start=1):
        entry.step(step, loss)
        if step in CHECKPOINTS:
            entry.checkpoint(State(step, weights(step), weights(step), sum(LOSSES[:step])))
    entry.finish(Done(weights(DONE), sum(LOSSES), DONE, 60))


def found(entry: JournalEntry) -> int:
    """How far the notes say the job is (-1: nowhere), each of them checked."""
    known = entry.find()
    if known.done is not None:
        assert known.done.weights.tolist() == weights(DONE).tolist()
        return DONE + 1
    if known.state is None:
        return -1
    step, later = known.state.step, known.state.later
    assert step in CHECKPOINTS and known.state.weights.tolist() == weights(step).tolist()
    assert later == LOSSES[step : step + len(later)]
    return step + len(later)


def test_a_gateway_killed_at_any_step_of_its_notes_finds_them_again(tmp_path: Path) -> None:
    reached, point = [-1], 0
    while True:
        point += 1
        entry = JournalEntry(tmp_path / str(point), "kitchen", "ab" * 32, 7)

        def killed(entry: JournalEntry = entry, point: int = point) -> None:
            Steps(tmp_path, point).watch()
            noted(entry)

        if in_child(killed):
            break
        reached.append(found(entry))
    assert found(entry) == DONE + 1
    assert reached == sorted(reached) and set(reached) == set(range(-1, DONE + 2))
    assert point > 50

"""The cells of a sweep, played: one after another in this process, or several at once, each in a
process of its own."""

from __future__ import annotations

import copy
import fcntl
import json
import multiprocessing as mp
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from nestling.engines import choose_where
from nestling.engines.pool import cores, main_script_hidden
from nestling.errors import InputError
from nestling.experiment import Experiment
from nestling.report.notebook_line import SweepLine, in_notebook
from nestling.runs.cell import play_cell, rounds_done
from nestling.runs.logged import logged
from nestling.runs.pictured import picture
from nestling.runs.run import Watcher
from nestling.schema import require

PATIENCE = 30.0
"""Seconds that a sweep waits for the processes of a killed one to be gone."""
ROOM = 1.5e9
"""Bytes of free memory for each run at once: Python with torch, networks, and data of common
sizes."""


@dataclass(frozen=True)
class SweepCell:
    """One run of a sweep: its name, which its folder has too, and its experiment."""

    name: str
    experiment: Experiment


@dataclass
class SweepWatcher:
    """What wants to hear of a sweep: each may be replaced."""

    # the names of all cells, how many rounds each has, and how many of them are done
    started: Callable[[Mapping[str, tuple[int, int]]], None] = lambda _: None
    round: Callable[[str, dict[str, Any]], None] = lambda *_: None
    # a cell's name, and why it failed (empty where it did not)
    ended: Callable[[str, str], None] = lambda *_: None
    note: Callable[[str], None] = lambda _: None
    stop: Callable[[], bool] = lambda: False


@contextmanager
def sweep_heard(watcher: SweepWatcher | None) -> Iterator[SweepWatcher]:
    """As `heard` for a run: what was given, in a notebook a line, elsewhere nothing."""
    if watcher is not None:
        yield watcher
    elif in_notebook():
        line = SweepLine()
        try:
            yield SweepWatcher(started=line.started, round=line.round, ended=line.cell)
        finally:
            line.ended()
    else:
        yield SweepWatcher()


def room(cells: Sequence[SweepCell]) -> int:
    """How many of these can be played at once: one on a GPU, where a run fills the device, and
    where an engine of several processes was asked for; else one a core, as far as the memory
    goes."""
    if not cells:
        return 1
    for cell in cells:
        engine = cell.experiment.engine
        where = choose_where(engine.name, engine.device, engine.precision)
        if where.device.type != "cpu" or engine.name not in ("auto", "inline"):
            return 1
        if not _portable(cell.experiment):
            return 1
    return max(1, min(len(cells), cores(), int(_free_memory() // ROOM)))


def play_cells(
    cells: Sequence[SweepCell],
    runs: Path,
    jobs: int,
    told: SweepWatcher,
    log: tuple[str, ...] = (),
) -> dict[str, str]:
    """Plays cells, whose rounds the loggers of these names hear too; gives why some failed."""
    require(jobs >= 1, "must be at least 1 (0: as there is room)", "--jobs")
    if jobs == 1:
        return _play_here(cells, runs, told, log)
    for cell in cells:
        require(
            _portable(cell.experiment),
            "what a script defines itself cannot be sent to another process",
            "--jobs",
            "give 1, or put the method or network into a module",
        )
    return _play_beside(cells, runs, jobs, told, log)


def _play_here(
    cells: Sequence[SweepCell], runs: Path, told: SweepWatcher, log: tuple[str, ...]
) -> dict[str, str]:
    failures = {}
    for cell in cells:
        if told.stop():
            break
        watcher = Watcher(
            round=lambda row, name=cell.name: told.round(name, row),  # type: ignore[misc]
            note=told.note,
            stop=told.stop,
        )
        why = _play_one(cell, runs, watcher, log)
        if why:
            failures[cell.name] = why
        told.ended(cell.name, why)
    return failures


def _play_one(cell: SweepCell, runs: Path, watcher: Watcher, log: tuple[str, ...]) -> str:
    """Plays a cell; gives why it failed, if it did."""
    # what a run does to a network that was given as an object must not reach the next run
    experiment = cell.experiment
    if experiment.own_model is not None:
        experiment = experiment.with_changes(model=copy.deepcopy(experiment.own_model))
    try:
        with logged(watcher, log, runs / cell.name) as hearing:
            play_cell(
                experiment,
                runs / cell.name,
                hearing,
                overrides=_how_played(experiment),
                field="--out",
            )
        if rounds_done(runs / cell.name) >= experiment.rounds:  # and not stopped before
            picture(runs / cell.name)
    except InputError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _how_played(experiment: Experiment) -> tuple[str, ...]:
    """What a run that goes on takes from the sweep: its length, its engine, and its data file."""
    path = experiment.data.path
    return (
        f"rounds={experiment.rounds}",
        f"engine.name={experiment.engine.name}",
        *((f"data.path={json.dumps(path)}",) if path else ()),
    )


# -- several at once -------------------------------------------------------------------------------


def _play_beside(
    cells: Sequence[SweepCell], runs: Path, jobs: int, told: SweepWatcher, log: tuple[str, ...]
) -> dict[str, str]:
    """Plays cells in `jobs` processes, each of which plays one after another."""
    waiting, failures = deque(cells), dict[str, str]()
    hands = [_Hand(runs, log) for _ in range(min(jobs, len(cells)))]

    def ended(hand: _Hand, why: str) -> None:
        if why:
            failures[hand.cell] = why
        told.ended(hand.cell, why)
        hand.cell = ""

    try:
        while waiting or any(hand.cell for hand in hands):
            for hand in hands:
                if waiting and not hand.cell:
                    hand.give(waiting.popleft())
            ready = wait([hand.line for hand in hands], timeout=0.1)
            for place, hand in enumerate(hands):
                word: tuple[str, Any] = hand.heard() if hand.line in ready else ("", None)
                kind, value = word
                if kind == "round":
                    told.round(hand.cell, value)
                elif kind == "note":
                    told.note(value)
                elif kind == "ended":
                    ended(hand, value)
                elif kind == "gone":
                    if hand.cell:
                        ended(hand, f"its process died (exit code {hand.process.exitcode})")
                    hands[place] = _Hand(runs, log)
            if told.stop():
                waiting.clear()
                for hand in hands:
                    hand.halt()
    finally:
        for hand in hands:
            hand.end()
    return failures


class _Hand:
    """A process that plays cells, the name of the one that it plays, and a line to it. Every
    process has a line of its own: nothing is shared that one which dies could leave locked."""

    def __init__(self, runs: Path, log: tuple[str, ...]) -> None:
        context = mp.get_context("spawn")
        self.line, theirs = context.Pipe()
        self.cell, self.halted = "", False
        self.process = context.Process(target=_serve, args=(theirs, runs, log))
        with main_script_hidden(), _ctrl_c_withheld():
            self.process.start()
        theirs.close()

    def give(self, cell: SweepCell) -> None:
        # every core has a run already
        engine = cell.experiment.engine
        if engine.name == "auto":
            alone = replace(engine, name="inline")
            cell = replace(cell, experiment=cell.experiment.with_changes(engine=alone))
        self.cell = cell.name
        self._say(cell)

    def halt(self) -> None:
        if self.cell and not self.halted:
            self.halted = True
            self._say(None)

    def heard(self) -> tuple[str, Any]:
        try:
            return self.line.recv()
        except (EOFError, OSError):
            self.process.join()
            return "gone", None

    def end(self) -> None:
        self.line.close()
        if self.cell:
            self.process.kill()  # nobody waits for what it does
        self.process.join()

    def _say(self, what: SweepCell | None) -> None:
        with suppress(OSError):  # that it is gone is heard soon
            self.line.send(what)


def _serve(line: Any, runs: Path, log: tuple[str, ...]) -> None:
    """A process that plays cells until nobody gives it any; None in their place ends the one under
    way after its round."""
    _end_with_parent()
    _share(runs.parent)
    watcher = Watcher(
        round=lambda row: line.send(("round", row)),
        note=lambda text: line.send(("note", text)),
        stop=line.poll,
    )
    with suppress(EOFError, OSError):
        while True:
            cell = line.recv()
            if cell is not None:
                line.send(("ended", _play_one(cell, runs, watcher, log)))


@contextmanager
def _ctrl_c_withheld() -> Iterator[None]:
    """Ctrl-C belongs to the main process, which hears it after the block. Processes that are
    started here never do: on a terminal it reaches all of them, even those that are not yet far
    enough to ignore it themselves."""
    resource_tracker.ensure_running()  # would let ctrl-C through again if the block started it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def taken(out: Path) -> Iterator[None]:
    """The folder is this sweep's while the block lasts. Processes of one that was killed need a
    moment to notice it: so long it waits."""
    lock = os.open(out, os.O_RDONLY)
    try:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > until:
                    raise InputError(
                        f"another sweep is running in {out}",
                        field="--out",
                        fix="wait for it, or stop it",
                    ) from None
                time.sleep(0.05)
        # shared from here on with the processes of its own cells
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield
    finally:
        os.close(lock)


def _share(out: Path) -> None:
    """Holds a sweep's folder for as long as this process lives."""
    fcntl.flock(os.open(out, os.O_RDONLY), fcntl.LOCK_SH)


def _end_with_parent() -> None:
    """Ends this process when the one that started it is gone, so that none is left that holds a
    run folder; a run that ends like this goes on from its checkpoint."""
    parent = mp.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _portable(experiment: Experiment) -> bool:
    own = (experiment.own_method, experiment.own_model)
    return not any(type(given).__module__ == "__main__" for given in own if given is not None)


def _free_memory() -> float:
    """Bytes that new processes may take, as far as the system says."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / 2
    except (OSError, ValueError):
        return ROOM

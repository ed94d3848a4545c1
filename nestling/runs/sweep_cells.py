"""The cells of a sweep, played: one after another in this process, or several at once, each in a
process of its own."""

from __future__ import annotations

import copy
import fcntl
import json
import multiprocessing as mp
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from nestling.engines import choose_where
from nestling.engines.pool import cores, main_script_hidden
from nestling.errors import InputError
from nestling.experiment import Experiment
from nestling.runs.cell import play_cell
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
    cells: Sequence[SweepCell], runs: Path, jobs: int, told: SweepWatcher
) -> dict[str, str]:
    """Plays cells; gives why some failed."""
    require(jobs >= 1, "must be at least 1 (0: as there is room)", "--jobs")
    if jobs == 1:
        return _play_here(cells, runs, told)
    for cell in cells:
        require(
            _portable(cell.experiment),
            "what a script defines itself cannot be sent to another process",
            "--jobs",
            "give 1, or put the method or network into a module",
        )
    return _play_beside(cells, runs, jobs, told)


def _play_here(cells: Sequence[SweepCell], runs: Path, told: SweepWatcher) -> dict[str, str]:
    failures = {}
    for cell in cells:
        if told.stop():
            break
        watcher = Watcher(
            round=lambda row, name=cell.name: told.round(name, row),  # type: ignore[misc]
            note=told.note,
            stop=told.stop,
        )
        why = _play_one(cell, runs, watcher)
        if why:
            failures[cell.name] = why
        told.ended(cell.name, why)
    return failures


def _play_one(cell: SweepCell, runs: Path, watcher: Watcher) -> str:
    """Plays a cell; gives why it failed, if it did."""
    # what a run does to a network that was given as an object must not reach the next run
    experiment = cell.experiment
    if experiment.own_model is not None:
        experiment = experiment.with_changes(model=copy.deepcopy(experiment.own_model))
    try:
        play_cell(
            experiment,
            runs / cell.name,
            watcher,
            overrides=_how_played(experiment),
            field="--out",
        )
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
    cells: Sequence[SweepCell], runs: Path, jobs: int, told: SweepWatcher
) -> dict[str, str]:
    """Plays cells in processes of their own, `jobs` at once."""
    context = mp.get_context("spawn")
    events: Any = context.Queue()
    halt = context.Event()
    waiting, running, failures = deque(cells), dict[str, Any](), dict[str, str]()

    def ended(name: str, why: str) -> None:
        running.pop(name).join()
        if why:
            failures[name] = why
        told.ended(name, why)

    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.popleft()
                running[cell.name] = _started(context, cell, runs, events, halt)
            for kind, name, value in _heard(events):
                if kind == "round":
                    told.round(name, value)
                elif kind == "note":
                    told.note(value)
                elif name in running:
                    ended(name, value)
            for name, process in list(running.items()):
                # a queue may still hold what a process said before it ended well
                if process.exitcode:
                    ended(name, f"its process died (exit code {process.exitcode})")
            if told.stop():
                halt.set()
                waiting.clear()
    finally:
        for process in running.values():
            process.kill()
            process.join()
    return failures


def _started(context: Any, cell: SweepCell, runs: Path, events: Any, halt: Any) -> Any:
    # every core has a run already
    engine = cell.experiment.engine
    if engine.name == "auto":
        alone = replace(engine, name="inline")
        cell = replace(cell, experiment=cell.experiment.with_changes(engine=alone))
    process = context.Process(target=_serve, args=(cell, runs, events, halt))
    with main_script_hidden():
        process.start()
    return process


def _heard(events: Any) -> Iterator[tuple[str, str, Any]]:
    """What processes said, waiting a moment for the first word."""
    with_patience = 0.1
    while True:
        try:
            yield events.get(timeout=with_patience)
        except queue.Empty:
            return
        with_patience = 0.0


def _serve(cell: SweepCell, runs: Path, events: Any, halt: Any) -> None:
    """The process of one cell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C belongs to the main process
    _end_with_parent()
    _share(runs.parent)
    watcher = Watcher(
        round=lambda row: events.put(("round", cell.name, row)),
        note=lambda text: events.put(("note", cell.name, text)),
        stop=halt.is_set,
    )
    events.put(("ended", cell.name, _play_one(cell, runs, watcher)))


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

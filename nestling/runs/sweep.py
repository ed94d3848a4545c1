"""A sweep: methods × seeds × any settings, each a run in a folder of its own.

The folder of a sweep holds sweep.json (what it is made of), runs/ (a run folder for every cell, and
beside each the experiment that was asked for) and, at the end, its table in every format. The same
call goes on where a sweep stood: cells that are done are left alone, one that was cut off goes on
from its checkpoint, so that the finished table is that of an undisturbed one. A sweep may grow:
with more methods, seeds or values the new cells are played, and the old ones count.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import itertools
import json
import multiprocessing as mp
import os
import queue
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from nestling.engines import choose_where
from nestling.engines.pool import cores, main_script_hidden
from nestling.errors import InputError, unknown
from nestling.experiment import Experiment, Named, overridden
from nestling.files import check_place, read_toml, write_atomic, writing
from nestling.methods import Method
from nestling.report.compare import FORMATS, Comparison, compare
from nestling.runfiles import METRICS, SWEEP, object_in
from nestling.runs.cell import check_cell, play_cell, rounds_done
from nestling.runs.data_file import with_whole_path
from nestling.runs.run import Watcher
from nestling.schema import require, to_table

TABLE = "table"
"""The name of the files that hold the table, without what says their format."""
_NOT_VARIED = ("seed", "rounds", "engine")
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


@dataclass(frozen=True)
class Sweep:
    """What is swept over. `vary` maps dotted fields of an experiment to their values; without
    methods there is the base's own."""

    base: Experiment = field(default_factory=Experiment)
    methods: tuple[str | Named | Method, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    target: float | None = None

    def __post_init__(self) -> None:
        """Refuses axes that are empty, or that say the same thing twice."""
        require(bool(self.seeds), "there is no seed", "sweep.seeds", "give a number or a list")
        require(len(set(self.seeds)) == len(self.seeds), "a seed comes twice", "sweep.seeds")
        for name, values in self.vary.items():
            place = f"sweep.vary.{name}"
            is_list = isinstance(values, (list, tuple)) and bool(values)
            require(is_list, "must be a list of values", place, f'e.g. "{name}" = [0.1, 1.0]')
            if name in ("method", "method.name") or name.split(".")[0] in _NOT_VARIED:
                raise InputError(
                    "cannot be swept over here",
                    field=place,
                    fix="methods and seeds have axes of their own; rounds and engine are for all",
                )

    @property
    def studied(self) -> tuple[str, ...]:
        """The fields that differ between cells, seeds aside."""
        several = len(self.methods) > 1
        return (*(("method",) if several else ()), *(n for n, v in self.vary.items() if len(v) > 1))

    def cells(self) -> list[SweepCell]:
        """Every cell, checked: setting by setting, method by method, seed by seed."""
        base = with_whole_path(self.base)
        methods = self.methods or (base.own_method or base.method,)
        found, names = [], set[str]()
        for values in itertools.product(*self.vary.values()):
            changes = dict(zip(self.vary, values, strict=True))
            for method in methods:
                for seed in self.seeds:
                    name = _name(method, changes, seed)
                    require(name not in names, f"{name} comes twice", "sweep")
                    names.add(name)
                    found.append(SweepCell(name, _experiment(base, method, changes, seed)))
        return found


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


def read_sweep(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
    vary: Mapping[str, Sequence[Any]] | None = None,
    target: float | None = None,
) -> Sweep:
    """A sweep from an experiment's file, which may have a table [sweep] with methods, seeds, target
    and vary; what is given beside it counts instead."""
    table = read_toml(path) if path is not None else {}
    own = table.pop("sweep", {})
    if not isinstance(own, Mapping):
        raise InputError("expected a table", field="sweep")
    known = ("methods", "seeds", "target", "vary")
    for key in own:
        if key not in known:
            raise unknown("field", key, known, field=f"sweep.{key}")
    beside = Path(path).parent if path is not None else None
    base = Experiment.from_parts(table, overrides, beside)
    varied = own.get("vary", {})
    if not isinstance(varied, Mapping):
        raise InputError("expected a table of lists", field="sweep.vary")
    found = own.get("target")
    return Sweep(
        base,
        tuple(map(_method, methods or _listed(own, "methods"))),
        tuple(seeds) or seeds_of(own.get("seeds", 3), base.seed),
        {**varied, **(vary or {})},
        target if target is not None else None if found is None else float(found),
    )


def seeds_of(given: object, first: int = 0) -> tuple[int, ...]:
    """Seeds from a number of them or a list."""
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return tuple(range(first, first + given))
    if isinstance(given, (list, tuple)) and given and all(isinstance(s, int) for s in given):
        return tuple(given)
    raise InputError(
        f"{given!r} are no seeds", field="sweep.seeds", fix="give how many, or a list of them"
    )


def sweep(
    experiment: Experiment | None = None,
    *,
    out: str | Path,
    methods: Sequence[str | Named | Method] = (),
    seeds: int | Sequence[int] = 3,
    vary: Mapping[str, Sequence[Any]] | None = None,
    target: float | None = None,
    jobs: int = 0,
    watcher: SweepWatcher | None = None,
) -> Comparison:
    """Plays methods × seeds × settings into the folder `out`, and compares them; the same call goes
    on where it stood. `vary` maps fields to their values: {"split.alpha": [0.1, 1.0]}. `jobs` is
    how many runs are played at once (0: as many as there is room for). A cell that fails does not
    end the others; the comparison's cautions say why it failed."""
    base = experiment or Experiment()
    made = Sweep(
        base,
        tuple(methods),
        seeds_of(seeds if isinstance(seeds, int) else list(seeds), base.seed),
        dict(vary or {}),
        target,
    )
    return play_sweep(made, Path(out), jobs=jobs, watcher=watcher)


def play_sweep(
    made: Sweep, out: Path, *, jobs: int = 0, watcher: SweepWatcher | None = None
) -> Comparison:
    """Plays what is left of a sweep in its folder, and writes its table in every format."""
    told = watcher or SweepWatcher()
    cells = made.cells()
    runs = out / "runs"
    check_place(runs)
    for cell in cells:
        check_cell(cell.experiment, runs / cell.name, "--out")
    with writing(out):
        runs.mkdir(parents=True, exist_ok=True)
    with _taken(out):
        return _play_taken(made, cells, out, jobs, told)


def _play_taken(
    made: Sweep, cells: Sequence[SweepCell], out: Path, jobs: int, told: SweepWatcher
) -> Comparison:
    runs = out / "runs"
    _write_head(made, cells, out)
    left = [cell for cell in cells if _done(runs / cell.name) < cell.experiment.rounds]
    told.started({c.name: (c.experiment.rounds, _done(runs / c.name)) for c in cells})
    count = jobs or room(left)
    failures = _play(left, runs, count, told)
    if not any((runs / cell.name / METRICS).exists() for cell in cells):
        why = "; ".join(f"{name}: {text}" for name, text in failures.items())
        raise InputError(f"no run came to its first round: {why or 'stopped'}", field="sweep")
    found = compare(out)
    found.cautions.extend(f"{name} failed: {text}" for name, text in failures.items())
    for suffix in FORMATS:
        found.save(out / f"{TABLE}{suffix}")
    return found


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


def _play(cells: Sequence[SweepCell], runs: Path, jobs: int, told: SweepWatcher) -> dict[str, str]:
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
def _taken(out: Path) -> Iterator[None]:
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


# -- cells -----------------------------------------------------------------------------------------


def _experiment(
    base: Experiment, method: str | Named | Method, changes: Mapping[str, Any], seed: int
) -> Experiment:
    changed = base.with_changes(method=method, seed=seed)
    if not changes:
        return changed
    texts = [f"{name}={_toml(value)}" for name, value in changes.items()]
    table = overridden(changed.to_table(), texts)
    made = Experiment.from_table(table)
    # objects stay, unless what is varied is of theirs
    keep = {
        f"own_{kind}": getattr(changed, f"own_{kind}")
        for kind in ("method", "model")
        if not any(name.split(".")[0] == kind for name in changes)
    }
    for name, value in keep.items():
        object.__setattr__(made, name, value)
    return with_whole_path(made)


def _toml(value: Any) -> str:
    import tomli_w

    return tomli_w.dumps({"value": to_table(value)}).partition("=")[2].strip()


def _name(method: str | Named | Method, changes: Mapping[str, Any], seed: int) -> str:
    if isinstance(method, Method):
        title, options = type(method).__name__, to_table(method)
    else:
        named = method if isinstance(method, Named) else Named(method)
        title, options = named.name.rpartition(":")[2], named.options
    short = [title, *(_digest(options) for _ in [0] if options)]
    short += [f"{name.rpartition('.')[2]}{_value_name(value)}" for name, value in changes.items()]
    return "-".join([_slug(part) for part in short] + [f"seed{seed}"])


def _value_name(value: Any) -> str:
    text = str(value)
    return text if re.fullmatch(r"[\w.+-]{1,16}", text) else _digest(value)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def _slug(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text).strip("-") or "x"


def _method(given: object) -> str | Named:
    """A method as a file has it: its name, or a table of its name and options."""
    if isinstance(given, Mapping):
        return Named(str(given.get("name", "")), {k: v for k, v in given.items() if k != "name"})
    if not isinstance(given, str):
        raise InputError(f"{given!r} is no method", field="sweep.methods", fix="give names")
    return given


def _listed(table: Mapping[str, Any], key: str) -> list[Any]:
    found = table.get(key, [])
    if not isinstance(found, list):
        raise InputError("expected a list", field=f"sweep.{key}")
    return found


def _write_head(made: Sweep, cells: Sequence[SweepCell], out: Path) -> None:
    """Says in the folder what it holds; cells of an earlier call stay in the table."""
    before = object_in(out / SWEEP)
    names = [cell.name for cell in cells]
    old = [name for name in _strings(before, "cells") if name not in names]
    studied = dict.fromkeys([*_strings(before, "studied"), *made.studied])
    head = {"studied": list(studied), "target": made.target, "cells": [*old, *names]}
    with writing(out):
        write_atomic(out / SWEEP, json.dumps(head, indent=1) + "\n")


def _strings(table: Mapping[str, Any], key: str) -> list[str]:
    found = table.get(key)
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _done(folder: Path) -> int:
    """Rounds that need not be played again. Without its summary a run is not done, whatever its log
    says."""
    return rounds_done(folder) if folder.is_dir() else 0


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

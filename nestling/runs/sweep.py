"""A sweep: methods × seeds × any settings, each a run in a folder of its own.

The folder of a sweep holds sweep.json (what it is made of), runs/ (a run folder for every cell, and
beside each the experiment that was asked for) and, at the end, its table in every format. The same
call goes on where a sweep stood: cells that are done are left alone, one that was cut off goes on
from its checkpoint, so that the finished table is that of an undisturbed one. A sweep may grow:
with more methods, seeds or values the new cells are played, and the old ones count.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from pathlib import Path
from typing import Any

from nestling.errors import InputError, seen, unknown
from nestling.experiment import Experiment, Named, experiment_of
from nestling.files import check_place, path_in, read_toml, write_atomic, writing
from nestling.loggers import logger_of
from nestling.methods import ALIASES, Method
from nestling.report.compare import FORMATS, Comparison, compare
from nestling.runfiles import METRICS, NO_MATTER, SWEEP, object_in
from nestling.runs.cell import check_cell, rounds_done
from nestling.runs.data_file import with_whole_path
from nestling.runs.run import watcher_in
from nestling.runs.sweep_cells import (
    SweepCell,
    SweepWatcher,
    play_cells,
    room,
    sweep_heard,
    taken,
)
from nestling.schema import convert, one_or_more, require, to_table
from nestling.sections import SweepTable

TABLE = "table"
"""The name of the files that hold the table, without what says their format."""
MOST_SEEDS = 10_000
"""More of them are no sweep but a slip, or a file that is to fill the memory."""
_OWN_AXES = ("method", "method.name", "seed")
_SAME_FOR_ALL = ("engine", *(name for name in NO_MATTER if name.startswith("engine.")))
"""Where and how runs are carried out: in all of them the result is the same."""


@dataclass(frozen=True)
class Sweep:
    """What is swept over. `vary` maps dotted fields of an experiment to their values; without
    methods there is the base's own. Paths among the values may be `beside` the sweep's file."""

    base: Experiment = field(default_factory=Experiment)
    methods: tuple[str | Named | Method, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    target: float | None = None
    beside: Path | None = None

    def __post_init__(self) -> None:
        """Refuses axes that are empty, or that say the same thing twice."""
        for method in self.methods:
            if not isinstance(method, (str, Named, Method)):
                fix = "give names, Nameds or Method objects"
                raise InputError(f"{seen(method)} is no method", field="sweep.methods", fix=fix)
        require(bool(self.seeds), "there is no seed", "sweep.seeds", "give a number or a list")
        require(len(set(self.seeds)) == len(self.seeds), "a seed comes twice", "sweep.seeds")
        for name, values in self.vary.items():
            place = f"sweep.vary.{name}"
            is_list = isinstance(values, (list, tuple)) and bool(values)
            require(is_list, "must be a list of values", place, f'e.g. "{name}" = [0.1, 1.0]')
            if name in _OWN_AXES or name in _SAME_FOR_ALL:
                raise InputError(
                    "cannot be swept over here",
                    field=place,
                    fix="methods and seeds have axes of their own; of engine.* only precision and "
                    "transport change a result",
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
                    cell = _experiment(base, method, changes, seed, self.beside)
                    found.append(SweepCell(name, cell))
        return found


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
    known = [one.name for one in fields(SweepTable)]
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
        _share(target if target is not None else found),
        beside,
    )


def _share(target: object) -> float | None:
    """The score to reach; None where there is none."""
    if target is None or target == 0:
        return None
    if isinstance(target, bool) or not isinstance(target, (int, float)) or not 0 < target <= 1:
        raise InputError(
            f"a score in [0, 1] is wanted, not {target!r}", field="sweep.target", fix="e.g. 0.9"
        )
    return float(target)


def seeds_of(given: object, first: int = 0) -> tuple[int, ...]:
    """Seeds from a number of them or a list."""
    if isinstance(given, int) and not isinstance(given, bool) and 0 < given <= MOST_SEEDS:
        return tuple(range(first, first + given))
    if isinstance(given, Iterable) and not isinstance(given, str):
        found = tuple(given)
        if found and all(isinstance(seed, Integral) for seed in found):
            return tuple(map(int, found))
    raise InputError(
        f"{seen(given)} are no seeds", field="sweep.seeds", fix="give how many, or a list of them"
    )


def sweep(
    experiment: Experiment | None = None,
    *,
    out: str | Path,
    methods: str | Named | Method | Sequence[str | Named | Method] = (),
    seeds: int | Sequence[int] = 3,
    vary: Mapping[str, Sequence[Any]] | None = None,
    target: float | None = None,
    jobs: int = 0,
    watcher: SweepWatcher | None = None,
    log: str | Sequence[str] = (),
) -> Comparison:
    """Plays methods × seeds × settings into the folder `out`, and compares them; the same call goes
    on where it stood. `vary` maps fields to their values: {"split.alpha": [0.1, 1.0]}. `jobs` is
    how many runs are played at once (0: as many as there is room for), `log` where their rounds are
    logged beside their folders ("mlflow", "wandb"). A cell that fails does not end the others; the
    comparison's cautions say why it failed. In a notebook one line shows how it stands, unless a
    watcher is given; `SweepWatcher()` shows nothing."""
    base = experiment_of(experiment)
    made = Sweep(
        base,
        one_or_more(methods, "methods", (str, Named, Method)),
        seeds_of(seeds, base.seed),
        convert(dict, vary or {}, "vary"),
        _share(target),
    )
    jobs = convert(int, jobs, "jobs")
    place, logs = path_in(out, "out"), one_or_more(log, "log")
    return play_sweep(made, place, jobs=jobs, watcher=watcher, log=logs)


def play_sweep(
    made: Sweep,
    out: Path,
    *,
    jobs: int = 0,
    watcher: SweepWatcher | None = None,
    log: tuple[str, ...] = (),
) -> Comparison:
    """Plays what is left of a sweep in its folder, and writes its table in every format."""
    require(jobs >= 0, "must not be negative (0: as there is room)", "--jobs")
    if watcher is not None:
        watcher_in(watcher, SweepWatcher)
    for name in log:
        logger_of(name)  # refused here, not in every cell
    cells = made.cells()
    runs = out / "runs"
    check_place(runs)
    for cell in cells:
        check_cell(cell.experiment, runs / cell.name, "--out")
    with writing(out):
        runs.mkdir(parents=True, exist_ok=True)
    with taken(out), sweep_heard(watcher) as told:
        return _play_taken(made, cells, out, jobs, told, log)


def _play_taken(
    made: Sweep,
    cells: Sequence[SweepCell],
    out: Path,
    jobs: int,
    told: SweepWatcher,
    log: tuple[str, ...],
) -> Comparison:
    runs = out / "runs"
    _write_head(made, cells, out)
    left = [cell for cell in cells if _done(runs / cell.name) < cell.experiment.rounds]
    told.started({c.name: (c.experiment.rounds, _done(runs / c.name)) for c in cells})
    count = jobs or room(left)
    failures = play_cells(left, runs, count, told, log)
    if not any((runs / cell.name / METRICS).exists() for cell in cells):
        why = "; ".join(f"{name}: {text}" for name, text in failures.items())
        raise InputError(f"no run came to its first round: {why or 'stopped'}", field="sweep")
    found = compare(out)
    found.cautions.extend(f"{name} failed: {text}" for name, text in failures.items())
    for suffix in FORMATS:
        found.save(out / f"{TABLE}{suffix}")
    return found


def _experiment(
    base: Experiment,
    method: str | Named | Method,
    changes: Mapping[str, Any],
    seed: int,
    beside: Path | None,
) -> Experiment:
    changed = base.with_changes(method=method, seed=seed)
    if not changes:
        return changed
    texts = [f"{name}={_toml(value)}" for name, value in changes.items()]
    made = Experiment.from_parts(changed.to_table(), texts, beside)
    # objects stay, unless what is varied is of theirs
    keep = {
        f"own_{kind}": getattr(changed, f"own_{kind}")
        for kind in ("method", "model")
        if not any(name.split(".")[0] == kind for name in changes)
    }
    # rows and metrics that were given, which no table holds
    keep |= {
        k: getattr(base, k) for k in ("data", "evaluate") if getattr(base, k) == getattr(made, k)
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
        title = ALIASES.get(named.name, named.name).rpartition(":")[2]
        options = named.options
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

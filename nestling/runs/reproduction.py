"""A published table played again: the lines of a paper's file, run by run, in pieces of as many
minutes as one has."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from nestling.errors import InputError, unknown
from nestling.experiment import Experiment, overridden
from nestling.files import check_place, read_toml, write_atomic, writing
from nestling.runfiles import FEDERATION, SUMMARY
from nestling.runs.cell import is_free, play_cell
from nestling.runs.folder import RunFolder
from nestling.runs.run import Watcher
from nestling.schema import from_table, require

HOME = Path(__file__).parent.parent / "papers"
MEASURES = ("global", "average", "personal")


@dataclass(frozen=True)
class TableLine:
    """A line of a table: what differs from the common experiment, and what was published: the
    rounds to each target (0: never), or an accuracy."""

    experiment: dict[str, Any] = field(default_factory=dict)
    published: tuple[int, ...] = ()
    published_accuracy: float = 0.0


@dataclass(frozen=True)
class _Head:
    """What stands at the head of a paper's file."""

    title: str = ""
    paper: str = ""
    measure: str = "global"
    targets: tuple[float, ...] = ()
    seeds: int = 1


@dataclass(frozen=True)
class Paper(_Head):
    """A published table.

    title, paper: what it is, and where it stands.
    measure:      what is compared: the "global" model's accuracy, the "average" over the tiers'
                  models, or the "personal" one.
    targets:      accuracies; how many rounds each took is the result beside the last and the best
                  accuracy.
    seeds:        how many runs each line has.
    choices:      what the paper leaves open, and what is done here.
    experiment:   what all lines share, as in an experiment's file.
    lines:        the lines by name.
    """

    choices: dict[str, str] = field(default_factory=dict)
    experiment: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, TableLine] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses an unknown measure, a table without lines, and lines whose published rounds do
        not match the targets."""
        if self.measure not in MEASURES:
            raise unknown("measure", self.measure, MEASURES, field="measure")
        require(self.seeds >= 1, "must be at least 1", "seeds")
        require(bool(self.lines), "there is no line to play", "lines", "add [lines.NAME]")
        for name, line in self.lines.items():
            fits = len(line.published) in (0, len(self.targets))
            require(
                fits,
                f"{len(line.published)} rounds for {len(self.targets)} targets",
                f"lines.{name}.published",
            )

    def of(self, line: str, seed: int, overrides: Iterable[str] = ()) -> Experiment:
        """The experiment of a line; the first seed is that of the common experiment."""
        table = joined(self.experiment, self.lines[line].experiment)
        table["seed"] = int(table.get("seed", 0)) + seed
        return Experiment.from_table(overridden(table, overrides))


@dataclass
class PlayedLine:
    """What has come of one run so far."""

    line: str
    seed: int
    rounds: int
    done: int = 0
    last: float | None = None
    best: float | None = None
    # by target, the first tested round that reached it
    reached: dict[str, int | None] = field(default_factory=dict)
    minutes: float = 0.0
    device: str = ""
    commit: str = ""
    # fields that were not played as the paper's file says
    set: list[str] = field(default_factory=list)


def names() -> list[str]:
    """The papers that come with the package."""
    return sorted(path.stem for path in HOME.glob("*.toml"))


def read(name: str) -> Paper:
    """A paper by its name, or from a file of one's own."""
    path = Path(name) if name.endswith(".toml") else HOME / f"{name}.toml"
    if not path.is_file():
        raise unknown("paper", name, names(), field="NAME")
    table = read_toml(path)
    lines = {
        line: from_table(TableLine, own, f"lines.{line}")
        for line, own in table.pop("lines", {}).items()
    }
    shared, choices = table.pop("experiment", {}), table.pop("choices", {})
    return Paper(**vars(from_table(_Head, table)), choices=choices, experiment=shared, lines=lines)


def reproduce(
    paper: Paper,
    runs: Path,
    *,
    lines: Iterable[str] = (),
    seeds: int = 0,
    minutes: float = 0.0,
    overrides: tuple[str, ...] = (),
    watcher: Watcher | None = None,
    told: Callable[[list[PlayedLine]], None] = lambda _: None,
) -> list[PlayedLine]:
    """Plays the runs of a table that are not done, each in a folder of its own under `runs`, where
    the next call goes on. Ends when all are done or, between two rounds, after so many minutes (0:
    no limit). `told` hears how all stand after every run."""
    until = time.monotonic() + 60 * minutes if minutes else float("inf")
    wanted = [
        (line, seed) for seed in range(seeds or paper.seeds) for line in _chosen(paper, lines)
    ]
    folders = {(line, seed): runs / f"{_slug(line)}-{seed}" for line, seed in wanted}

    def standing() -> list[PlayedLine]:
        return [
            outcome_of(paper, line, seed, folders[line, seed], overrides) for line, seed in wanted
        ]

    for key, folder in folders.items():
        try:
            play_cell(
                paper.of(*key, overrides),
                folder,
                _stopping(watcher or Watcher(), until),
                overrides=tuple(filter(is_free, overrides)),
            )
        except _TimeUp:
            break
        told(standing())
    found = standing()
    told(found)
    return found


class _TimeUp(Exception):
    """The minutes are over."""


def _stopping(watcher: Watcher, until: float) -> Watcher:
    """A watcher that ends the run when time is up."""

    def round(metrics: Mapping[str, Any]) -> None:
        watcher.round(dict(metrics))
        if time.monotonic() > until:
            raise _TimeUp

    return replace(watcher, round=round)


def outcome_of(
    paper: Paper, line: str, seed: int, folder: Path, overrides: tuple[str, ...] = ()
) -> PlayedLine:
    """How a run stands, from its folder."""
    experiment = paper.of(line, seed, overrides)
    found = PlayedLine(
        line, experiment.seed, experiment.rounds, set=[o for o in overrides if not is_free(o)]
    )
    rows = RunFolder(folder).metrics() if folder.is_dir() else []
    tested = [
        (row["round"], value)
        for row in rows
        if (value := _measured(paper.measure, row)) is not None
    ]
    if not rows:
        return found
    # A run that was stopped has no summary yet, but has said how it began.
    made = RunFolder(folder).read_json(SUMMARY) or RunFolder(folder).read_json(FEDERATION) or {}
    engine = made.get("engine", {})
    found.done, found.minutes = rows[-1]["round"], _minutes(rows)
    found.last, found.best = (
        (tested[-1][1], max(value for _, value in tested)) if tested else (None, None)
    )
    found.reached = {
        f"{t:g}": next((number for number, value in tested if value >= t), None)
        for t in paper.targets
    }
    found.device, found.commit = (
        engine.get("device_name", engine.get("device", "")),
        made.get("commit") or "",
    )
    return found


def _minutes(rows: Iterable[Mapping[str, Any]]) -> float:
    """Minutes that rounds took, tests included."""
    return round(sum(row["seconds"] for row in rows) / 60, 2)


def _measured(measure: str, row: Mapping[str, Any]) -> float | None:
    if measure != "average":
        value: float | None = row[f"{measure}_score"]
        return value
    tiers = [tier["global_score"] for tier in row["by_tier"].values()]
    return sum(tiers) / len(tiers) if tiers and None not in tiers else None


def joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two tables as one: the other's entries count, tables within tables are joined; a method or
    network of another name starts afresh."""
    both = dict(one)
    for key, value in other.items():
        old = both.get(key)
        same = (
            isinstance(old, Mapping)
            and isinstance(value, Mapping)
            and value.get("name", old.get("name")) == old.get("name")
        )
        both[key] = joined(old or {}, value) if same else value
    return both


def to_json(paper: Paper, outcomes: Iterable[PlayedLine]) -> str:
    """A small file: the paper's numbers, what it leaves open, and ours."""
    lines = {
        name: {"rounds": list(line.published), "accuracy": line.published_accuracy}
        for name, line in paper.lines.items()
    }
    table = {
        "title": paper.title,
        "paper": paper.paper,
        "measure": paper.measure,
        "targets": list(paper.targets),
    }
    ours = [vars(outcome) for outcome in outcomes if outcome.done]
    return (
        json.dumps({**table, "choices": paper.choices, "published": lines, "ours": ours}, indent=1)
        + "\n"
    )


def check_file(paper: Paper, path: Path, field: str = "--out") -> None:
    """Refuses a small file that could not be written, before hours are spent on what it is to
    hold."""
    check_place(path.parent, field)
    _saved(paper, path)


def save(paper: Paper, outcomes: Iterable[PlayedLine], path: Path) -> None:
    """Writes the small file. What it has of other runs of the table stays: lines may be played one
    by one."""
    new = [outcome for outcome in outcomes if outcome.done]
    runs = {
        (outcome.line, outcome.seed, *outcome.set): outcome
        for outcome in (*_saved(paper, path), *new)
    }
    order = list(paper.lines)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(
            path,
            to_json(
                paper,
                sorted(runs.values(), key=lambda run: (run.set, order.index(run.line), run.seed)),
            ),
        )


def _saved(paper: Paper, path: Path) -> list[PlayedLine]:
    """The outcomes in a small file, of lines that the table still has."""
    try:
        if not path.exists():
            return []
        found = json.loads(path.read_text())["ours"]
        return [PlayedLine(**row) for row in found if row["line"] in paper.lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is no file of results: {error}", field="--out", fix="name another file"
        ) from error


def table_of(paper: Paper, outcomes: Iterable[PlayedLine]) -> Table:
    """Ours beside the published numbers, one row per run."""
    table = Table(title=paper.title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in (
        "line",
        "seed",
        "rounds",
        *(f"to {target:.0%}" for target in paper.targets),
        "last",
        "best",
        "published",
        "min",
    ):
        table.add_column(column, justify="left" if column == "line" else "right", no_wrap=True)
    for found in outcomes:
        line = paper.lines[found.line]
        published = line.published or (0,) * len(paper.targets)
        rounds = [
            f"{found.reached.get(f'{target:g}') or '–'}"
            + (f" ({theirs or 'never'})" if line.published else "")
            for target, theirs in zip(paper.targets, published, strict=True)
        ]
        table.add_row(
            " ".join([found.line, *(f"[{change}]" for change in found.set)]),
            str(found.seed),
            f"{found.done} of {found.rounds}",
            *rounds,
            _percent(found.last),
            _percent(found.best),
            _percent(line.published_accuracy or None),
            f"{found.minutes:.1f}",
        )
    return table


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2%}"


def _chosen(paper: Paper, lines: Iterable[str]) -> list[str]:
    wanted = list(lines) or list(paper.lines)
    for line in wanted:
        if line not in paper.lines:
            raise unknown("line", line, paper.lines, field="--lines")
    return wanted


def _slug(line: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", line.lower()).strip("-")

"""The lines of a table of results: for every setting its figures, seed by seed, and which of them
is the best or cannot be told from it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nestling.errors import unknown
from nestling.report.differences import METHOD, studied
from nestling.report.folder import Run, last_best, traffic_totals
from nestling.report.grouping import (
    DATA,
    ComparedRun,
    Setting,
    covers,
    data_words,
    differing,
    shortened,
)
from nestling.report.noise import CLEAR, LIKELY, Gap, gap, sentence
from nestling.report.words import (
    DASH,
    duration,
    energy,
    mean_and_spread,
    number,
    percent,
    traffic,
    whole,
)

BEST, TIE = "best", "tie"
MEASURES = ("global", "personal")


@dataclass(frozen=True)
class ResultColumn:
    """A column: the name of its figures, its heading, and how their mean is written; without a
    form they are shares, written with their spread."""

    key: str
    title: str
    form: Callable[[object], str] | None = None

    @property
    def is_score(self) -> bool:
        """Whether it is a score's, last or best."""
        return self.form is None


@dataclass
class ResultRow:
    """A setting: what is studied in it, and its figures by column and seed."""

    label: str
    method: str
    studied: dict[str, str]
    block: tuple[str, ...]
    seeds: list[int]
    values: dict[str, dict[int, float]]
    folders: list[str]
    marks: dict[str, str] = field(default_factory=dict)

    def mean(self, key: str) -> float | None:
        """The mean of a column's figures over the seeds that have one."""
        found = list(self.values.get(key, {}).values())
        return statistics.fmean(found) if found else None

    def text(self, column: ResultColumn, unit: str = "%") -> str:
        """A cell as people read it."""
        found = list(self.values.get(column.key, {}).values())
        if not found:
            return DASH
        if column.form is None:
            return f"{mean_and_spread(found)}{unit}"
        some = f" ({len(found)} of {len(self.seeds)})" if len(found) < len(self.seeds) else ""
        return f"{column.form(statistics.fmean(found))}{some}"


RANKED = ("global_last", "personal_last")
"""The columns whose best is told; the best of all rounds was chosen with hindsight."""
COST_COLUMNS = (
    ResultColumn("bytes_up", "sent up", traffic),
    ResultColumn("bytes_down", "sent down", traffic),
    ResultColumn("clock_seconds", "virtual time", duration),
    ResultColumn("energy_joules", "fleet energy", energy),
)


def columns_of(
    rows: Sequence[ResultRow],
    word: str,
    target: float | None = None,
    measure: str = "global",
    chosen: Sequence[str] = (),
) -> list[ResultColumn]:
    """The columns of a table, with `word` for what ranks models: those that are chosen by their
    keys, in that order, else all of them; time and energy, and what a target took, only where they
    are known."""
    goal = "" if target is None else percent(target, 1 if 100 * target % 1 else 0)
    scores = [
        ResultColumn(f"{kind}_{when}", f"{kind} {word}, {when}")
        for kind in MEASURES
        for when in ("last", "best")
    ]
    wanted = [*scores, *COST_COLUMNS]
    if target is not None:
        wanted += [
            ResultColumn("target_rounds", f"rounds to {goal} {measure} {word}", _rounds),
            ResultColumn("target_bytes", f"bytes to {goal}", traffic),
            ResultColumn("target_seconds", f"virtual time to {goal}", duration),
            ResultColumn("target_joules", f"energy to {goal}", energy),
        ]
    if chosen:
        by_key = {column.key: column for column in wanted}
        for key in chosen:
            if key not in by_key:
                raise unknown("column", key, by_key, field="--columns")
        return [by_key[key] for key in chosen]
    always = ("global_last", "global_best", "personal_last", "personal_best", "bytes_up")
    shown = {*always, "bytes_down", "target_rounds", "target_bytes"}
    # a target that nobody reached leaves its columns empty, but there
    needs = {"target_seconds": "clock_seconds", "target_joules": "energy_joules"}
    return [
        column
        for column in wanted
        if column.key in shown
        or any(row.values.get(needs.get(column.key, column.key)) for row in rows)
    ]


def rows_of(
    settings: Sequence[Setting],
    by: Sequence[str] = (),
    target: float | None = None,
    measure: str = "global",
) -> list[ResultRow]:
    """A row for every setting, in their order, with marks."""
    words = studied(settings, by)
    told = {*differing(settings), *words}
    rows = [_row(setting, words, told, target, measure) for setting in settings]
    if len({setting.word for setting in settings}) > 1:  # an R² is not above an accuracy
        for row, setting in zip(rows, settings, strict=True):
            row.block = (*row.block, setting.word)
    for block in blocks_of(rows):
        for key in RANKED:
            _mark(block, key)
    return rows


def blocks_of(rows: Sequence[ResultRow]) -> list[list[ResultRow]]:
    """The rows that are to be compared with each other: those that differ in the method alone,
    where methods are compared, and that are ranked by the same score."""
    blocks: dict[tuple[str, ...], list[ResultRow]] = {}
    for row in rows:
        blocks.setdefault(row.block, []).append(row)
    return list(blocks.values())


def gaps_of(rows: Sequence[ResultRow], measure: str) -> list[tuple[ResultRow, ResultRow, Gap]]:
    """In every block, the best row beside each other: (best, other, gap)."""
    key, found = f"{measure}_last", []
    for block in blocks_of(rows):
        best = _best(block, key)
        if best is not None:
            found += [
                (best, row, gap(best.values[key], row.values.get(key, {})))
                for row in block
                if row is not best and row.values.get(key)
            ]
    return found


def gap_sentences(rows: Sequence[ResultRow], measure: str) -> list[str]:
    """What is to be said of the gaps."""
    return [
        sentence(found, best.label, other.label) for best, other, found in gaps_of(rows, measure)
    ]


def _row(
    setting: Setting,
    words: Sequence[str],
    told: Container[str],
    target: float | None,
    measure: str,
) -> ResultRow:
    """The row of a setting; of the fields under study, those that are `told` stand beside it."""
    values: dict[str, dict[int, float]] = {}
    for place, entry in enumerate(setting.entries):
        seed = entry.seed if entry.seed is not None else -1 - place
        for key, value in _figures(entry, target, measure).items():
            if value is not None:
                values.setdefault(key, {})[seed] = value
    own = {
        name: data_words(setting.entries[0]) if name == DATA else value
        for name, value in setting.shape.items()
        if name in told and any(_is_studied(word, name) for word in words)
    }
    apart = len(words) > 1 and METHOD in words
    return ResultRow(
        setting.label,
        setting.entries[0].title,
        own,
        tuple(f"{name} = {shortened(value)}" for name, value in own.items()) if apart else (),
        [entry.seed for entry in setting.entries if entry.seed is not None],
        values,
        [str(entry.run.folder) for entry in setting.entries],
    )


def _is_studied(word: str, name: str) -> bool:
    """Whether a field is told beside the method; data are known by their fingerprint, whatever of
    them is varied."""
    return (covers(word, name) and not covers(METHOD, name)) or (
        name == DATA and covers(DATA, word)
    )


def _figures(entry: ComparedRun, target: float | None, measure: str) -> dict[str, float | None]:
    summary: Mapping[str, Any] = entry.summary
    found: dict[str, float | None] = {}
    for kind in MEASURES:
        found[f"{kind}_last"], found[f"{kind}_best"], _ = last_best(summary.get(f"{kind}_score"))
    for key in ("bytes_up", "bytes_down"):
        found[key] = number(summary.get(key))
    for key in ("clock_seconds", "energy_joules"):
        found[key] = number(summary.get(key)) or None  # zero where no device has a known speed
    return found | (_to_target(entry.run, target, measure) if target is not None else {})


def _to_target(run: Run, target: float, measure: str) -> dict[str, float | None]:
    """What it took until a test first reached a score; nothing where none did."""
    for record, sent in zip(run.metrics, traffic_totals(run), strict=True):
        value = number(record.get(f"{measure}_score"))
        if value is not None and value >= target:
            return {
                "target_rounds": number(record.get("round")),
                "target_bytes": sent,
                "target_seconds": number(record.get("clock_seconds")) or None,
                "target_joules": number(record.get("energy_joules")) or None,
            }
    return {}


def _best(block: Sequence[ResultRow], key: str) -> ResultRow | None:
    known = [(mean, row) for row in block if (mean := row.mean(key)) is not None]
    return max(known, key=lambda pair: pair[0])[1] if known else None


def _mark(block: Sequence[ResultRow], key: str) -> None:
    """The best of a column, and those that cannot be told from it."""
    best = _best(block, key)
    if best is None or len(block) < 2:
        return
    best.marks[key] = BEST
    for row in block:
        if row is not best and row.values.get(key):
            found = gap(best.values[key], row.values[key])
            equal = f"{row.mean(key):.4f}" == f"{best.mean(key):.4f}"
            if equal or found.verdict not in (CLEAR, LIKELY):
                row.marks[key] = TIE


def _rounds(value: object) -> str:
    found = number(value)
    return DASH if found is None else whole(found) if found == int(found) else f"{found:.1f}"

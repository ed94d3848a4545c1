"""Runs side by side: what is compared, what else differs, and what is inside the noise."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from nestling.errors import InputError, unknown
from nestling.files import path_in, write_atomic, writing
from nestling.report import table_formats
from nestling.report.differences import differences
from nestling.report.folder import read_run, summarise
from nestling.report.grouping import ComparedRun, Setting, common_word, settings_of
from nestling.report.result_rows import (
    MEASURES,
    ResultColumn,
    ResultRow,
    columns_of,
    gap_sentences,
    rows_of,
)
from nestling.runfiles import METRICS, SWEEP, Record, number, object_in
from nestling.schema import one_or_more

FORMATS = {".md": "markdown", ".tex": "latex", ".csv": "csv", ".json": "json", ".html": "html"}
"""What a file's name says about its format."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """Several runs compared. `cautions` lists every difference that is not the one under study,
    `gaps` which differences are inside the noise."""

    settings: list[Setting]
    entries: list[ComparedRun]
    rows: list[ResultRow]
    columns: list[ResultColumn]
    cautions: list[str]
    gaps: list[str]
    by: tuple[str, ...]
    measure: str
    target: float | None

    def terminal(self) -> Table:
        """The table for a terminal."""
        return table_formats.terminal_form(self.rows, self.columns)

    def to_markdown(self) -> str:
        """The table in Markdown, with the cautions below it."""
        return table_formats.markdown(self.rows, self.columns, self.cautions)

    def to_latex(self) -> str:
        """The table in LaTeX, for booktabs: the best in bold, ties underlined. The cautions stand
        above it as comments."""
        return table_formats.latex(self.rows, self.columns, self.cautions)

    def to_csv(self) -> str:
        """Means and standard deviations as plain numbers, a line a setting."""
        return table_formats.as_csv(self.rows, self.columns)

    def to_json(self) -> str:
        """Every figure, seed by seed, and what is to be said of them."""
        return table_formats.as_json(
            self.rows, self.columns, cautions=self.cautions, gaps=self.gaps
        )

    def to_html(self) -> str:
        """One self-contained page, with curves."""
        from nestling.report.page import comparison_page

        return comparison_page(self)

    def to_pandas(self) -> Any:
        """A data frame with a line for every run; needs pandas (`nestling[notebook]`)."""
        from nestling.report.extras import pandas

        lines = [
            {
                "label": row.label,
                "method": row.method,
                **row.studied,
                "seed": seed,
                **{key: by_seed.get(seed) for key, by_seed in row.values.items()},
            }
            for row in self.rows
            for seed in row.seeds
        ]
        return pandas().DataFrame(lines)

    def save(self, path: str | Path) -> Path:
        """Writes a file whose name says its format: .md, .tex, .csv, .json or .html."""
        path = Path(path)
        if path.suffix not in FORMATS:
            raise unknown("kind of file", path.suffix or path.name, FORMATS, field="--out")
        with writing(path):
            if path.is_dir():
                raise InputError(f"{path} is a folder", field="--out", fix="give a file's name")
            path.parent.mkdir(parents=True, exist_ok=True)
            text: str = getattr(self, f"to_{FORMATS[path.suffix]}")()
            # JSON may hold half a surrogate pair, which UTF-8 cannot write
            write_atomic(path, text.encode("utf-8", "replace"))
        return path

    def plot(self, over: str = "rounds", ax: Any = None) -> Any:
        """Plots the score of every setting over rounds, bytes, seconds (virtual time) or joules:
        means over seeds, in a band of one standard deviation either side. Gives matplotlib's axes;
        needs matplotlib (`nestling[notebook]`)."""
        from nestling.report.comparison import plot_of_settings

        return plot_of_settings(self.settings, self.measure, over, ax)

    def __repr__(self) -> str:
        """The table and what is to be said of it, for a prompt."""
        return "\n".join([self.to_markdown().rstrip(), *(f"- {gap}" for gap in self.gaps)])

    def _repr_html_(self) -> str:
        """The table and what is to be said of it, for a notebook."""
        from nestling.report.comparison import notebook_table

        return notebook_table(self)


def compare(
    *folders: str | Path,
    by: Sequence[str] = (),
    measure: str = "",
    target: float | None = None,
    columns: Sequence[str] = (),
) -> Comparison:
    """Compares the runs in folders; the folder of a sweep, or one that holds run folders, stands
    for all of them. Files that a sweep wrote beside its runs (`runs/sweep/runs/*`) are passed over.

    by:      the fields under study, e.g. "split.alpha" (default: those of the sweep, else the
             method, else the one field that differs); every other difference is a caution.
    measure: global or personal score, which the best is chosen by (default: global, where it is
             known).
    target:  a score: rounds, bytes, virtual time and energy until it was reached become
             columns.
    columns: the columns by name, e.g. "global_last" (default: all there are).
    """
    if measure and measure not in MEASURES:
        raise unknown("measure", measure, MEASURES, field="--measure")
    if target is not None and not 0 < (number(target) or 0) < 1:
        raise InputError(f"{target} is no score", field="--target", fix="give a share, e.g. 0.9")
    by, columns = one_or_more(by, "by"), one_or_more(columns, "columns")
    given = [path_in(folder, "folders", "the path of a run folder") for folder in folders]
    given = [path for path in given if not _tells_of(path, given)]
    sweeps = [object_in(folder / SWEEP) for folder in given]
    if not by and sweeps and all(sweeps):
        by = list(dict.fromkeys(name for sweep in sweeps for name in _names(sweep, "studied")))
    if target is None and sweeps and all(sweeps):
        target = number(sweeps[0].get("target")) or None
    entries = [ComparedRun(run, summarise(run)) for run in map(read_run, _runs_in(given))]
    return compared(entries, by=by, measure=measure, target=target, columns=columns)


def compared(
    entries: Sequence[ComparedRun],
    *,
    by: Sequence[str] = (),
    measure: str = "",
    target: float | None = None,
    columns: Sequence[str] = (),
) -> Comparison:
    """The comparison of runs that were read."""
    settings = settings_of(entries)
    rows = rows_of(settings, by, target, measure or "global")
    if not measure:
        measure = "global" if any(row.values.get("global_last") for row in rows) else "personal"
        rows = rows_of(settings, by, target, measure)
    return Comparison(
        settings,
        list(entries),
        rows,
        columns_of(rows, common_word(settings), target, measure, columns),
        differences(entries, settings, by),
        gap_sentences(rows, measure),
        tuple(by),
        measure,
        target,
    )


def _tells_of(path: Path, given: Sequence[Path]) -> bool:
    """Whether it is the file that a sweep wrote beside one of the runs that are given."""
    return path.suffix == ".toml" and path.with_suffix("") in given and path.is_file()


def _runs_in(folders: Iterable[Path]) -> list[Path]:
    """Every run folder once, in the order in which they were named."""
    found: dict[Path, Path] = {}
    for folder in folders:
        inner = [] if (folder / METRICS).exists() or not folder.is_dir() else _below(folder)
        for run in inner or [folder]:
            found.setdefault(run.resolve(), run)
    if not found:
        raise InputError("nothing to compare", fix="give at least one run folder")
    return list(found.values())


def _below(folder: Path) -> list[Path]:
    """The run folders in a folder: a sweep's in its order, else by name."""
    listed = _names(object_in(folder / SWEEP), "cells")
    known = [folder / "runs" / Path(name).name for name in listed] or sorted(folder.iterdir())
    # os.path, for which a name that no file can have is that of no file
    return [path for path in known if os.path.isfile(path / METRICS)]


def _names(sweep: Record, key: str) -> list[str]:
    found = sweep.get(key)
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []

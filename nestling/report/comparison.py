"""The page that compares runs: runs that differ in nothing but the seed are one line, with mean and
spread."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from nestling.errors import unknown
from nestling.report.charts import BYTES, JOULES, ROUNDS, SECONDS, chart, score_axis
from nestling.report.coverage_part import COVERAGE_LEAD, coverage_pictures, masked_note
from nestling.report.extras import pyplot
from nestling.report.folder import Run, last_best, running_totals, traffic_totals
from nestling.report.grouping import ComparedRun, Setting, common_word
from nestling.report.markup import Cell, Column, fill, joined, note, section, side_by_side, table
from nestling.report.notebook import OVER
from nestling.report.result_rows import ResultColumn, ResultRow
from nestling.report.svg import Axis, Series
from nestling.report.tables import tier_rows
from nestling.report.words import (
    DASH,
    capital,
    duration,
    mean_and_spread,
    number,
    plural,
    traffic,
    whole,
)
from nestling.runfiles import tier_block

if TYPE_CHECKING:
    from nestling.report.compare import Comparison

_MOST_COVERED = 8
COMPARISON_PARTS = [
    ("results", "Results"),
    ("curves", "Curves"),
    ("tiers", "By tier"),
    ("coverage", "Coverage"),
    ("runs", "Runs"),
]

AXES = ((ROUNDS, "rounds"), (BYTES, "bytes"), (SECONDS, "virtual time"), (JOULES, "energy"))
"""What a score is drawn over, where the runs know it."""


_PLOTTED = dict(zip(OVER, (ROUNDS, BYTES, SECONDS, JOULES), strict=True))


def comparison_title(comparison: Comparison) -> str:
    """What the browser's tab says."""
    return f"{plural(len(comparison.entries), 'run')} compared · Nestling"


def comparison_body(comparison: Comparison) -> Markup:
    """Everything between the page's top and its end."""
    entries, settings = comparison.entries, comparison.settings
    return joined(
        [
            _header(comparison),
            _results(comparison),
            _curves(settings),
            _tiers(settings),
            _coverage(settings),
            _runs(entries, settings),
        ]
    )


def spread(values: Sequence[object], form: Callable[[float], str] | None = None) -> Cell:
    """Mean ± standard deviation (n - 1) of the known values; the plain value where there is only
    one."""
    known = [found for value in values if (found := number(value)) is not None]
    if not known:
        return Cell(DASH)
    mean = statistics.fmean(known)
    return Cell(form(mean) if form is not None else f"{mean_and_spread(known)}%", mean)


def notebook_table(comparison: Comparison) -> str:
    """The table of results and what is to be said of it, as a piece of HTML."""
    listing = _result_table(comparison.rows, comparison.columns)
    lines = [*comparison.cautions, *comparison.gaps]
    return str(joined([listing, *(note(line) for line in lines)]))


def _header(comparison: Comparison) -> Markup:
    entries = comparison.entries
    facts = [plural(len(entries), "run"), *_words(entries, "data"), *_words(entries, "model")]
    return fill(
        "comparison_header.html",
        heading=_heading(comparison.settings),
        facts=facts,
        cautions=comparison.cautions,
    )


def _results(comparison: Comparison) -> Markup:
    body = _result_table(comparison.rows, comparison.columns)
    if _several_seeds(comparison.settings):
        body += note(
            "Mean ± standard deviation (n − 1) over seeds; traffic, time and energy are means. The "
            "best of a column is bold; what cannot be told from it over these seeds is underlined."
        )
    body += joined(note(line) for line in comparison.gaps)
    return section(
        "results", "Results", "Last is the last evaluated round, best the best of all rounds.", body
    )


def _result_table(rows: Sequence[ResultRow], columns: Sequence[ResultColumn]) -> Markup:
    heads = [
        Column("Method", numeric=False),
        Column("Seeds"),
        *map(_head, columns),
    ]
    cells = [
        [
            Cell(row.label, style=index),
            Cell(whole(len(row.folders)), len(row.folders)),
            *(
                Cell(row.text(column), row.mean(column.key), mark=row.marks.get(column.key, ""))
                for column in columns
            ),
        ]
        for index, row in enumerate(rows)
    ]
    return table(heads, cells, label="Results")


def _head(column: ResultColumn) -> Column:
    if not column.is_score:
        return Column(capital(column.title))
    group, _, when = column.title.partition(", ")
    return Column(when, group=capital(group))


def _several_seeds(settings: Sequence[Setting]) -> bool:
    return any(len(setting.entries) > 1 for setting in settings)


def _score_cells(entries: Sequence[ComparedRun]) -> list[Cell]:
    return [
        spread([last_best(entry.summary.get(f"{kind}_score"))[at] for entry in entries])
        for kind in ("global", "personal")
        for at in (0, 1)
    ]


def _curves(settings: Sequence[Setting]) -> Markup:
    word = common_word(settings)
    charts = []
    for kind, nothing in (
        ("global", "no run has a global model that was evaluated."),
        ("personal", "not evaluated in these runs."),
    ):
        for x, name in AXES:
            lines = [
                _mean_line(setting, f"{kind}_score", x, index)
                for index, setting in enumerate(settings)
            ]
            if name == "rounds" or any(at for line in lines for at, _ in line.points):
                charts.append(
                    chart(
                        lines,
                        title=f"{kind.capitalize()} {word} over {name}",
                        note="",
                        x=x,
                        y=score_axis(word),
                        ident=f"c-{kind}-{name.replace(' ', '-')}",
                        nothing=nothing,
                    )
                )
    body = side_by_side(charts)
    if _several_seeds(settings):
        body += note("Lines are means over seeds; the band is one standard deviation either side.")
    return section("curves", f"{capital(word)} over rounds and what they cost", "", body)


def plot_of_settings(settings: Sequence[Setting], measure: str, over: str, ax: Any = None) -> Any:
    """The mean score of every setting as a line, in the band of its seeds; gives matplotlib's
    axes."""
    if over not in OVER:
        raise unknown("axis", over, OVER, field="over")
    axes = ax if ax is not None else pyplot().subplots()[1]
    for index, setting in enumerate(settings):
        line = _mean_line(setting, f"{measure}_score", _PLOTTED[over], index)
        if line.points:
            (drawn,) = axes.plot(*zip(*line.points, strict=True), label=setting.label)
        if line.band:
            edges = zip(*line.band, strict=True)
            axes.fill_between(*edges, alpha=0.2, color=drawn.get_color(), linewidth=0)
    axes.set(xlabel=OVER[over][1], ylabel=f"{measure} {common_word(settings)}")
    if axes.get_lines():
        axes.legend()
    return axes


def _mean_line(setting: Setting, key: str, x: Axis, index: int) -> Series:
    """The mean over the seeds at the rounds that all of them evaluated."""
    traces = [trace for entry in setting.entries if (trace := _trace(entry.run, key, x))]
    shared = sorted(set.intersection(*(set(trace) for trace in traces))) if traces else []
    points, band = [], []
    for at in shared:
        here, values = (
            statistics.fmean(trace[at][0] for trace in traces),
            [trace[at][1] for trace in traces],
        )
        mean = statistics.fmean(values)
        points.append((here, mean))
        if len(values) > 1:
            sd = statistics.stdev(values)
            band.append((here, mean - sd, mean + sd))
    return Series(setting.label, points, index, band)


def _trace(run: Run, key: str, x: Axis) -> dict[int, tuple[float, float]]:
    places = _places(run, x)
    return {
        int(record["round"]): (place, found)
        for record, place in zip(run.metrics, places, strict=True)
        if (found := number(record.get(key))) is not None
    }


def _places(run: Run, x: Axis) -> list[float]:
    if x is BYTES:
        return traffic_totals(run)
    if x is ROUNDS:
        return [float(record["round"]) for record in run.metrics]
    return running_totals(run, "clock_seconds" if x is SECONDS else "energy_joules")


def _tiers(settings: Sequence[Setting]) -> Markup:
    tiers: dict[str, str] = {}
    for setting in settings:
        for entry in setting.entries:
            tiers = {
                row["tier"]: row["label"] for row in tier_rows(entry.summary, entry.run.federation)
            } | tiers
    if not tiers:
        return Markup("")
    return section(
        "tiers",
        f"{capital(common_word(settings))} by tier",
        "",
        joined(_tier_table(settings, tiers, kind) for kind in ("global", "personal")),
    )


def _tier_table(settings: Sequence[Setting], tiers: Mapping[str, str], kind: str) -> Markup:
    group = f"{kind.capitalize()} {common_word(settings)}, last"
    columns = [Column("Method", numeric=False)]
    columns += [Column(label, group=group) for label in tiers.values()]
    rows = [
        [Cell(setting.label, style=index), *(_tier_cell(setting, tier, kind) for tier in tiers)]
        for index, setting in enumerate(settings)
    ]
    return table(columns, rows, label=f"{group}, by tier")


def _tier_cell(setting: Setting, tier: str, kind: str) -> Cell:
    return spread(
        [
            last_best(tier_block(entry.summary, tier).get(f"{kind}_score"))[0]
            for entry in setting.entries
        ]
    )


def _coverage(settings: Sequence[Setting]) -> Markup:
    """How often each channel was trained, method beside method; of seeds the first."""
    shown = [(setting.entries[0].run, setting.label) for setting in settings[:_MOST_COVERED]]
    found = [coverage_pictures(*one, f"c-coverage-{at}") for at, one in enumerate(shown)]
    drawn = [pictures for pictures in found if pictures]
    if not drawn:
        return Markup("")
    lead = COVERAGE_LEAD + (" Of several seeds the first." if _several_seeds(settings) else "")
    body = side_by_side(drawn) + joined(masked_note(*one) for one in shown)
    return section("coverage", "Who trained which channels", lead, body)


def _runs(entries: Sequence[ComparedRun], settings: Sequence[Setting]) -> Markup:
    # what all runs have in common stands in the head
    told = [key for key in ("data", "model") if len({e.summary.get(key) for e in entries}) > 1]
    columns = [Column(name, numeric=False) for name in ("Run", "Method", *map(str.title, told))]
    columns += [Column("Seed"), Column("Rounds")]
    word = common_word(settings)
    columns += [
        Column(label, group=group)
        for group in (f"Global {word}", f"Personal {word}")
        for label in ("last", "best")
    ]
    columns += [
        Column(name)
        for name in (
            "Sent up",
            "Sent down",
            "Virtual time",
            "Wall time",
            "Refused",
            "Late",
            "Dropped",
        )
    ]
    styles = {
        id(entry): index for index, setting in enumerate(settings) for entry in setting.entries
    }
    names = Counter(entry.run.name for entry in entries)
    rows = [
        _run_cells(
            entry,
            styles.get(id(entry)),
            entry.run.name if names[entry.run.name] == 1 else str(entry.run.folder),
            told,
        )
        for entry in entries
    ]
    body = table(columns, rows, label="Runs")
    if twice := len(entries) - len(styles):
        repeat, are = ("repeats", "is") if twice == 1 else ("repeat", "are")
        body += note(
            f"{plural(twice, 'run')} without a line key {repeat} a seed of the same setting and "
            f"{are} left out of the means."
        )
    return section("runs", "Runs", "", body)


def _run_cells(entry: ComparedRun, style: int | None, name: str, told: Sequence[str]) -> list[Cell]:
    summary = entry.summary
    seed, done, rounds = (number(summary.get(key)) for key in ("seed", "rounds_done", "rounds"))
    progress = (
        whole(done) if rounds is None or done == rounds else f"{whole(done)} of {whole(rounds)}"
    )
    forms = [
        ("bytes_up", traffic),
        ("bytes_down", traffic),
        ("clock_seconds", duration),
        ("seconds", duration),
        ("refused", whole),
        ("late", whole),
        ("dropped", whole),
    ]
    return [
        Cell(name, style=style),
        Cell(entry.title),
        *(Cell(str(summary.get(key) or DASH)) for key in told),
        Cell(DASH if seed is None else f"{seed:.0f}", seed),
        Cell(progress, done),
        *_score_cells([entry]),
        *(Cell(form(summary.get(key)), number(summary.get(key))) for key, form in forms),
    ]


def _heading(settings: Sequence[Setting]) -> str:
    labels = [setting.label for setting in settings]
    return " · ".join(labels) if len(labels) <= 3 else f"{plural(len(labels), 'setting')} compared"


def _words(entries: Sequence[ComparedRun], key: str) -> list[str]:
    return list(
        dict.fromkeys(
            str(entry.summary[key]) for entry in entries if entry.summary.get(key) is not None
        )
    )

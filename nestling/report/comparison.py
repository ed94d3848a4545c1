"""The page that compares runs: runs that differ in nothing but the seed are one line, with mean and
spread."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from nestling.fair import unfair
from nestling.report.charts import ACCURACY, BYTES, ROUNDS, chart
from nestling.report.folder import Run, last_best, summarise, traffic_totals
from nestling.report.markup import Cell, Column, fill, joined, note, section, side_by_side, table
from nestling.report.svg import Axis, Series
from nestling.report.tables import tier_rows
from nestling.report.words import DASH, duration, energy, number, percent, plural, traffic, whole
from nestling.runfiles import tier_block

# Where a run lies and what carries it out does not change what it finds.
_NO_MATTER = ("seed", "data.path", "engine")

COMPARISON_PARTS = [
    ("results", "Results"),
    ("curves", "Curves"),
    ("tiers", "By tier"),
    ("runs", "Runs"),
]


@dataclass(frozen=True)
class ComparedRun:
    """A run with its summary."""

    run: Run
    summary: Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """One method with one configuration, and a run of it for each seed."""

    label: str
    entries: list[ComparedRun]


def comparison_title(runs: Sequence[Run]) -> str:
    """What the browser's tab says."""
    return f"{plural(len(runs), 'run')} compared · Nestling"


def comparison_body(runs: Sequence[Run]) -> Markup:
    """Everything between the page's top and its end."""
    entries = [ComparedRun(run, summarise(run)) for run in runs]
    settings = settings_of(entries)
    return joined(
        [
            _header(entries, settings),
            _results(settings),
            _curves(settings),
            _tiers(settings),
            _runs(entries, settings),
        ]
    )


def settings_of(entries: Sequence[ComparedRun]) -> list[Setting]:
    """The entries by method and configuration, seeds aside. A seed that comes twice counts once: a
    copy adds no certainty."""
    found: dict[str, list[ComparedRun]] = {}
    for entry in entries:
        same = found.setdefault(_fingerprint(entry), [])
        seed = entry.summary.get("seed")
        if seed is None or seed not in [other.summary.get("seed") for other in same]:
            same.append(entry)
    groups = list(found.values())
    return [Setting(label, group) for label, group in zip(_labels(groups), groups, strict=True)]


def spread(values: Sequence[object], form: Callable[[float], str] | None = None) -> Cell:
    """Mean ± standard deviation (n - 1) of the known values; the plain value where there is only
    one."""
    known = [found for value in values if (found := number(value)) is not None]
    if not known:
        return Cell(DASH)
    mean = statistics.fmean(known)
    if form is not None or len(known) == 1:
        return Cell((form or (lambda value: percent(value, 2)))(mean), mean)
    return Cell(f"{100 * mean:.2f} ± {100 * statistics.stdev(known):.2f}%", mean)


def _header(entries: Sequence[ComparedRun], settings: Sequence[Setting]) -> Markup:
    facts = [plural(len(entries), "run"), *_words(entries, "data"), *_words(entries, "model")]
    return fill(
        "comparison_header.html",
        heading=_heading(settings),
        facts=facts,
        cautions=cautions(entries),
    )


def cautions(entries: Sequence[ComparedRun]) -> list[str]:
    """Why these runs are not one fair column, if they are not."""
    differ = [
        f"{key} ({', '.join(words)})"
        for key in ("data", "model", "rounds")
        if len(words := _words(entries, key)) > 1
    ]
    found = (
        [f"These runs differ in {' and in '.join(differ)}: compare with care."] if differ else []
    )
    return [*found, *unfair(_words(entries, "group"), _words(entries, "norm"))]


def comparison_rows(entries: Sequence[ComparedRun]) -> list[list[str]]:
    """One line per setting: its label, seeds, the four accuracies, and what travelled."""
    rows = []
    for setting in settings_of(entries):
        travelled = [
            spread([e.summary.get(key) for e in setting.entries], traffic).text
            for key in ("bytes_up", "bytes_down")
        ]
        accuracies = [cell.text for cell in _accuracies(setting.entries)]
        rows.append([setting.label, str(len(setting.entries)), *accuracies, *travelled])
    return rows


def _results(settings: Sequence[Setting]) -> Markup:
    columns = [Column("Method", numeric=False), Column("Seeds")]
    columns += [
        Column(label, group=group)
        for group in ("Global accuracy", "Personal accuracy")
        for label in ("last", "best")
    ]
    columns += [
        Column("Sent up"),
        Column("Sent down"),
        Column("Virtual time"),
        Column("Fleet energy"),
    ]
    rows = [
        [
            Cell(setting.label, style=index),
            Cell(whole(len(setting.entries)), len(setting.entries)),
            *_accuracies(setting.entries),
            *(
                spread([entry.summary.get(key) for entry in setting.entries], form)
                for key, form in (
                    ("bytes_up", traffic),
                    ("bytes_down", traffic),
                    ("clock_seconds", duration),
                    ("energy_joules", energy),
                )
            ),
        ]
        for index, setting in enumerate(settings)
    ]
    body = table(columns, rows, label="Results")
    if _several_seeds(settings):
        body += note(
            "Mean ± standard deviation (n − 1) over seeds; traffic, time and energy are means."
        )
    return section(
        "results", "Results", "Last is the last evaluated round, best the best of all rounds.", body
    )


def _several_seeds(settings: Sequence[Setting]) -> bool:
    return any(len(setting.entries) > 1 for setting in settings)


def _accuracies(entries: Sequence[ComparedRun]) -> list[Cell]:
    return [
        spread([last_best(entry.summary.get(f"{kind}_accuracy"))[at] for entry in entries])
        for kind in ("global", "personal")
        for at in (0, 1)
    ]


def _curves(settings: Sequence[Setting]) -> Markup:
    charts = []
    for kind, nothing in (
        ("global", "no run has a global model that was evaluated."),
        ("personal", "not evaluated in these runs."),
    ):
        for x, name in ((ROUNDS, "rounds"), (BYTES, "bytes")):
            lines = [
                _mean_line(setting, f"{kind}_accuracy", x, index)
                for index, setting in enumerate(settings)
            ]
            if name == "rounds" or any(line.points for line in lines):
                charts.append(
                    chart(
                        lines,
                        title=f"{kind.capitalize()} accuracy over {name}",
                        note="",
                        x=x,
                        y=ACCURACY,
                        ident=f"c-{kind}-{name}",
                        nothing=nothing,
                    )
                )
    body = side_by_side(charts)
    if _several_seeds(settings):
        body += note("Lines are means over seeds; the band is one standard deviation either side.")
    return section("curves", "Accuracy over rounds and bytes", "", body)


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
    places = (
        traffic_totals(run) if x is BYTES else [float(record["round"]) for record in run.metrics]
    )
    return {
        int(record["round"]): (place, found)
        for record, place in zip(run.metrics, places, strict=True)
        if (found := number(record.get(key))) is not None
    }


def _tiers(settings: Sequence[Setting]) -> Markup:
    tiers: dict[str, str] = {}
    for setting in settings:
        for entry in setting.entries:
            tiers = {
                row["tier"]: row["label"] for row in tier_rows(entry.summary, entry.run.federation)
            } | tiers
    if not tiers:
        return Markup("")
    columns = [Column("Method", numeric=False)]
    columns += [
        Column(label, group=group)
        for group in ("Global accuracy, last", "Personal accuracy, last")
        for label in tiers.values()
    ]
    rows = [
        [
            Cell(setting.label, style=index),
            *(_tier_cell(setting, tier, kind) for kind in ("global", "personal") for tier in tiers),
        ]
        for index, setting in enumerate(settings)
    ]
    return section("tiers", "Accuracy by tier", "", table(columns, rows, label="Accuracy by tier"))


def _tier_cell(setting: Setting, tier: str, kind: str) -> Cell:
    return spread(
        [
            last_best(tier_block(entry.summary, tier).get(f"{kind}_accuracy"))[0]
            for entry in setting.entries
        ]
    )


def _runs(entries: Sequence[ComparedRun], settings: Sequence[Setting]) -> Markup:
    columns = [
        Column("Run", numeric=False),
        Column("Method", numeric=False),
        Column("Data", numeric=False),
        Column("Model", numeric=False),
        Column("Seed"),
        Column("Rounds"),
    ]
    columns += [
        Column(label, group=group)
        for group in ("Global accuracy", "Personal accuracy")
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


def _run_cells(entry: ComparedRun, style: int | None, name: str) -> list[Cell]:
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
        Cell(_title(entry)),
        Cell(str(summary.get("data") or DASH)),
        Cell(str(summary.get("model") or DASH)),
        Cell(DASH if seed is None else f"{seed:.0f}", seed),
        Cell(progress, done),
        *_accuracies([entry]),
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


def _title(entry: ComparedRun) -> str:
    return str(entry.summary.get("title") or entry.summary.get("method") or entry.run.name)


def _fingerprint(entry: ComparedRun) -> str:
    facts = [entry.summary.get(key) for key in ("method", "data", "model")]
    return json.dumps([*facts, _shape(entry)], sort_keys=True, default=str)


def _shape(entry: ComparedRun) -> dict[str, str]:
    """The configuration as one level of dotted names, less what must not tell two runs apart."""
    config = entry.run.config or {"rounds": entry.summary.get("rounds")}
    return {
        name: value
        for name, value in _flat(config)
        if not any(f"{name}.".startswith(f"{word}.") for word in _NO_MATTER)
    }


def _flat(config: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    found = []
    for key, value in config.items():
        found += (
            _flat(value, f"{above}{key}.")
            if isinstance(value, dict)
            else [(f"{above}{key}", str(value))]
        )
    return found


def _labels(groups: Sequence[list[ComparedRun]]) -> list[str]:
    """The method's title; where two settings share it, with what sets them apart."""
    titles = [_title(group[0]) for group in groups]
    shapes = [_shape(group[0]) for group in groups]
    labels = []
    for title, shape in zip(titles, shapes, strict=True):
        rivals = [other for name, other in zip(titles, shapes, strict=True) if name == title]
        keys = sorted(
            {
                key
                for other in rivals
                for key in {*other, *shape}
                if other.get(key) != shape.get(key)
            }
        )
        labels.append(
            title
            + (
                f" ({', '.join(f'{key} = {shape.get(key, DASH)}' for key in keys[:2])})"
                if keys
                else ""
            )
        )
    clash = Counter(labels)
    return [
        label if clash[label] == 1 else f"{label} #{labels[:index].count(label) + 1}"
        for index, label in enumerate(labels)
    ]

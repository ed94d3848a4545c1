"""A run as a notebook shows it: a small piece of HTML, a data frame, a plot."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import escape

from nestling.errors import unknown
from nestling.report.extras import pandas, pyplot
from nestling.report.tables import overall_row, tier_rows
from nestling.report.words import memory, number, percent, plural, traffic, whole
from nestling.runfiles import SCORES, score_word

Rows = Sequence[Mapping[str, Any]]

OVER = {
    "rounds": ("round", "round"),
    "bytes": ("bytes", "bytes sent up and down"),
    "seconds": ("clock_seconds", "virtual time in seconds"),
    "joules": ("energy_joules", "the fleet's energy in joules"),
}
"""What a score may be plotted over: the column, and what the axis says."""


def result_html(summary: Mapping[str, Any], tiers: Mapping[str, Any]) -> str:
    """The result of a run: what it was, and a table by tier."""
    title = _named(summary)
    done = plural(summary.get("rounds_done"), "round")
    sent = f"sent up {traffic(summary.get('bytes_up'))}, down {traffic(summary.get('bytes_down'))}"
    head = f"<b>{escape(title)}</b> on {escape(summary.get('data') or 'data')}, {done}; {sent}"
    word = score_word(summary)
    scores = [
        f"{kind} {word}, {when}" for kind in ("global", "personal") for when in ("last", "best")
    ]
    lines = [_line("th", ["tier", "clients", "params", "RAM needed", *scores])]
    for row in tier_rows(summary, tiers):
        own = [row["tier"], whole(row["count"]), whole(row["params"]), memory(row["ram_need"])]
        lines.append(_line("td", [*own, *_score_texts(row)]))
    lines.append(_line("th", ["all", "", "", "", *_score_texts(overall_row(summary))]))
    return f"<p>{head}</p><table>{''.join(lines)}</table>"


def result_line(summary: Mapping[str, Any], folder: object = None) -> str:
    """The result of a run on one line: what it was, how good it became, where it lies."""
    name, done = _named(summary), plural(summary.get("rounds_done"), "round")
    row = overall_row(summary)
    last = [f"{kind} {percent(row[f'{kind}_last'], 2)}" for kind in ("global", "personal")]
    where = f"; {folder}" if folder is not None else ""
    return f"{name} on {summary.get('data') or 'data'}, {done}, {', '.join(last)}{where}"


def frame_of(metrics: Rows) -> Any:
    """A data frame with a line for every round; what is said of tiers has their names in front."""
    return pandas().DataFrame([_flat(row) for row in metrics])


def plot_of(metrics: Rows, title: str, word: str, over: str = "rounds", ax: Any = None) -> Any:
    """The scores of a run as lines; gives matplotlib's axes."""
    if over not in OVER:
        raise unknown("axis", over, OVER, field="over")
    key, label = OVER[over]
    axes = ax if ax is not None else pyplot().subplots()[1]
    for kind in ("global", "personal"):
        points = [
            (place, value)
            for row in map(_flat, metrics)
            if (value := number(row.get(f"{kind}_score"))) is not None
            and (place := number(row.get(key))) is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), label=kind)
    axes.set(xlabel=label, ylabel=word, title=title)
    axes.legend()
    return axes


def png_of(metrics: Rows, title: str, word: str) -> bytes | None:
    """The plot of a run over rounds as a PNG file; None where nothing was measured, or
    matplotlib is not installed."""
    if not any(number(row.get(kind)) is not None for row in metrics for kind in SCORES):
        return None
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure, file = Figure(), io.BytesIO()  # of its own: what a notebook shows is not touched
    plot_of(metrics, title, word, ax=figure.subplots())
    figure.savefig(file, format="png")
    return file.getvalue()


def _named(summary: Mapping[str, Any]) -> str:
    return str(summary.get("title") or summary.get("method") or "a run")


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in row.items():
        if name == "by_tier" and isinstance(value, Mapping):
            for tier, own in value.items():
                found |= {f"{tier}/{key}": inner for key, inner in own.items()}
        elif not isinstance(value, (list, Mapping)):
            found[name] = value
    sent = (number(row.get("bytes_up_total")), number(row.get("bytes_down_total")))
    if None not in sent:
        found["bytes"] = sum(total for total in sent if total is not None)
    return found


def _score_texts(row: Mapping[str, Any]) -> list[str]:
    keys = ("global_last", "global_best", "personal_last", "personal_best")
    return [percent(row[key], 2) for key in keys]


def _line(tag: str, cells: Sequence[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

"""The few pieces of HTML that both pages are made of. The templates escape whatever is no `Markup`:
nobody has to think of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from markupsafe import Markup

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Column:
    """A column's heading; numbers stand on the right. `group` is a heading shared with neighbouring
    columns."""

    label: str
    numeric: bool = True
    group: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell's text, the number it sorts by, the style of the line in the charts that it speaks
    of, and whether it is the "best" of its column or a "tie" with that."""

    text: str
    value: float | None = None
    style: int | None = None
    mark: str = ""


def fill(template: str, **values: object) -> Markup:
    """A template of this package with `values` in it; those that are no `Markup` are escaped."""
    return Markup(_environment().get_template(template).render(values))


def joined(pieces: Iterable[Markup]) -> Markup:
    """Pieces of a page, one after another."""
    return Markup("").join(pieces)


def section(ident: str, title: str, lead: str, body: Markup) -> Markup:
    """One part of the page, with a heading that can be linked to."""
    return _part("section", ident, title, lead, body)


def figure(title: str, note: str, legend: Sequence[tuple[int, str, str]], chart: Markup) -> Markup:
    """A chart with its heading and a legend of (style, label, value)."""
    return _part("figure", title, note, legend, chart)


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    *,
    label: str,
    foot: Sequence[Cell] = (),
) -> Markup:
    """A table that scrolls inside its own box and, with JavaScript, sorts by a click on a
    heading."""
    groups = [(name, len(list(some))) for name, some in groupby(column.group for column in columns)]
    return _part(
        "table", columns, groups if any(name for name, _ in groups) else [], rows, label, foot
    )


def side_by_side(figures: Sequence[Markup]) -> Markup:
    """Charts beside each other, where there is room."""
    return _part("side_by_side", figures)


def scrolling(label: str, body: Markup) -> Markup:
    """Something wide that scrolls inside its own box."""
    return _part("scrolling", label, body)


def folded(summary: str, body: Markup) -> Markup:
    """Something to open when wanted."""
    return _part("folded", summary, body)


def source(text: str) -> Markup:
    """A file as it is."""
    return _part("source", text)


def note(text: str) -> Markup:
    """A remark below a table or chart."""
    return _part("note", text)


def empty(text: str) -> Markup:
    """What stands where there is nothing to show."""
    return _part("empty", text)


def pairs(entries: Sequence[tuple[str, str]], kind: str) -> Markup:
    """A list of names and values."""
    return _part("pairs", entries, kind)


def _part(name: str, *values: object) -> Markup:
    return getattr(_environment().get_template("parts.html").module, name)(*values)


def _environment() -> Environment:
    # Jinja2 is slow to import, and most commands make no page
    from nestling.report.templating import environment

    return environment()

"""The few pieces of HTML that both pages are made of. Whatever came out of a file is escaped here and only here."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from nestling.report.svg import swatch


@dataclass(frozen=True)
class Column:
    """A column's heading; numbers stand on the right. `group` is a heading shared with neighbouring columns."""

    label: str
    numeric: bool = True
    group: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell's text, the number it sorts by, and the style of the line in the charts that it speaks of."""

    text: str
    value: float | None = None
    style: int | None = None


def esc(text: object) -> str:
    """`text` safe inside HTML, in an element or in a quoted attribute."""
    return html.escape(str(text), quote=True)


def section(ident: str, title: str, lead: str, body: str) -> str:
    """One part of the page, with a heading that can be linked to."""
    return f'<section id="{ident}" aria-labelledby="{ident}-h"><h2 id="{ident}-h">{esc(title)}</h2>{_lead(lead)}{body}</section>'


def figure(title: str, note: str, legend: Sequence[tuple[int, str, str]], chart: str) -> str:
    """A chart with its heading and a legend of (style, label, value)."""
    entries = "".join(
        f'<li>{swatch(style)}<span class="who">{esc(label)}</span> <b>{esc(value)}</b></li>' for style, label, value in legend
    )
    keys = f'<ul class="legend">{entries}</ul>' if legend else ""
    lead = f"<p>{esc(note)}</p>" if note else ""
    return (
        f'<figure class="card"><figcaption><h3>{esc(title)}</h3>{lead}</figcaption><div class="plot">{chart}</div>{keys}</figure>'
    )


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, label: str, foot: Sequence[Cell] = ()) -> str:
    """A table that scrolls inside its own box and, with JavaScript, sorts by a click on a heading."""
    head = f"<thead>{_group_row(columns)}<tr>{''.join(_heading(column) for column in columns)}</tr></thead>"
    body = "".join(_table_row(columns, row) for row in rows)
    last = f"<tfoot>{_table_row(columns, foot)}</tfoot>" if foot else ""
    return (
        f'<div class="scroll card" tabindex="0" role="region" aria-label="{esc(label)}">'
        f'<table class="sortable">{head}<tbody>{body}</tbody>{last}</table></div>'
    )


def folded(summary: str, body: str) -> str:
    """Something to open when wanted."""
    return f"<details><summary>{esc(summary)}</summary>{body}</details>"


def note(text: str) -> str:
    """A remark below a table or chart."""
    return f'<p class="note">{esc(text)}</p>'


def empty(text: str) -> str:
    """What stands where there is nothing to show."""
    return f'<p class="empty card">{esc(text)}</p>'


def pairs(entries: Sequence[tuple[str, str]], kind: str) -> str:
    """A list of names and values."""
    return (
        f'<dl class="{kind}">{"".join(f"<div><dt>{esc(name)}</dt><dd>{esc(value)}</dd></div>" for name, value in entries)}</dl>'
    )


def _lead(text: str) -> str:
    return f'<p class="lead">{esc(text)}</p>' if text else ""


def _heading(column: Column) -> str:
    return f'<th scope="col"{_numeric(column)}>{esc(column.label)}</th>'


def _group_row(columns: Sequence[Column]) -> str:
    if not any(column.group for column in columns):
        return ""
    cells, at = [], 0
    while at < len(columns):
        size = 1
        while columns[at].group and at + size < len(columns) and columns[at + size].group == columns[at].group:
            size += 1
        cells.append(f'<th colspan="{size}" scope="colgroup">{esc(columns[at].group)}</th>' if columns[at].group else "<td></td>")
        at += size
    return f'<tr class="groups">{"".join(cells)}</tr>'


def _table_row(columns: Sequence[Column], row: Sequence[Cell]) -> str:
    cells = [
        _cell(cell, column, "th" if first else "td")
        for cell, column, first in zip(row, columns, [True] + [False] * len(row), strict=False)
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _cell(cell: Cell, column: Column, tag: str) -> str:
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    scope = ' scope="row"' if tag == "th" else ""
    key = "" if cell.style is None else swatch(cell.style)
    return f"<{tag}{scope}{_numeric(column)}{value}>{key}{esc(cell.text)}</{tag}>"


def _numeric(column: Column) -> str:
    return ' class="n"' if column.numeric else ""

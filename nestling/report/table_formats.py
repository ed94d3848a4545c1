"""A table of results for the terminal, Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Column as RichColumn
from rich.table import Table

from nestling.report.result_rows import BEST, TIE, ResultColumn, ResultRow, blocks_of
from nestling.report.words import DASH

Rows = Sequence[ResultRow]
Columns = Sequence[ResultColumn]

LEGEND = "bold: the best of its column; underlined: not to be told from it over these seeds"


def terminal_form(rows: Rows, columns: Columns) -> Table:
    """For the terminal."""
    table = Table(
        RichColumn("method", overflow="fold"),
        "seeds",
        *(column.title for column in columns),
        caption=LEGEND if any(row.marks for row in rows) else None,
        caption_justify="left",
    )
    for block in blocks_of(rows):
        for row in block:
            cells = [_emphasised(row, column, "[bold]{}[/bold]", "[u]{}[/u]") for column in columns]
            table.add_row(escape(row.label), str(_seeds(row)), *cells)
        table.add_section()
    return table


def markdown(rows: Rows, columns: Columns, cautions: Sequence[str] = ()) -> str:
    """A Markdown table, and below it what is to be said of it."""
    lines = [_line(["method", "seeds", *(column.title for column in columns)])]
    lines.append("|---|" + "---:|" * (1 + len(columns)))
    for row in rows:
        cells = [_emphasised(row, column, "**{}**", "<u>{}</u>", _bare) for column in columns]
        lines.append(_line([_markdown_text(_label(row)), str(_seeds(row)), *cells]))
    legend = f"\n\n{LEGEND[0].upper()}{LEGEND[1:]}." if any(row.marks for row in rows) else ""
    remarks = "".join(f"\n- {_one_line(caution)}" for caution in cautions)
    return "\n".join(lines) + legend + ("\n" + remarks if remarks else "") + "\n"


def latex(rows: Rows, columns: Columns, cautions: Sequence[str] = ()) -> str:
    """A LaTeX table for booktabs: the best in bold, ties underlined; above it, as comments, what is
    to be said of it."""
    head = " & ".join(["Method", "Seeds", *(_latex_text(column.title) for column in columns)])
    lines = [
        *(f"% {_one_line(caution)}" for caution in cautions),
        f"% {LEGEND}; mean ± standard deviation (n - 1) over seeds",
        "% needs \\usepackage{booktabs}",
        f"\\begin{{tabular}}{{l{'r' * (1 + len(columns))}}}",
        "\\toprule",
        f"{head} \\\\",
    ]
    for block in blocks_of(rows):
        lines.append("\\midrule")
        for row in block:
            cells = [
                _emphasised(row, column, "\\textbf{{{}}}", "\\underline{{{}}}", _latex_text)
                for column in columns
            ]
            lines.append(" & ".join([_latex_text(_label(row)), str(_seeds(row)), *cells]) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


def as_csv(rows: Rows, columns: Columns) -> str:
    """A line for every setting: means and standard deviations as plain numbers."""
    names = list(dict.fromkeys(name for row in rows for name in row.studied))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    figures = [f"{column.key}_{kind}" for column in columns for kind in ("mean", "sd", "n")]
    writer.writerow(["label", "method", *names, "seeds", *figures])
    for row in rows:
        cells: list[Any] = []
        for column in columns:
            found = list(row.values.get(column.key, {}).values())
            cells += [
                statistics.fmean(found) if found else "",
                statistics.stdev(found) if len(found) > 1 else "",
                len(found),
            ]
        own = [row.studied.get(name, "") for name in names]
        writer.writerow([row.label, row.method, *own, _seeds(row), *cells])
    return text.getvalue()


def as_json(rows: Rows, columns: Columns, **more: Any) -> str:
    """Everything there is, seed by seed."""
    found = [
        {
            "label": row.label,
            "method": row.method,
            "studied": row.studied,
            "seeds": row.seeds,
            "runs": row.folders,
            "values": {
                column.key: {str(seed): value for seed, value in values.items()}
                for column in columns
                if (values := row.values.get(column.key))
            },
            "marks": row.marks,
        }
        for row in rows
    ]
    return json.dumps({"rows": found, **more}, indent=1) + "\n"


def _label(row: ResultRow) -> str:
    return _one_line(row.label)


def _seeds(row: ResultRow) -> int:
    return len(row.folders)


def _emphasised(
    row: ResultRow, column: ResultColumn, best: str, tie: str, form: Any = escape
) -> str:
    text = row.text(column)
    text = form(text) if text != DASH else "--" if form is _latex_text else DASH
    mark = row.marks.get(column.key)
    return best.format(text) if mark == BEST else tie.format(text) if mark == TIE else text


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _bare(text: str) -> str:
    return text


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_text(text: str) -> str:
    return text.replace("|", "\\|")


_LATEX = {
    "\\": r"\textbackslash{}",
    "%": r"\%",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "$": r"\$",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "²": r"$^2$",
    "µ": r"$\mu$",
    "α": r"$\alpha$",
    "…": r"\ldots{}",
    "–": "--",
}


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)

"""The part of a run's page about its boards: firmware that trained, what it took, and what its link
went through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from nestling.report.folder import Run
from nestling.report.markup import Cell, Column, note, section, table
from nestling.report.words import duration, energy, memory, number, plural, short, whole

Row = Mapping[str, Any]
_COLUMNS = (
    "Client",
    "Jobs",
    "Parameters",
    "RAM used",
    "RAM there",
    "Stack",
    "Instructions a job",
    "~Time a job",
    "~Energy a job",
)
_LINK = ("frames", "sent again", "restarts")


def boards_part(run: Run) -> Markup:
    """A line for every board; nothing where there are none."""
    clients: dict[object, list[Row]] = {}
    for row in run.boards:
        clients.setdefault(row.get("client"), []).append(row)
    if not clients:
        return Markup("")
    columns = [
        Column("Board", numeric=False),
        *(Column(name) for name in _COLUMNS),
        *(Column(name, group="Link") for name in _LINK),
    ]
    # The smallest first, as the catalogue has them.
    ordered = sorted(
        clients.values(),
        key=lambda rows: (number(rows[-1].get("ram_there")) or 0, str(rows[-1].get("client"))),
    )
    body = table(columns, [_cells(rows) for rows in ordered], label="Boards")
    return section(
        "boards", "Boards that trained", _lead(run.boards, len(clients)), body + note(_MARKS)
    )


_MARKS = (
    "~ marks an estimate: instructions were counted in emulation, and time and energy "
    "follow from the device's clock and power."
)


def _lead(rows: Sequence[Row], boards: int) -> str:
    checked = sum(row.get("verified") is True for row in rows)
    text = f"{plural(boards, 'board')} ran the firmware and did {plural(len(rows), 'job')}."
    return (
        f"{text} {whole(checked)} of the answers were compared with the same C on the host: bit "
        "for bit equal."
        if checked
        else text
    )


def _cells(rows: Sequence[Row]) -> list[Cell]:
    last = rows[-1]
    figures = [
        (last.get("client"), whole),
        (len(rows), whole),
        (last.get("parameters"), whole),
        (_most(rows, "ram"), memory),
        (last.get("ram_there"), memory),
        (_most(rows, "stack"), memory),
        (last.get("instructions"), short),
        (last.get("estimated_seconds"), duration),
        (last.get("estimated_joules"), energy),
        *((_sum(rows, key), whole) for key in ("frames", "resent", "restarts")),
    ]
    return [
        Cell(str(last.get("board", ""))),
        *(Cell(form(value), number(value)) for value, form in figures),
    ]


def _most(rows: Sequence[Row], key: str) -> float | None:
    return max((found for row in rows if (found := number(row.get(key))) is not None), default=None)


def _sum(rows: Sequence[Row], key: str) -> float:
    return sum(number(row.get(key)) or 0 for row in rows)

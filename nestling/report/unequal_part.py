"""How unequal clients are: the personal score of all, of the worst tenth and of the worst, and
who the worst are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from nestling.report.charts import ROUNDS, chart, score_axis
from nestling.report.folder import Run, listed, mapping, of_classes
from nestling.report.markup import Cell, Column, note, table
from nestling.report.svg import INK, Series
from nestling.report.words import DASH, number, percent, whole

Row = Mapping[str, Any]
_SPREAD = (("personal_tenth", "A tenth do not reach"), ("personal_worst", "The worst client"))


def unequal_chart(run: Run, word: str) -> Markup:
    """Mean, tenth and worst over rounds; nothing where rounds do not say them."""
    lines = [Series(label, _points(run, key), style) for style, (key, label) in enumerate(_SPREAD)]
    if not any(line.points for line in lines):
        return Markup("")
    mean = [
        (float(record["round"]), found)
        for record in run.metrics
        if (found := number(record.get("personal_score"))) is not None
    ]
    return chart(
        [Series("All clients", mean, INK), *lines],
        title="How unequal clients are",
        note=f"Personal {word}: the mean, what a tenth of the tested clients do not reach, and "
        "the worst.",
        x=ROUNDS,
        y=score_axis(word),
        ident="c-unequal",
        nothing="not evaluated in this run.",
    )


def _points(run: Run, key: str) -> list[tuple[float, float]]:
    return [
        (float(record["round"]), found)
        for record in run.metrics
        if (found := number(mapping(record, "metrics").get(key))) is not None
    ]


def worst_clients(run: Run, word: str, rows: Sequence[Row]) -> Markup:
    """Who was worst when clients were tested last; nothing where no round says it."""
    told = [(record, listed(record, "worst_clients")) for record in run.metrics]
    record, worst = next((entry for entry in reversed(told) if entry[1]), ({}, []))
    known = [entry for entry in worst if number(entry.get("client")) is not None]
    if not known:
        return Markup("")
    places = _places(run)
    labels = {row["tier"]: (row["label"], index) for index, row in enumerate(rows)}
    columns = [Column("Client"), Column("Tier", numeric=False), Column(f"Personal {word}")]
    kinds = "Its classes" if of_classes(run) else "Its kinds"
    columns += [Column("Its rows"), Column(kinds), Column("Rounds it took part in")]
    turns = _turns(run)
    body = [_cells(entry, places, labels, turns) for entry in known]
    listing = table(columns, body, label="The worst clients")
    return listing + note(f"The worst of the clients tested after round {whole(record['round'])}.")


def _cells(
    entry: Row,
    places: Mapping[int, Row],
    labels: Mapping[str, tuple[str, int]],
    turns: Mapping[int, int],
) -> list[Cell]:
    client = int(number(entry.get("client")) or 0)
    known = places.get(client, {})
    label, style = labels.get(str(known.get("tier")), (DASH, None))
    told = known.get("counts")
    counts = [number(count) or 0 for count in told] if isinstance(told, list) else []
    value = number(entry.get("personal_score"))
    return [
        Cell(whole(client), client),
        Cell(label, style=style),
        Cell(percent(value, 2), value),
        Cell(whole(sum(counts)) if counts else DASH, sum(counts) if counts else None),
        Cell(whole(sum(count > 0 for count in counts)) if counts else DASH),
        Cell(whole(turns.get(client, 0)), turns.get(client, 0)),
    ]


def _places(run: Run) -> dict[int, Row]:
    """What is known of clients' rows, for those that the run pictures."""
    found = listed(mapping(run.federation, "split"), "clients")
    return {int(entry["id"]): entry for entry in found if number(entry.get("id")) is not None}


def _turns(run: Run) -> dict[int, int]:
    counts: dict[int, int] = {}
    for record in run.metrics:
        chosen = record.get("clients")
        for client in chosen if isinstance(chosen, list) else []:
            if (found := number(client)) is not None:
                counts[int(found)] = counts.get(int(found), 0) + 1
    return counts

"""The part of a run's page that tells who trained what, when and why: clients down, rounds
across."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from nestling.report.drawing import box, clamp, frame, hover_text, tag, text_at
from nestling.report.fleet_parts import tier_groups
from nestling.report.folder import Run, listed, mapping
from nestling.report.history import MARKS, HistoryCell, Turn, binned, mark_words, turns_of
from nestling.report.markup import fill, section
from nestling.report.svg import SvgGroup, shade, style_class
from nestling.report.words import percent, plural, whole

Row = Mapping[str, Any]
_MOST_COLUMNS, _MOST_ROWS, _LEVELS = 200, 100, 12
_TOP, _STRIP = 4.0, 6.0
_LEAD = (
    "A row is a client, grouped by tier, a column a round. The stronger the colour, the larger the "
    "part of the model that the client trained; a cell stays empty where it was not chosen."
)


def history_part(run: Run, rows: Sequence[Row]) -> Markup:
    """The section; nothing of a run without rounds, or whose rounds do not say who took part."""
    turns = turns_of(run)
    clients = _clients(run, turns, rows)
    if not turns or not clients:
        return Markup("")
    groups = tier_groups(
        clients,
        {row["tier"]: index for index, row in enumerate(rows)},
        {row["tier"]: row["label"] for row in rows},
    )
    every = -(-len(run.metrics) // _MOST_COLUMNS)
    spans = [
        range(at, min(at + every, len(run.metrics))) for at in range(0, len(run.metrics), every)
    ]
    ids = [int(client["id"]) for client in clients]
    cells = [[_cell(turns, client, span) for span in spans] for client in ids]
    numbers = [int(record["round"]) for record in run.metrics]
    names = [_span_name(numbers[span[0]], numbers[span[-1]]) for span in spans]
    return section("history", "Who trained what, and when", _LEAD, _figure(
        cells, ids, names, groups, _notes(run, turns, ids, every)
    ))  # fmt: skip


def _figure(
    cells: Sequence[Sequence[HistoryCell | None]],
    ids: Sequence[int],
    names: Sequence[str],
    groups: Sequence[SvgGroup],
    notes: Sequence[str],
) -> Markup:
    title = "What each client trained in each round"
    seen = {cell.mark for row in cells for cell in row if cell is not None and cell.mark}
    desc = (
        f"{plural(len(ids), 'client')} down, {plural(len(names), 'column')} of rounds across; the "
        "stronger a cell's colour, the larger the trained part of the model."
    )
    return fill(
        "history.html",
        title=title,
        image=history_map(cells, ids, names, groups, title=title, desc=desc, ident="c-history"),
        groups=groups,
        shades=[(percent(share, 0), f"{shade(share, 1):.2f}") for share in (0.05, 0.25, 0.5, 1.0)],
        marks=[(_key(mark), mark_words(mark)) for mark in MARKS if mark in seen],
        notes=notes,
    )


def history_map(
    cells: Sequence[Sequence[HistoryCell | None]],
    ids: Sequence[int],
    names: Sequence[str],
    groups: Sequence[SvgGroup],
    *,
    title: str,
    desc: str,
    ident: str,
) -> Markup:
    """The picture. Cells of one shade are one path, and what they say is a table beside them: a
    thousand rounds of a hundred clients stay small."""
    wide, tall = clamp(940 / len(names), 4.5, 32), clamp(620 / len(ids), 7, 18)
    left = 26 + 7.2 * max(len(str(client)) for client in ids)
    across, down = wide * len(names), tall * len(ids)
    body = [box(left, _TOP, across, down, class_="field")]
    body += _tier_strips(groups, left - _STRIP - 4, tall)
    body += _cell_paths(cells, left, wide, tall)
    body += _row_names(ids, left - _STRIP - 10, tall)
    body += _round_names(names, left, wide, _TOP + down)
    told = [["client", *names], *_table(cells, ids)]
    return frame(
        "heat history",
        left + across + 2,
        _TOP + down + 40,
        title,
        desc,
        ident,
        body,
        told,
        width=f"{left + across + 2:.0f}",
        height=f"{_TOP + down + 40:.0f}",
        data_place=f"{left:.1f} {_TOP:.1f} {wide:.3f} {tall:.3f}",
    )


def _cell_paths(
    cells: Sequence[Sequence[HistoryCell | None]], left: float, wide: float, tall: float
) -> list[Markup]:
    shades: dict[int, list[str]] = {}
    marks: dict[str, list[str]] = {}
    w, h = wide - (1 if wide > 8 else 0.5), tall - 1
    for r, row in enumerate(cells):
        for c, cell in enumerate(row):
            if cell is None:
                continue
            x, y = left + c * wide, _TOP + r * tall
            if cell.share is not None:
                level = max(1, round(_LEVELS * shade(cell.share, 1)))
                shades.setdefault(level, []).append(f"M{x:.1f} {y:.1f}h{w:.1f}v{h:.1f}h-{w:.1f}z")
            if cell.mark:
                marks.setdefault(cell.mark, []).append(_mark(cell.mark, x, y, w, h))
    drawn = [
        tag("path", class_="cell mark", d="".join(d), fill_opacity=f"{level / _LEVELS:.2f}")
        for level, d in sorted(shades.items())
    ]
    return drawn + [
        tag("path", class_=f"mark said {mark}", d="".join(marks[mark]))
        for mark in MARKS[::-1]
        if mark in marks
    ]


def _mark(mark: str, x: float, y: float, w: float, h: float) -> str:
    """What is drawn over a cell."""
    if mark == "refused":
        return f"M{x:.1f} {y:.1f}l{w:.1f} {h:.1f}m0 -{h:.1f}l-{w:.1f} {h:.1f}"
    if mark in ("dropped", "late"):
        return f"M{x + 0.7:.1f} {y + 0.7:.1f}h{w - 1.4:.1f}v{h - 1.4:.1f}h-{w - 1.4:.1f}z"
    if mark == "clipped":
        return f"M{x + w:.1f} {y:.1f}v{h * 0.7:.1f}l-{min(w, h) * 0.7:.1f} -{h * 0.7:.1f}z"
    low = min(2.0, h / 6)
    return f"M{x:.1f} {y + h:.1f}v-{low:.1f}h{w:.1f}v{low:.1f}z"


def _key(mark: str) -> Markup:
    """The legend's key for a mark."""
    field = box(0, 0, 14, 14, class_="field")
    drawn = tag("path", class_=f"said {mark}", d=_mark(mark, 0, 0, 14, 14))
    size = {"viewBox": "0 0 14 14", "width": 14, "height": 14, "aria_hidden": "true"}
    return tag("svg", field, drawn, class_="shade", **size)


def _tier_strips(groups: Sequence[SvgGroup], x: float, tall: float) -> list[Markup]:
    strips, at = [], _TOP
    for group in groups:
        size = tall * group.columns
        place = {
            "x": f"{x:.1f}",
            "y": f"{at:.1f}",
            "width": 6,
            "height": f"{size - 1:.1f}",
            "rx": 2,
        }
        kind = f"strip {style_class(group.style)}"
        strips.append(tag("rect", hover_text(group.label), class_=kind, **place))
        at += size
    return strips


def _row_names(ids: Sequence[int], right: float, tall: float) -> list[Markup]:
    every = -(-13 // int(tall)) if tall < 13 else 1
    return [
        text_at("tick", right, _TOP + (r + 0.5) * tall + 4, str(client), text_anchor="end")
        for r, client in enumerate(ids)
        if r % every == 0
    ]


def _round_names(names: Sequence[str], left: float, wide: float, below: float) -> list[Markup]:
    every = -int(-(14 + 7 * max(len(_first(name)) for name in names)) // wide)
    ticks = [
        text_at("tick", left + (c + 0.5) * wide, below + 16, _first(name), text_anchor="middle")
        for c, name in enumerate(names)
        if c % every == 0
    ]
    return [*ticks, text_at("axis", left, below + 34, "round")]


def _first(name: str) -> str:
    return name.partition(" ")[0]


def _span_name(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _table(cells: Sequence[Sequence[HistoryCell | None]], ids: Sequence[int]) -> list[list[str]]:
    return [
        [str(client), *(cell.text if cell else "" for cell in row)]
        for client, row in zip(ids, cells, strict=True)
    ]


def _cell(turns: Mapping[tuple[int, int], Turn], client: int, span: range) -> HistoryCell | None:
    found = [turn for at in span if (turn := turns.get((client, at))) is not None]
    return binned(found) if found else None


def _clients(
    run: Run, turns: Mapping[tuple[int, int], Turn], rows: Sequence[Row]
) -> list[dict[str, Any]]:
    """Those whose tier is known, grouped by it; where nothing is said of tiers, those who took
    part."""
    order = {row["tier"]: index for index, row in enumerate(rows)}
    known = [
        {"id": int(client["id"]), "tier": client.get("tier")}
        for client in listed(mapping(run.federation, "split"), "clients")
        if type(client.get("id")) is int
    ]
    known = known or [{"id": client} for client in sorted({client for client, _ in turns})]
    known.sort(key=lambda client: order.get(str(client.get("tier")), len(order)))
    return known[:_MOST_ROWS]


def _notes(
    run: Run, turns: Mapping[tuple[int, int], Turn], ids: Sequence[int], every: int
) -> list[str]:
    notes = []
    hidden = len({client for client, _ in turns} - set(ids))
    if hidden:
        notes.append(f"Not shown: {plural(hidden, 'more client')} that took part.")
    if every > 1:
        notes.append(
            f"A column is {every} rounds; metrics.jsonl holds all {whole(len(run.metrics))}."
        )
    return notes

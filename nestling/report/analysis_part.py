"""The part of a run's page that compares the clients' models, where the run folder holds an
analysis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from markupsafe import Markup

from nestling.report.fleet_parts import tier_groups
from nestling.report.folder import Run, listed, mapping, of_classes
from nestling.report.markup import Cell, Column, empty, figure, fill, scrolling, section, table
from nestling.report.svg import INK, MARKERS, Dot, SvgGroup, dot_key, pair_map, point_map
from nestling.report.words import DASH, decimal, number, percent, plural, whole

Row = Mapping[str, Any]
Matrix = list[list[float | None]]
_STAGES = {
    "first": "first convolution",
    "middle": "middle convolution",
    "last": "last convolution",
    "features": "features",
    "logits": "logits",
}
_CKA = (
    "Shares of one: 1 where two clients hold the same inputs alike, 0 where they have nothing "
    "in common."
)
_SEES = (
    "A point is a test row as a client sees it; near points are held alike. Names stand in "
    "the middle of their class, or kind."
)
_SAYS = (
    "A point is a test row's class scores from one client; near points are scored alike. "
    "Names stand in the middle of their class."
)


@dataclass(frozen=True)
class _Clients:
    """Whose models were compared, in the order of the matrices: names, tiers' places among the
    tiers, and runs of one tier."""

    names: list[str]
    tiers: list[str]
    styles: list[int]
    groups: list[SvgGroup]
    word: str  # for what rows are told apart by


def analysis_part(run: Run, rows: Sequence[Row]) -> Markup:
    """How alike the clients' models are; nothing where there is no analysis."""
    found = run.analysis
    entries = listed(found, "clients")
    if not entries:
        return Markup("")
    order = {row["tier"]: index for index, row in enumerate(rows)}
    labels = {row["tier"]: row["label"] for row in rows}
    clients = _Clients(
        [str(entry.get("id", index)) for index, entry in enumerate(entries)],
        [labels.get(str(entry.get("tier")), str(entry.get("tier"))) for entry in entries],
        [order.get(str(entry.get("tier")), INK) for entry in entries],
        tier_groups(entries, order, labels),
        "class" if of_classes(run) else "kind",
    )
    body = fill(
        "analysis.html",
        heats=list(_heat_maps(found, clients)),
        groups=clients.groups,
        maps=list(_point_maps(found, clients)),
        classes=_class_keys(found, clients),
        clients=[
            (dot_key(INK, index), *who)
            for index, who in enumerate(zip(clients.names, clients.tiers, strict=True))
        ],
        shapes_again=len(clients.names) > len(MARKERS),
        table=_client_table(found, entries, clients),
        remarks=_list(found.get("notes")),
    )
    return section("analysis", "The clients' models compared", _lead(run), body)


def _lead(run: Run) -> str:
    rows, at = len(_list(run.analysis.get("rows"))), number(run.analysis.get("round"))
    parts = [
        f"{plural(len(listed(run.analysis, 'clients')), 'client')} on {plural(rows, 'row')} of "
        "the test set"
    ]
    if at is not None:
        parts.append(f"after round {whole(at)}")
        played = int(run.metrics[-1]["round"]) if run.metrics else 0
        if played > at:
            parts.append(f"while the run has played {plural(played, 'round')}")
    return ", ".join(parts) + "."


def _heat_maps(found: Row, clients: _Clients) -> Iterator[Markup]:
    said = mapping(found, "agreement")
    yield from _heat(
        said.get("equal"),
        clients,
        "Same answer",
        "Share of rows that two clients give the same class.",
        "equal",
        percent,
    )
    yield from _heat(
        said.get("js"),
        clients,
        "Distance of the answers",
        "Mean Jensen-Shannon divergence of the softmaxes in bits: 0 for the same, 1 for nothing "
        "in common.",
        "js",
        lambda value: f"{decimal(value)} bits",
    )
    stages = mapping(found, "cka")
    for stage, name in _STAGES.items():
        yield from _heat(stages.get(stage), clients, f"CKA, {name}", _CKA, f"cka-{stage}", decimal)


def _heat(
    values: object,
    clients: _Clients,
    title: str,
    remark: str,
    ident: str,
    tell: Callable[[object], str],
) -> Iterator[Markup]:
    """The figure of one matrix, where there is one."""
    square = _square(values, len(clients.names))
    pairs = [
        (value, a, b)
        for a, row in enumerate(square)
        for b, value in enumerate(row)
        if value is not None and a < b
    ]
    if not pairs:
        return
    low, high = min(pairs), max(pairs)
    names = clients.names
    desc = (
        f"{remark} {plural(len(names), 'client')} by the same clients. Mean of two different "
        f"ones {tell(mean(p[0] for p in pairs))}; "
        f"lowest {tell(low[0])}, clients {names[low[1]]} and {names[low[2]]}; "
        f"highest {tell(high[0])}, clients {names[high[1]]} and {names[high[2]]}."
    )
    image = pair_map(
        square,
        names=names,
        groups=clients.groups,
        tell=tell,
        title=title,
        desc=desc,
        ident=f"c-{ident}",
    )
    yield figure(title, remark, (), scrolling(title, image))


def _point_maps(found: Row, clients: _Clients) -> Iterator[Markup]:
    for one in listed(found, "maps"):
        stage = str(one.get("stage"))
        dots, labels = _dots(one, found, clients)
        if not dots or stage not in _STAGES:
            continue
        title = f"Map of the {_STAGES[stage]}"
        remark = f"{_SAYS if stage == 'logits' else _SEES} Made by {one.get('how') or DASH}."
        desc = (
            f"{remark} {plural(len(dots), 'point')}; the table below has the numbers that do "
            "not need to be seen."
        )
        yield figure(
            title,
            remark,
            (),
            point_map(dots, labels, title=title, desc=desc, ident=f"c-map-{stage}"),
        )


def _dots(
    one: Row, found: Row, clients: _Clients
) -> tuple[list[Dot], list[tuple[float, float, str]]]:
    """The points of a map and, for each class, its name where the middle of its points is."""
    classes, names, test_rows = (
        _list(found.get("labels")),
        _list(found.get("kinds")),
        _list(found.get("rows")),
    )
    dots, by_class = [], dict[int, list[Dot]]()
    for who, places in zip(_list(one.get("clients")), _list(one.get("at")), strict=False):
        client = _index(who, len(clients.names))
        for at, place in zip(_list(one.get("rows")), _list(places), strict=False):
            row = _index(at, len(classes))
            label = _index(classes[row], 10**6) if row is not None else None
            spot = [number(v) for v in _list(place)]
            if (
                client is None
                or row is None
                or label is None
                or len(spot) != 2
                or spot[0] is None
                or spot[1] is None
            ):
                continue
            which = f", test row {test_rows[row]}" if row < len(test_rows) else ""
            told = (
                f"client {clients.names[client]} ({clients.tiers[client]}), {clients.word} "
                f"{_name(names, label)}{which}"
            )
            dots.append(Dot(spot[0], spot[1], label, client, told))
            by_class.setdefault(label, []).append(dots[-1])
    middles = [(*_middle(some), _name(names, label)) for label, some in by_class.items()]
    return dots, middles


def _middle(dots: Sequence[Dot]) -> tuple[float, float]:
    """The point that lies nearest to the middle of all, so that a class of several clusters is
    named in one of them."""
    x, y = median(dot.x for dot in dots), median(dot.y for dot in dots)
    nearest = min(dots, key=lambda dot: (dot.x - x) ** 2 + (dot.y - y) ** 2)
    return nearest.x, nearest.y


def _class_keys(found: Row, clients: _Clients) -> list[tuple[Markup, str]]:
    """What the colours stand for, once for all maps."""
    drawn = sorted(
        {dot.colour for one in listed(found, "maps") for dot in _dots(one, found, clients)[0]}
    )
    names = _list(found.get("kinds"))
    return [(dot_key(label, 0), _name(names, label)) for label in drawn]


def _client_table(found: Row, entries: Sequence[Row], clients: _Clients) -> Markup:
    said, size = mapping(found, "agreement"), len(entries)
    right = [number(value) for value in _list(said.get("right"))]
    columns = [
        Column("Client", numeric=False),
        Column("Tier", numeric=False),
        Column("Parameters"),
        Column("Right"),
    ]
    columns += [
        Column(name, group="With the others, mean")
        for name in ("same answer", "JS, bits", "CKA, features")
    ]
    matrices = [
        _square(said.get("equal"), size),
        _square(said.get("js"), size),
        _square(mapping(found, "cka").get("features"), size),
    ]
    body = []
    for index, entry in enumerate(entries):
        with_others = [_others(matrix, index) for matrix in matrices]
        own = right[index] if index < len(right) else None
        body.append(
            [
                Cell(clients.names[index], style=clients.styles[index]),
                Cell(clients.tiers[index]),
                Cell(whole(entry.get("params")), number(entry.get("params"))),
                Cell(percent(own), own),
                Cell(percent(with_others[0]), with_others[0]),
                *(Cell(decimal(value), value) for value in with_others[1:]),
            ]
        )
    return (
        table(columns, body, label="The clients' models compared")
        if body
        else empty("No client was compared.")
    )


def _others(matrix: Matrix, index: int) -> float | None:
    known = (
        [value for other, value in enumerate(matrix[index]) if value is not None and other != index]
        if matrix
        else []
    )
    return mean(known) if known else None


def _square(values: object, size: int) -> Matrix:
    """A matrix of that many clients, or nothing where a file does not hold one."""
    found = [[number(value) for value in _list(row)] for row in _list(values)]
    return found if len(found) == size and all(len(row) == size for row in found) else []


def _name(names: Sequence[object], label: int) -> str:
    return str(names[label]) if label < len(names) else str(label)


def _index(value: object, size: int) -> int | None:
    found = number(value)
    return int(found) if found is not None and found == int(found) and 0 <= found < size else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []

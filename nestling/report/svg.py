"""Charts as static SVG text: lines, heat maps, bars against a limit, a map of points.

Pure functions without a plotting library. Colours are classes (`s0` … `s7`, `ink`) that the page's
style sheet fills in for light and dark; a series is told apart by its dash and its marker as well,
never by colour alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from nestling.report.drawing import Rows, box, clamp, cut_short, frame, hover_text, tag, text_at

COLOURS = 8
DASHES = ("", "7 3", "2 3", "9 3 2 3", "13 4")
MARKERS = ("circle", "square", "triangle", "diamond", "down", "plus", "cross")
INK = -1
"""The style of the series that stands for everybody: ink-coloured, heavier, solid."""

_WIDTH, _HEIGHT = 520, 316
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 20, 16, 50
_MOST_POINTS = 400
_MOST_MARKERS = 12
_MOST_TITLED_CELLS = 5000
_ROOM_FOR_A_NUMBER = 30
_CLOSEST_MARKS = 0.06  # of the height, for the text of a tick


@dataclass(frozen=True)
class Series:
    """One line of a chart. `band` holds (x, low, high) around the line."""

    label: str
    points: Sequence[tuple[float, float]]
    style: int
    band: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class Axis:
    """How one direction of a chart reads: `form` writes a tick, `tell` a read-out; `floor` and
    `ceiling` bound the range. `steps` are those from tick to tick that are round where decimal
    ones are not, such as two hours. `places` spreads values unevenly, with ticks at `marks`, where
    that tells them apart."""

    label: str
    form: Callable[[float], str]
    tell: Callable[[float], str]
    floor: float | None = None
    ceiling: float | None = None
    from_zero: bool = False
    integers: bool = False
    steps: Sequence[float] = ()
    places: Callable[[float], float] | None = None
    marks: Sequence[float] = ()


@dataclass(frozen=True)
class Bar:
    """One need against one limit. `share` is need / limit, None where nothing limits it."""

    label: str
    share: float | None
    text: str


@dataclass(frozen=True)
class SvgGroup:
    """Neighbouring columns of a heat map that belong together."""

    label: str
    style: int
    columns: int


@dataclass(frozen=True)
class Dot:
    """A point of a map: where, what its colour and its shape stand for, and what is said of it.
    Colours past the last come again as outlines."""

    x: float
    y: float
    colour: int
    shape: int
    note: str


def line_chart(
    series: Sequence[Series], *, title: str, desc: str, x: Axis, y: Axis, ident: str
) -> Markup:
    """A line chart of every series that has a point; `ident` keeps the ids of one page apart."""
    drawn = [one for one in series if one.points]
    if not drawn:
        raise ValueError("a line chart needs at least one point")
    x_ticks = ticks(
        *_span([at for s in drawn for at, _ in s.points], x),
        count=5,
        integers=x.integers,
        steps=x.steps,
    )
    highs, bent = _heights(drawn), is_bent(drawn, y)
    y_ticks = (
        _marks_around(highs, y)
        if bent
        else ticks(*_span(highs, y, pad=0.03), count=5, integers=y.integers)
    )
    x_range = _x_range(drawn, x, x_ticks)
    y_range = (min(y_ticks[0], *highs), max(y_ticks[-1], *highs))
    across = _scale(x_range, (_LEFT, _WIDTH - _RIGHT))
    up = _scale(y_range, (_HEIGHT - _BOTTOM, _TOP), y.places if bent else None)
    inside = [tick for tick in x_ticks if x_range[0] <= tick <= x_range[1]]
    body = _grid(inside, y_ticks, across, up, x, y)
    body += [_band(one, across, up) for one in drawn if one.band]
    # that of everybody is the widest and lies below: one that is equal to it is seen inside it
    for one in sorted(drawn, key=lambda s: s.style != INK):
        body += _line(one, across, up, x, y)
    read_out = [
        {"label": s.label, "style": style_class(s.style), "at": _read_out(s, across, up, x, y)}
        for s in drawn
    ]
    told = json.dumps(read_out, separators=(",", ":"))
    rows = _rows_of(drawn, x, y)
    return frame("lines", _WIDTH, _HEIGHT, title, desc, ident, body, rows, data_read_out=told)


def heat_map(
    counts: Sequence[Sequence[float]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    across: str,
    tell: Callable[[int, int], str],
    groups: Sequence[SvgGroup],
    title: str,
    desc: str,
    ident: str,
) -> Markup:
    """`counts[row][column]` as a map; `across` says what a column is, `tell` what is said of the
    cell in a row and column, and `groups` marks runs of neighbouring columns. Shades go by the
    square root of a count."""
    tall, wide = clamp(560 / max(len(rows), 1), 7, 24), clamp(980 / max(len(columns), 1), 9, 50)
    left = 14 + 7.2 * max((len(cut_short(name)) for name in rows), default=1)
    top = 14.0
    width, height = left + wide * len(columns) + 2, top + tall * len(rows) + 40
    most = max((value for row in counts for value in row), default=0)
    titled = sum(1 for row in counts for value in row if value) <= _MOST_TITLED_CELLS
    body = [box(left, top, wide * len(columns), tall * len(rows), class_="field")]
    body += _group_strips(groups, left, wide)
    for r, name in enumerate(rows):
        y = top + r * tall
        if r % math.ceil(13 / tall) == 0:
            body.append(
                text_at("tick", left - 7, y + tall / 2 + 4, cut_short(name), text_anchor="end")
            )
        for c, value in enumerate(counts[r]):
            if value > 0:
                note = tell(r, c) if titled else ""
                body.append(_heat_cell(left + c * wide, y, wide, tall, shade(value, most), note))
    body += _column_names(columns, across, left, wide, top + tall * len(rows))
    return frame(
        "heat",
        width,
        height,
        title,
        desc,
        ident,
        body,
        [["", *columns], *([name, *row] for name, row in zip(rows, counts, strict=True))],
        width=f"{width:.0f}",
        height=f"{height:.0f}",
    )


def pair_map(
    values: Sequence[Sequence[float | None]],
    *,
    names: Sequence[str],
    groups: Sequence[SvgGroup],
    tell: Callable[[float], str],
    title: str,
    desc: str,
    ident: str,
) -> Markup:
    """`values[row][column]`, from 0 to 1, of every two clients, written into the cells where there
    is room; None leaves a gap."""
    size = clamp(400 / max(len(names), 1), 10, 40)
    left, top = 14 + 7.2 * max((len(cut_short(name)) for name in names), default=1), 14.0
    side = size * len(names)
    written = size >= _ROOM_FOR_A_NUMBER
    # Text in a cell stays readable on the strongest shade, light or dark.
    strongest = 0.55 if written else 1.0
    body = [box(left, top, side, side, class_="field")]
    body += _group_strips(groups, left, size)
    for r, name in enumerate(names):
        y = top + r * size
        if r % math.ceil(13 / size) == 0:
            body.append(
                text_at("tick", left - 7, y + size / 2 + 4, cut_short(name), text_anchor="end")
            )
        for c, value in enumerate(values[r]):
            if value is None:
                continue
            x = left + c * size
            note = f"clients {name} and {names[c]}: {tell(value)}"
            body.append(_heat_cell(x, y, size, size, strongest * clamp(value, 0, 1), note))
            if written:
                body.append(_label("in", x + (size - 1) / 2, y + size / 2 + 3.5, f"{value:.2f}"))
    body += _column_names(names, "client", left, size, top + side)
    width, height = left + side + 2, top + side + 40
    return frame(
        "heat",
        width,
        height,
        title,
        desc,
        ident,
        body,
        [["", *names], *([name, *row] for name, row in zip(names, values, strict=True))],
        width=f"{width:.0f}",
        height=f"{height:.0f}",
    )


def point_map(
    dots: Sequence[Dot],
    labels: Sequence[tuple[float, float, str]],
    *,
    title: str,
    desc: str,
    ident: str,
) -> Markup:
    """Points in the plane, both directions in the same measure, with words where they belong."""
    if not dots:
        raise ValueError("a map needs at least one point")
    width, height, edge = 520, 400, 14
    xs, ys = [dot.x for dot in dots], [dot.y for dot in dots]
    by = (
        max((max(xs) - min(xs)) / (width - 2 * edge), (max(ys) - min(ys)) / (height - 2 * edge))
        or 1.0
    )
    middle = ((max(xs) + min(xs)) / 2, (max(ys) + min(ys)) / 2)

    def place(x: float, y: float) -> tuple[float, float]:
        return width / 2 + (x - middle[0]) / by, height / 2 - (y - middle[1]) / by

    body = [tag("rect", class_="field", x=0, y=0, width=width, height=height, rx=6)]
    body += [_shape(*place(dot.x, dot.y), dot.shape, _colour(dot.colour), dot.note) for dot in dots]
    for x, y, text in labels:
        across, down = place(x, y)
        body.append(_label("label", across, down + 4, cut_short(text)))
    rows: Rows = [["x", "y", "what"], *([dot.x, dot.y, dot.note] for dot in dots)]
    return frame("points", width, height, title, desc, ident, body, rows)


def dot_key(colour: int, shape: int) -> Markup:
    """The legend's key for a dot of a map; colour `INK` where only the shape counts."""
    kind = style_class(INK) if colour == INK else _colour(colour)
    return _key(14, _shape(7, 7, shape, kind))


def bars(rows: Sequence[Bar], *, title: str, desc: str, ident: str) -> Markup:
    """Horizontal bars, each filled to the share of its limit; a share above one is drawn full and
    marked as over."""
    width, step = 280, 44
    body = []
    for index, row in enumerate(rows):
        y = index * step
        body += [
            tag("text", row.label, class_="name", x=0, y=y + 15),
            tag("text", row.text, class_="value", x=width, y=y + 15, text_anchor="end"),
            tag("rect", class_="track", x=0, y=y + 23, width=width, height=8, rx=4),
        ]
        if row.share:
            # A sliver stays visible: a GPU that uses a thousandth of its memory still uses some.
            filled = max(3.0, width * min(row.share, 1.0))
            state = "over" if row.share > 1 else "close" if row.share > 0.9 else "ok"
            size = {"width": f"{filled:.1f}", "height": 8, "rx": f"{min(4.0, filled / 2):.1f}"}
            body.append(tag("rect", class_=f"mark fill {state}", x=0, y=y + 23, **size))
    told: Rows = [
        ["what", "share", "in words"],
        *([row.label, row.share, row.text] for row in rows),
    ]
    return frame("bars", width, step * len(rows) - 8, title, desc, ident, body, told)


def is_bent(series: Sequence[Series], axis: Axis) -> bool:
    """Whether the axis spreads these lines unevenly: where what an even one has in its lower half
    is then in the lowest quarter."""
    values = _heights(series)
    low, high = min(values), max(values)
    if axis.places is None or low == high:
        return False
    return _scale((low, high), (0, 1), axis.places)((low + high) / 2) < 0.25


def swatch(style: int) -> Markup:
    """The legend's key for one style: a piece of the line with its marker."""
    line = tag(
        "path", class_=f"line {style_class(style)}", d="M1 7H33", stroke_dasharray=_dash(style)
    )
    return _key(34, line, _marker(17, 7, style))


def style_class(style: int) -> str:
    """The style-sheet class that colours a style."""
    return "ink" if style == INK else f"s{style % COLOURS}"


def shade(value: float, most: float) -> float:
    """The opacity of a heat-map cell."""
    return 0.08 + 0.92 * math.sqrt(value / most) if most > 0 and value > 0 else 0.0


def ticks(
    low: float, high: float, *, count: int, integers: bool = False, steps: Sequence[float] = ()
) -> list[float]:
    """About `count` round numbers that cover low … high; between the least and the most of `steps`
    one of these apart."""
    # A span too small to be cut into steps is no span.
    if high - low <= 1e-12 * max(1.0, abs(low)):
        high = max(high, low + (abs(low) * 0.1 if abs(low) > 1e-12 else 1.0))
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    if steps and steps[0] <= rough <= steps[-1]:
        step = next(own for own in steps if own >= rough * 0.999)
    if integers:
        step = max(1.0, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def thin(
    points: Sequence[tuple[float, float]], most: int = _MOST_POINTS
) -> list[tuple[float, float]]:
    """At most about `most` points that keep the first, the last, and the lowest and highest of each
    stretch between."""
    if len(points) <= most:
        return list(points)
    inner, stretch = points[1:-1], math.ceil(2 * (len(points) - 2) / (most - 2))
    kept = [points[0]]
    for start in range(0, len(inner), stretch):
        part = range(start, min(start + stretch, len(inner)))
        ends = {min(part, key=lambda i: inner[i][1]), max(part, key=lambda i: inner[i][1])}
        kept += [inner[i] for i in sorted(ends)]
    return [*kept, points[-1]]


def _heights(series: Sequence[Series]) -> list[float]:
    """What lines and their bands reach."""
    edges = [edge for one in series for _, *pair in one.band for edge in pair]
    return [value for one in series for _, value in one.points] + edges


def _marks_around(values: Sequence[float], axis: Axis) -> list[float]:
    """The marks of an uneven axis that lie around these values, without those for which there is
    no room."""
    first = max((mark for mark in axis.marks if mark <= min(values)), default=axis.marks[0])
    last = min((mark for mark in axis.marks if mark >= max(values)), default=axis.marks[-1])
    at = _scale((first, last), (0, 1), axis.places)
    kept = [last]
    for mark in reversed([mark for mark in axis.marks if first <= mark < last]):
        if at(kept[-1]) - at(mark) >= _CLOSEST_MARKS and (
            mark == first or at(mark) >= _CLOSEST_MARKS
        ):
            kept.append(mark)
    return kept[::-1]


def _span(values: Sequence[float], axis: Axis, pad: float = 0.0) -> tuple[float, float]:
    low, high = min(values), max(values)
    if axis.from_zero:
        low = min(low, 0.0)
    extra = pad * ((high - low) or abs(high) or 1.0)
    low, high = low if axis.from_zero else low - extra, high + extra
    # A bound keeps the padding sensible; it never hides a value that lies outside it.
    low = low if axis.floor is None else min(max(low, axis.floor), min(values))
    return low, high if axis.ceiling is None else max(min(high, axis.ceiling), max(values))


def _x_range(drawn: Sequence[Series], x: Axis, x_ticks: Sequence[float]) -> tuple[float, float]:
    """The data's own span, so that lines use the whole width; ticks mark round numbers inside
    it."""
    values = [at for s in drawn for at, _ in s.points]
    low, high = 0.0 if x.from_zero else min(values), max(values)
    return (low, high) if high > low else (x_ticks[0], x_ticks[-1])


def _scale(
    source: tuple[float, float],
    target: tuple[float, float],
    places: Callable[[float], float] | None = None,
) -> Callable[[float], float]:
    place = places or float
    low, high = map(place, source)
    span = (high - low) or 1.0
    return lambda value: target[0] + (place(value) - low) / span * (target[1] - target[0])


def _grid(
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    across: Callable[[float], float],
    up: Callable[[float], float],
    x: Axis,
    y: Axis,
) -> list[Markup]:
    floor, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick in y_ticks:
        parts.append(tag("path", class_="grid", d=f"M{_LEFT} {up(tick):.1f}H{right}"))
        parts.append(
            tag(
                "text",
                y.form(tick),
                class_="tick",
                x=_LEFT - 8,
                y=f"{up(tick) + 4:.1f}",
                text_anchor="end",
            )
        )
    for tick in x_ticks:
        at = across(tick)
        place, anchor = (right + 10, "end") if at > right - 18 else (at, "middle")
        parts.append(tag("path", class_="grid", d=f"M{at:.1f} {floor}v5"))
        parts.append(
            tag(
                "text",
                x.form(tick),
                class_="tick",
                x=f"{place:.1f}",
                y=floor + 21,
                text_anchor=anchor,
            )
        )
    middle = f"{(_LEFT + right) / 2:.0f}"
    return [
        *parts,
        tag("path", class_="base", d=f"M{_LEFT} {floor}H{right}"),
        tag("text", x.label, class_="axis", x=middle, y=_HEIGHT - 8, text_anchor="middle"),
    ]


def _line(
    one: Series, across: Callable[[float], float], up: Callable[[float], float], x: Axis, y: Axis
) -> list[Markup]:
    points = thin(one.points)
    path = "M" + "L".join(f"{across(at):.1f} {up(value):.1f}" for at, value in points)
    line = tag(
        "path",
        class_=f"mark line {style_class(one.style)}",
        d=path,
        stroke_dasharray=_dash(one.style),
    )
    every = math.ceil(len(points) / _MOST_MARKERS)
    markers = [
        _marker(across(at), up(value), one.style, f"{one.label}, {x.tell(at)}: {y.tell(value)}")
        for at, value in points[::-1][::every]
    ]
    return [line, *markers] if len(points) > 1 else markers


def _band(one: Series, across: Callable[[float], float], up: Callable[[float], float]) -> Markup:
    lows = [f"{across(at):.1f} {up(low):.1f}" for at, low, _ in one.band]
    highs = [f"{across(at):.1f} {up(high):.1f}" for at, _, high in one.band]
    return tag(
        "path",
        class_=f"band {style_class(one.style)}",
        d=f"M{'L'.join([*highs, *reversed(lows)])}Z",
    )


def _read_out(
    one: Series, across: Callable[[float], float], up: Callable[[float], float], x: Axis, y: Axis
) -> list[list[float | str]]:
    return [
        [round(across(at), 1), round(up(value), 1), x.tell(at), y.tell(value)]
        for at, value in thin(one.points)
    ]


def _rows_of(drawn: Sequence[Series], x: Axis, y: Axis) -> list[list[object]]:
    """The points that are drawn, as numbers."""
    banded = any(one.band for one in drawn)
    rows: list[list[object]] = [["series", x.label, y.label, *(["low", "high"] if banded else [])]]
    for one in drawn:
        edges = {at: pair for at, *pair in one.band}
        for at, value in thin(one.points):
            rows.append([one.label, at, value, *(edges.get(at, ["", ""]) if banded else [])])
    return rows


def _group_strips(groups: Sequence[SvgGroup], left: float, wide: float) -> list[Markup]:
    strips, at = [], left
    for group in groups:
        size = wide * group.columns
        kind, width = f"strip {style_class(group.style)}", f"{max(size - 1, 1):.1f}"
        strips.append(
            tag(
                "rect",
                tag("title", group.label),
                class_=kind,
                x=f"{at:.1f}",
                y=2,
                width=width,
                height=6,
                rx=2,
            )
        )
        at += size
    return strips


def _column_names(
    columns: Sequence[str], across: str, left: float, wide: float, below: float
) -> list[Markup]:
    """As many of the names as there is room for, and what they are."""
    short = [cut_short(name) for name in columns]
    every = math.ceil((10 + 7 * max((len(name) for name in short), default=1)) / wide)
    names = [
        text_at("tick", left + (c + 0.5) * wide, below + 17, name, text_anchor="middle")
        for c, name in enumerate(short)
        if c % every == 0
    ]
    return [*names, text_at("axis", left, below + 35, across)]


def _heat_cell(x: float, y: float, wide: float, tall: float, opacity: float, note: str) -> Markup:
    return box(
        x,
        y,
        wide - 1,
        tall - 1,
        hover_text(note),
        class_="cell mark",
        fill_opacity=f"{opacity:.2f}",
    )


def _colour(number: int) -> str:
    return style_class(number) + (" hollow" if number // COLOURS % 2 else "")


def _marker(x: float, y: float, style: int, note: str = "") -> Markup:
    return _shape(x, y, 0 if style == INK else style, style_class(style), note)


def _shape(x: float, y: float, shape: int, kind: str, note: str = "") -> Markup:
    r = 3.4
    path = {
        "circle": f"m{-r} 0a{r} {r} 0 1 0 {2 * r} 0a{r} {r} 0 1 0 {-2 * r} 0z",
        "square": f"m{-r} {-r}h{2 * r}v{2 * r}h{-2 * r}z",
        "triangle": f"m0 {-r - 1}l{r + 0.8} {2 * r}h{-2 * r - 1.6}z",
        "diamond": f"m0 {-r - 1.2}l{r + 1.2} {r + 1.2}l{-r - 1.2} {r + 1.2}l{-r - 1.2} {-r - 1.2}z",
        "down": f"m0 {r + 1}l{r + 0.8} {-2 * r}h{-2 * r - 1.6}z",
        "plus": "m-1.2 -4.4h2.4v3.2h3.2v2.4h-3.2v3.2h-2.4v-3.2h-3.2v-2.4h3.2z",
        "cross": "m0 -1.7l2.4 -2.4l1.7 1.7l-2.4 2.4l2.4 2.4l-1.7 1.7l-2.4 -2.4l-2.4 2.4l-1.7 "
        "-1.7l2.4 -2.4l-2.4 -2.4l1.7 -1.7z",
    }[MARKERS[shape % len(MARKERS)]]
    return tag("path", hover_text(note), class_=f"mark dot {kind}", d=f"M{x:.1f} {y:.1f}{path}")


def _dash(style: int) -> str | None:
    return None if style == INK else DASHES[style % len(DASHES)] or None


def _key(width: int, *inside: Markup) -> Markup:
    box = f"0 0 {width} 14"
    return tag(
        "svg", *inside, class_="swatch", viewBox=box, width=width, height=14, aria_hidden="true"
    )


def _label(kind: str, x: float, y: float, text: str) -> Markup:
    """Text inside a chart, which a screen reader finds elsewhere."""
    return text_at(kind, x, y, text, text_anchor="middle", aria_hidden="true")

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nestling.report.charts import BENT, ROUNDS, SCORE, SECONDS, chart
from nestling.report.svg import (
    INK,
    Axis,
    Bar,
    Series,
    SvgGroup,
    bars,
    heat_map,
    line_chart,
    style_class,
    swatch,
    thin,
    ticks,
)

X = Axis("round", str, str, integers=True)
Y = Axis("accuracy", str, str, floor=0, ceiling=1)
finite = st.floats(min_value=-1e9, max_value=1e9, allow_nan=False, width=32)


def draw(series: list[Series], y: Axis = Y) -> ET.Element:
    return ET.fromstring(line_chart(series, title="T", desc="D", x=X, y=y, ident="c"))


@example([(1, 0.0), (2, 5e-324)])
@given(
    st.lists(
        st.tuples(st.integers(1, 10_000), st.floats(0, 1)),
        min_size=1,
        max_size=60,
        unique_by=lambda p: p[0],
    )
)
def test_every_line_stays_inside_the_chart(points: list[tuple[float, float]]) -> None:
    root = draw([Series("a", sorted(points), 0)])
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    lines = [
        path.attrib["d"] for path in root.iter("path") if "line" in path.attrib["class"].split()
    ]
    assert len(lines) == (len(points) > 1)
    for line in lines:
        for pair in line[1:].split("L"):
            x, y = map(float, pair.split())
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_higher_values_are_drawn_higher_and_later_ones_further_right() -> None:
    root = draw([Series("a", [(1, 0.2), (2, 0.9)], 0)])
    line = next(
        path.attrib["d"] for path in root.iter("path") if "line" in path.attrib["class"].split()
    )
    (x1, y1), (x2, y2) = (map(float, pair.split()) for pair in line[1:].split("L"))
    assert x2 > x1
    assert y2 < y1


@example([0.1, 0.999, 1.0])
@example([0.0, 1.0])
@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_an_uneven_axis_keeps_order_and_has_room_for_its_ticks(values: list[float]) -> None:
    root = draw([Series("a", list(enumerate(values)), 0)], SCORE)
    (line,) = (path for path in root.iter("path") if "line" in path.attrib["class"].split())
    heights = [float(pair.split()[1]) for pair in line.attrib["d"][1:].split("L")]
    assert all(0 <= height <= 316 for height in heights)
    ranked = [height for _, height in sorted(zip(values, heights, strict=True))]
    assert ranked == sorted(ranked, reverse=True)
    told = [text for text in root.iter("text") if str(text.text).endswith("%")]
    ats = [float(text.attrib["y"]) for text in told]
    assert len(ats) >= 2
    assert all(below - above >= 12 for below, above in pairwise(ats))
    shares = [float(str(text.text)[:-1]) / 100 for text in told]
    assert shares == sorted(shares)
    assert shares[0] <= min(values) + 1e-6 and max(values) - 1e-6 <= shares[-1]


def test_accuracies_that_end_close_together_are_told_apart() -> None:
    """Unevenly where an even axis would have them on one line, and then the chart says so."""

    def heights(values: list[float]) -> list[float]:
        root = draw([Series("a", list(enumerate(values)), 0)], SCORE)
        (line,) = (path for path in root.iter("path") if "line" in path.attrib["class"].split())
        return [float(pair.split()[1]) for pair in line.attrib["d"][1:].split("L")]

    def noted(values: list[float]) -> bool:
        lines = [Series("a", list(enumerate(values)), 0)]
        words = {"title": "T", "note": "", "ident": "c", "nothing": ""}
        return BENT in chart(lines, x=ROUNDS, y=SCORE, **words)

    learned = [0.42, 0.91, 0.95, 0.96, 0.98]
    first, *_, before, last = heights(learned)
    assert before - last > 0.15 * (first - last)  # evenly it would be a thirtieth
    assert noted(learned)
    close = [0.91, 0.95, 0.93]
    first, high, low = heights(close)
    assert (low - high) / (first - high) == pytest.approx(0.5, abs=0.01)
    assert not noted(close)


def test_a_chart_says_what_it_shows() -> None:
    root = draw([Series("a", [(1, 0.2)], 0)])
    named = {
        element.attrib["id"]: element.text
        for element in root.iter()
        if element.tag in ("title", "desc") and "id" in element.attrib
    }
    assert [named[ident] for ident in root.attrib["aria-labelledby"].split()] == ["T", "D"]


def test_neighbouring_styles_differ_in_more_than_colour() -> None:
    def shape(style: int) -> str:
        return swatch(style).replace(style_class(style), "")

    assert len({shape(style) for style in range(35)}) == 35
    assert shape(0) != shape(8)
    assert style_class(INK) not in {style_class(style) for style in range(40)}


def test_a_chart_without_points_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        draw([Series("a", [], 0)])


@example(0.0, -2.9e-33, 2, False)
@given(finite, finite, st.integers(2, 8), st.booleans())
def test_ticks_cover_the_range_in_even_steps(
    a: float, b: float, count: int, integers: bool
) -> None:
    low, high = sorted((a, b))
    found = ticks(low, high, count=count, integers=integers)
    assert 2 <= len(found) <= count + 3
    span = max(abs(low), abs(high), found[1] - found[0])
    assert found[0] <= low + 1e-6 * span
    assert found[-1] >= high - 1e-6 * span
    steps = [after - before for before, after in pairwise(found)]
    assert all(math.isclose(step, steps[0], rel_tol=1e-3, abs_tol=1e-9 * span) for step in steps)
    assert not integers or all(tick == round(tick) for tick in found)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (26_460, ["0 s", "2 h", "4 h", "6 h", "8 h"]),
        (600, ["0 s", "2 min", "4 min", "6 min", "8 min", "10 min"]),
        (75, ["0 s", "20 s", "40 s", "1 min", "1 min 20 s"]),
        (4, ["0 s", "1 s", "2 s", "3 s", "4 s"]),
        (300_000, ["0 s", "1 d", "2 d", "3 d", "4 d"]),
    ],
)
def test_time_is_marked_in_round_hours_and_minutes(seconds: float, told: list[str]) -> None:
    found = ticks(0, seconds, count=5, steps=SECONDS.steps)
    assert [SECONDS.form(at) for at in found] == told


def test_thinning_keeps_the_ends_and_the_extremes() -> None:
    points = [(float(n), math.sin(n / 50)) for n in range(10_000)]
    points[4321] = (4321.0, 9.0)
    points[8765] = (8765.0, -9.0)
    kept = thin(points, 400)
    assert len(kept) <= 402
    assert kept == sorted(kept)
    assert {points[0], points[-1], (4321.0, 9.0), (8765.0, -9.0)} <= set(kept)


def test_a_bar_is_as_long_as_its_share_and_says_when_it_is_over() -> None:
    rows = [
        Bar("RAM", 0.5, "half"),
        Bar("Flash", 1.5, "too much"),
        Bar("Time", None, "no limit"),
        Bar("Disk", 0.0, "none"),
    ]
    root = ET.fromstring(bars(rows, title="T", desc="D", ident="b"))
    full = float(root.attrib["viewBox"].split()[2])
    fills = [
        (float(r.attrib["width"]) / full, r.attrib["class"].split()[-1])
        for r in root.iter("rect")
        if "fill" in r.attrib["class"].split()
    ]
    assert fills == [(0.5, "ok"), (1.0, "over")]


def test_a_heat_map_draws_what_is_there_and_darker_for_more() -> None:
    image = heat_map(
        [[0, 1], [4, 2]],
        rows=["a", "b"],
        columns=["0", "1"],
        across="house",
        tell=lambda row, column: f"{'ab'[row]} in {column}",
        groups=[SvgGroup("g", 0, 2)],
        title="T",
        desc="D",
        ident="h",
    )
    cells = {
        c.find("title").text: float(c.attrib["fill-opacity"])
        for c in ET.fromstring(image).iter("rect")
        if "cell" in c.attrib["class"]
    }
    assert list(cells) == ["a in 1", "b in 0", "b in 1"]
    assert cells["a in 1"] < cells["b in 1"] < cells["b in 0"] == 1.0
    assert ET.fromstring(image).find("text[@class='axis']").text == "house"


def test_text_is_escaped() -> None:
    hostile = "<b>&\"'"
    root = draw([Series(hostile, [(1, 0.5), (2, 0.6)], 0)])
    assert root.find(".//b") is None
    assert hostile in root.attrib["data-read-out"].replace('\\"', '"')

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

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


def draw(series: list[Series]) -> ET.Element:
    return ET.fromstring(line_chart(series, title="T", desc="D", x=X, y=Y, ident="c"))


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

"""The part of the page that compares the clients' models."""

from __future__ import annotations

import html
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.errors import InputError
from nestling.report.page import write_analysis_page, write_report
from nestling.report.svg import COLOURS, INK, Dot, SvgGroup, dot_key, pair_map, point_map
from tests.report.made_up_run import change, write_analysis, write_run
from tests.report.test_report_page import HOSTILE, outline, places, poisoned

finite = st.floats(-1e6, 1e6, allow_nan=False)


def analysed(folder: Path, **shape: int) -> Path:
    return write_analysis(write_run(folder), **shape)


def charts(page: Path) -> dict[str, ET.Element]:
    """Every chart of a page by its ident."""
    found = re.findall(r'<svg class="chart .*?</svg>', page.read_text(), re.S)
    roots = [ET.fromstring(text) for text in found]
    return {root.attrib["aria-labelledby"].split("-title")[0]: root for root in roots}


def test_a_run_without_an_analysis_has_no_such_part(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path))
    assert "models compared" not in page.read_text() and "#analysis" not in page.read_text()
    with pytest.raises(InputError, match="nestling analyse"):
        write_analysis_page(tmp_path, tmp_path / "a.html")


def test_the_part_tells_what_the_analysis_holds(tmp_path: Path) -> None:
    page = write_report(analysed(tmp_path))
    text, drawn = outline(page).text, charts(page)
    for words in (
        "The clients' models "
        "compared", "5 clients on 20 rows of the test set, after "
                    "round 20.", "Same answer", "CKA, features",
        "CKA, first convolution", "Map of the logits", "Made by t-SNE", "client 12 (",
        "Client 99 is left out.", "1,004", "50.0%",
    ):  # fmt: skip
        assert words in text, words
    assert "CKA, last" not in text
    assert {
        "c-equal",
        "c-js",
        "c-cka-first",
        "c-cka-features",
        "c-map-features",
        "c-map-logits",
        "c-map-first",
    } <= set(drawn)
    found = json.loads((tmp_path / "analysis.json").read_text())
    notes = [title.text for title in drawn["c-equal"].iter("title")]
    assert f"clients 10 and 13: {100 * found['agreement']['equal'][0][3]:.1f}%" in notes
    cells = {
        ident: sum(r.attrib["class"] == "cell mark" for r in drawn[ident].iter("rect"))
        for ident in ("c-equal", "c-cka-first")
    }
    assert cells == {"c-equal": 25, "c-cka-first": 16}  # a client without convolutions leaves a gap
    dots = [
        p.find("title").text
        for p in drawn["c-map-features"].iter("path")
        if "dot" in p.attrib["class"].split()
    ]
    assert len(dots) == 50 and dots[0] == "client 10 (STM32F446RE), class c0, test row 100"


def test_the_desc_says_in_words_what_a_heat_map_shows(tmp_path: Path) -> None:
    page = write_report(analysed(tmp_path))
    matrix = json.loads((tmp_path / "analysis.json").read_text())["cka"]["features"]
    pairs = {(matrix[a][b], a, b) for a in range(5) for b in range(a + 1, 5)}
    low, high = min(pairs), max(pairs)
    desc = next(d.text for d in charts(page)["c-cka-features"].iter("desc"))
    assert desc is not None
    assert f"lowest {low[0]:.4g}, clients {10 + low[1]} and {10 + low[2]}" in desc
    assert f"highest {high[0]:.4g}, clients {10 + high[1]} and {10 + high[2]}" in desc


def test_the_page_of_its_own_is_whole(tmp_path: Path) -> None:
    page = write_analysis_page(analysed(tmp_path / "r"), tmp_path / "a.html")
    found = outline(page)
    assert [attrs["href"] for tag, attrs in found.tags if tag == "a"] == ["#analysis"]
    assert "HeteroFL" in found.text and not re.search(r"url\(|@import|https?://", page.read_text())
    idents = [attrs["id"] for _, attrs in found.tags if "id" in attrs]
    assert len(idents) == len(set(idents))


def test_everything_from_the_file_is_escaped(tmp_path: Path) -> None:
    folder = analysed(tmp_path)
    document = json.loads((folder / "analysis.json").read_text())
    stages = [one["stage"] for one in document["maps"]]
    document = poisoned(document)
    for one, stage in zip(document["maps"], stages, strict=True):
        one["stage"] = stage
    (folder / "analysis.json").write_text(json.dumps(document))
    found = outline(write_report(folder))
    names = [tag for tag, _ in found.tags]
    assert names.count("script") == 1 and "img" not in names
    assert not any(key.startswith("on") for _, attrs in found.tags for key in attrs)
    assert HOSTILE.replace("\ud800", "").replace("&amp;", "&") in html.unescape(found.text)


def test_no_field_of_the_wrong_kind_stops_the_report(tmp_path: Path) -> None:
    folder = write_analysis(
        write_run(tmp_path, rounds=2, clients=3, classes=3), clients=3, rows=4, classes=2
    )
    path = folder / "analysis.json"
    document = path.read_text()
    odd: list[Any] = [None, "x", [], {}, -1, True, [None], {"a": 1}, 1.5, 10**400]
    for count, way in enumerate(places(json.loads(document))):
        for value in (odd[count % len(odd)], odd[(3 * count + 7) % len(odd)]):
            changed = inner = json.loads(document)
            for key in way[:-1]:
                inner = inner[key]
            inner[way[-1]] = value
            path.write_text(json.dumps(changed))
            write_report(folder)


def test_a_large_analysis_stays_a_page_one_can_open(tmp_path: Path) -> None:
    page = write_report(analysed(tmp_path, clients=40, rows=100, classes=100))
    assert page.stat().st_size < 4_000_000
    assert "shapes come again" in outline(page).text
    change(tmp_path / "analysis.json", maps=[], cka={}, agreement={})
    assert "Parameters" in outline(write_report(tmp_path)).text


def test_a_pair_map_is_stronger_for_more_and_writes_numbers_where_there_is_room() -> None:
    def draw(values: list[list[float | None]]) -> ET.Element:
        names = [str(n) for n in range(len(values))]
        groups = [SvgGroup("g", 0, len(values))]
        return ET.fromstring(
            pair_map(values, names=names, groups=groups, tell=str, title="T", desc="D", ident="h")
        )

    root = draw([[1.0, 0.25], [-0.5, None]])
    cells = {
        r.find("title").text: float(r.attrib["fill-opacity"])
        for r in root.iter("rect")
        if "cell" in r.attrib["class"]
    }
    assert cells == {
        "clients 0 and 0: 1.0": 0.55,
        "clients 0 and 1: 0.25": 0.14,
        "clients 1 and 0: -0.5": 0.0,
    }
    assert [t.text for t in root.iter("text") if t.attrib["class"] == "in"] == [
        "1.00",
        "0.25",
        "-0.50",
    ]
    many = draw([[0.5] * 30] * 30)
    assert not [t for t in many.iter("text") if t.attrib["class"] == "in"]


@settings(deadline=None)
@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=30))
def test_every_point_of_a_map_stays_inside_it(spots: list[tuple[float, float]]) -> None:
    dots = [Dot(x, y, 0, 0, "n") for x, y in spots]
    root = ET.fromstring(point_map(dots, [(*spots[0], "a<b")], title="T", desc="D", ident="m"))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    drawn = [path.attrib["d"] for path in root.iter("path")]
    assert len(drawn) == len(spots)
    for d in drawn:
        x, y = map(float, re.match(r"M([-\d.]+) ([-\d.]+)", d).groups())  # type: ignore[union-attr]
        assert 0 <= x <= width and 0 <= y <= height


def test_a_map_keeps_both_directions_in_one_measure() -> None:
    dots = [Dot(x, y, 0, 0, "") for x, y in ((0, 0), (2, 0), (0, 1))]
    drawn = [
        p.attrib["d"]
        for p in ET.fromstring(point_map(dots, [], title="T", desc="D", ident="m")).iter("path")
    ]
    (x0, y0), (x1, y1), (x2, y2) = (
        map(float, re.match(r"M([-\d.]+) ([-\d.]+)", d).groups()) for d in drawn
    )  # type: ignore[union-attr]
    assert (x1 - x0) == pytest.approx(2 * (y0 - y2), abs=0.3) and y1 == y0 and x2 == x0 and y2 < y0
    with pytest.raises(ValueError, match="at least one point"):
        point_map([], [], title="T", desc="D", ident="m")


def test_sixteen_classes_have_keys_of_their_own() -> None:
    assert len({dot_key(label, 0) for label in range(2 * COLOURS)}) == 2 * COLOURS
    assert len({dot_key(INK, client) for client in range(7)}) == 7

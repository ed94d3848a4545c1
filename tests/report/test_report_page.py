from __future__ import annotations

import ast
import contextlib
import html
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import nestling.report
from nestling.errors import InputError
from nestling.report.page import write_comparison, write_report
from tests.report.made_up_run import change, write_run

PACKAGE = Path(nestling.report.__file__).parent
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Outline(HTMLParser):
    """Every start tag with its attributes, the text of the page, and whether tags close in
    order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def outline(path: Path) -> Outline:
    return Outline(path.read_text(encoding="utf-8"))


def pages(folder: Path) -> list[Path]:
    """One page of each kind, of made-up runs."""
    runs = [
        write_run(folder / "a"),
        write_run(folder / "b", seed=1),
        write_run(folder / "c", method="fedavg", title="FedAvg"),
    ]
    return [
        write_report(runs[0]),
        write_report(write_run(folder / "half", done=4)),
        write_comparison(runs, folder / "all.html"),
    ]


def test_the_page_tells_the_whole_story(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path))
    assert page == tmp_path / "report.html"
    summary = json.loads((tmp_path / "summary.json").read_text())
    text = outline(page).text
    for kind in ("global_score", "personal_score"):
        assert f"{100 * summary[kind]['last']:.1f}%" in text
        assert f"{100 * summary[kind]['best']:.1f}%" in text
    for words in (
        "HeteroFL", "mnist12k", "tinycnn", "20 rounds, finished", "9.6 MB", "10.2 MB",
        "20 min 30 s", "16 s", "Refused 1",
        "Late 2", "Dropped 0", "Accuracy by tier over "
                               "rounds", "Accuracy by tier over "
                                         "bytes", "Personal accuracy over rounds",
        "What each device trains and why it fits", "60 KB of 128 KB (47%)", "Bound by RAM",
        "the next larger piece (0.25) is too "
        "much", "Dirichlet split with α = 0.5; 20 clients; 100 public samples", "~0.31 J",
        "~ marks an estimate", '[method] name = "heterofl"', "1f0c2ab", "2.13.0",
    ):  # fmt: skip
        assert words in text, words


def test_charts_are_named_and_drawn(tmp_path: Path) -> None:
    for page in pages(tmp_path):
        found = outline(page)
        idents = [attrs["id"] for _, attrs in found.tags if "id" in attrs]
        assert len(idents) == len(set(idents))
        charts = [
            attrs
            for tag, attrs in found.tags
            if tag == "svg" and "chart" in str(attrs.get("class")).split()
        ]
        assert len(charts) >= 4
        for chart in charts:
            assert set(str(chart["aria-labelledby"]).split()) <= set(idents)


def test_charts_over_rounds_and_over_bytes_have_their_own_axis(tmp_path: Path) -> None:
    found = outline(write_report(write_run(tmp_path)))
    read_outs = {
        str(attrs["aria-labelledby"]).split("-title")[0]: attrs["data-read-out"]
        for _, attrs in found.tags
        if "data-read-out" in attrs
    }
    ends = {
        ident: [one["at"][-1][2] for one in json.loads(str(read_outs[ident]))]
        for ident in ("c-rounds", "c-bytes", "c-personal")
    }
    assert ends == {
        "c-rounds": ["round 20"] * 5,
        "c-bytes": ["19.8 MB"] * 5,
        "c-personal": ["round 20"] * 5,
    }


def drawn(page: Path, ident: str) -> ET.Element:
    """The chart of a page whose ids begin with `ident`."""
    charts = re.findall(r'<svg class="chart.*?</svg>', page.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = (chart for chart in charts if f'id="{ident}-title"' in chart)
    # XML would make spaces of the tabs and line breaks in attributes
    return ET.fromstring(found.replace("\t", "&#9;").replace("\n", "&#10;"))


def test_the_axis_of_accuracies_is_the_datas(tmp_path: Path) -> None:
    """It covers what was measured and not much more, wherever that lies."""
    folder = write_run(tmp_path)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    values = []
    for record in records:
        for block in (record, *record["by_tier"].values()):
            if block["global_score"] is not None:
                block["global_score"] = 0.9 + 0.05 * block["global_score"]
                values.append(100 * block["global_score"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    chart = drawn(write_report(folder), "c-rounds")
    told = [str(text.text) for text in chart.iterfind("text[@class='tick']")]
    ticks = [float(text[:-1]) for text in told if text.endswith("%")]
    step = ticks[1] - ticks[0]
    assert len(ticks) >= 4
    assert ticks[0] <= min(values) < ticks[0] + 1.5 * step
    assert ticks[-1] - 1.5 * step < max(values) <= ticks[-1]


def test_the_global_line_stands_out_from_those_of_the_tiers(tmp_path: Path) -> None:
    lines = drawn(write_report(write_run(tmp_path)), "c-rounds").findall("path")
    kinds = [str(one.get("class")).split() for one in lines]
    order = [kind[-1] for kind in kinds if "line" in kind]
    assert sorted(order) == ["ink", "s0", "s1", "s2", "s3"]
    assert order[0] == "ink"  # drawn first: a tier whose line is the same is seen inside it
    (line,) = (one for one in lines if one.get("class") == "mark line ink")
    assert line.get("stroke-dasharray") is None
    css = (PACKAGE / "page.css").read_text()
    thin, thick = (
        float(re.search(rf"^\.{kind} \{{[^}}]*stroke-width: ([\d.]+)", css, re.M)[1])  # type: ignore[index]
        for kind in ("line", r"line\.ink")
    )
    assert thick >= thin + 2  # a pixel on either side of a tier's that is the same


def test_hovering_over_what_was_taken_for_what(tmp_path: Path) -> None:
    folder = write_run(tmp_path, classes=2)
    matrix = [[31, 5], [0, 24]]
    found = {"macro_f1": {"last": 0.9, "best": 0.9, "best_round": 20}}
    change(folder / "summary.json", metrics=found, by_class={"confusion": matrix})
    split = json.loads((folder / "federation.json").read_text())["split"]
    change(folder / "federation.json", split={**split, "kinds": ["a", "b"]})
    page = write_report(folder)
    chart = drawn(page, "c-confusion")
    cells = [
        cell.find("title").text for cell in chart.iter("rect") if cell.find("title") is not None
    ]
    assert cells == ["class a recognised: 31", "class a taken for b: 5", "class b recognised: 24"]
    words = [text.text for text in chart.iter("text")]
    assert words == ["a", "b", "a", "b", "taken for"]
    section = re.search(r'<section id="metrics".*?</section>', page.read_text(), re.DOTALL)
    assert section is not None
    shown = Outline(section[0]).text
    assert "What rows of a class were taken for A row is a class of the test rows" in shown
    assert "Test rows:" in shown and "Samples" not in shown and "client" not in " ".join(words)


def test_the_page_fetches_nothing(tmp_path: Path) -> None:
    for page in pages(tmp_path):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"url\(|@import|@font-face|https?://|//[a-z]+\.", text, re.IGNORECASE)
        for tag, attrs in outline(page).tags:
            assert not {"src", "srcset", "action", "poster", "background", "xlink:href"} & set(
                attrs
            ), tag
            if tag == "link":
                assert attrs["rel"] == "icon"
                assert str(attrs["href"]).startswith("data:image/svg+xml;base64,")
            elif "href" in attrs:
                assert str(attrs["href"]).startswith("#")


def test_links_lead_to_parts_of_the_page(tmp_path: Path) -> None:
    for page in pages(tmp_path):
        found = outline(page)
        idents = {attrs.get("id") for _, attrs in found.tags}
        assert {str(attrs["href"])[1:] for tag, attrs in found.tags if tag == "a"} <= idents


HOSTILE = (
    "\"'><img src=x onerror=alert(1)></script></style></title><script>alert(1)</script>&amp;\ud800"
)


def poisoned(value: Any) -> Any:
    """`value` with every text replaced by something that would break out of careless HTML; names of
    fields stay."""
    if isinstance(value, dict):
        known = {"name", "by_tier", "f446", "f746", "pi4", "server"}
        return {
            key if key not in known or key in ("name", "by_tier") else key + HOSTILE: poisoned(
                entry
            )
            for key, entry in value.items()
        }
    if isinstance(value, list):
        return [poisoned(entry) for entry in value]
    return value + HOSTILE if isinstance(value, str) else value


def test_everything_from_a_file_is_escaped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r")
    for name in ("summary.json", "federation.json"):
        path = folder / name
        path.write_text(json.dumps(poisoned(json.loads(path.read_text()))))
    path = folder / "metrics.jsonl"
    path.write_text(
        "".join(
            json.dumps(poisoned(json.loads(line))) + "\n" for line in path.read_text().splitlines()
        )
    )
    hostile_text = HOSTILE.replace("\ud800", "")
    (folder / "experiment.toml").write_text(
        f"# {hostile_text}\n[data]\nname = '''{hostile_text}'''\n"
    )
    for page in (write_report(folder), write_comparison([folder], tmp_path / "all.html")):
        found = outline(page)
        names = [tag for tag, _ in found.tags]
        assert names.count("script") == 1
        assert names.count("style") == 1
        assert "img" not in names
        assert not any(key.startswith("on") for _, attrs in found.tags for key in attrs)
        assert hostile_text.replace("&amp;", "&") in html.unescape(found.text)


def test_a_single_evaluated_round_and_none_at_all_make_a_page(tmp_path: Path) -> None:
    assert (
        "1 of 20 rounds, not finished"
        in outline(write_report(write_run(tmp_path / "one", done=1))).text
    )
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "metrics.jsonl").write_text("")
    text = outline(write_report(tmp_path / "none")).text
    assert "0 rounds, not finished" in text
    assert "No round has finished yet." in text


def test_metrics_alone_make_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    for name in ("experiment.toml", "summary.json", "federation.json"):
        (folder / name).unlink()
    text = outline(write_report(folder)).text
    assert "does not record the split" in text
    assert "f446" in text


def test_a_method_without_a_global_model_says_so(tmp_path: Path) -> None:
    text = outline(write_report(write_run(tmp_path, global_model=False))).text
    assert "This method keeps no global model." in text
    assert "Accuracy by tier over bytes" not in text


def test_a_diverged_run_makes_a_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"round":1,"loss":2.0}\n{"round":2,"loss":NaN}\n{"round":3,"loss":Infinity,"clock_seconds":null}\n'
    )
    assert "nan" not in outline(write_report(tmp_path)).text.lower()


def test_a_device_that_nothing_fits_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    tier = {
        "name": "a",
        "ratio": 0,
        "params": 0,
        "need": None,
        "limits": {"ram": 8192, "flash": 1, "seconds": 0},
        "binding": "ram",
        "reasons": [],
    }
    change(folder / "federation.json", tiers=[tier])
    assert "Nothing fits, for lack of RAM" in outline(write_report(folder)).text


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every field of a JSON document, the first entry standing for its whole list."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:1])
        if isinstance(value, list)
        else ()
    )
    for key, entry in inner:
        yield (*at, key)
        yield from places(entry, (*at, key))


@pytest.mark.parametrize("name", ["summary.json", "federation.json", "metrics.jsonl"])
def test_no_field_of_the_wrong_kind_stops_the_report(tmp_path: Path, name: str) -> None:
    path = write_run(tmp_path, rounds=2, clients=3, classes=3) / name
    first, *rest = path.read_text().splitlines()
    odd = [None, "x", [], {}, -1, True, [None], {"a": 1}]
    for count, (*way, last) in enumerate(places(json.loads(first))):
        document = inner = json.loads(first)
        for key in way:
            inner = inner[key]
        inner[last] = odd[count % len(odd)]
        path.write_text("\n".join([json.dumps(document), *rest]) + "\n")
        refused = (name, last) == ("metrics.jsonl", "round")
        with pytest.raises(InputError) if refused else contextlib.nullcontext():
            write_report(tmp_path)


def test_a_long_run_of_many_clients_and_classes_stays_a_page_one_can_open(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path, rounds=5000, clients=300, classes=100))
    assert page.stat().st_size < 4_000_000
    text = outline(page).text
    assert "300 clients, 100 of them shown" in text
    assert "metrics.jsonl holds all 5,000" in text


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--out: cannot write"):
        write_comparison([write_run(tmp_path / "r")], tmp_path / "file" / "all.html")


def test_the_page_replaces_an_older_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    (folder / "report.html").write_text("old")
    before = set(folder.iterdir())
    write_report(folder)
    assert set(folder.iterdir()) == before
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_refused_run_leaves_the_older_page_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    write_report(folder)
    before = (folder / "report.html").read_bytes()
    (folder / "summary.json").write_text("{")
    with pytest.raises(InputError):
        write_report(folder)
    assert (folder / "report.html").read_bytes() == before


def test_the_same_files_make_the_same_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    assert write_report(folder).read_bytes() == write_report(folder).read_bytes()


def test_the_package_knows_of_nothing_but_files_errors_types_and_fairness() -> None:
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [n.name for n in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            for name in names:
                assert (
                    not name.startswith("nestling")
                    or name
                    in (
                        "nestling.errors",
                        "nestling.fair",
                        "nestling.files",
                        "nestling.runfiles",
                        "nestling.schema",
                    )
                    or name.startswith("nestling.report")
                ), (
                    path.name,
                    name,
                )
                assert not name.startswith(("torch", "numpy")), (path.name, name)


def colours(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6}|[^;]+);", block))


def test_both_dark_palettes_are_the_same() -> None:
    css = (PACKAGE / "page.css").read_text()
    automatic, chosen = (
        re.search(r':root:not\(\[data-theme="light"\]\) \{(.*?)\}', css, re.S),
        re.search(r':root\[data-theme="dark"\] \{(.*?)\}', css, re.S),
    )
    assert automatic is not None
    assert chosen is not None
    assert colours(automatic[1]) == colours(chosen[1])
    assert len(colours(chosen[1])) > 20


@pytest.mark.parametrize("selector", [r":root \{", r':root\[data-theme="dark"\] \{'])
def test_lines_and_text_stand_out_from_their_background(selector: str) -> None:
    found = re.search(selector + r"(.*?)\}", (PACKAGE / "page.css").read_text(), re.S)
    assert found is not None
    palette = colours(found[1])

    def light(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(name: str) -> float:
        low, high = sorted((light(palette[name]), light(palette["card"])))
        return (high + 0.05) / (low + 0.05)

    assert all(contrast(f"s{index}") >= 3 for index in range(8))
    assert all(contrast(name) >= 4.5 for name in ("ink", "soft", "accent", "good", "warn", "bad"))

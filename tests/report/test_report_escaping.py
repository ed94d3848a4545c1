"""Whatever a run's files say is text: on no page does it become markup, and no template is filled
in by it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from nestling.report.markup import Cell, Column, fill, note, pairs, section, source, table
from nestling.report.page import write_analysis_page, write_comparison, write_report
from nestling.report.templating import environment
from tests.report.made_up_run import TIERS, change, write_analysis, write_run
from tests.report.test_report_page import PACKAGE, outline

HOSTILE = "<evil onclick='x' class=\"y\">&amp;\n{{ 7 * 7 }}{% raw %}"
ESCAPED = "&lt;evil onclick=&#39;x&#39; class=&#34;y&#34;&gt;&amp;amp;\n{{ 7 * 7 }}{% raw %}"
# what a file says of them is found by these names
KEPT = {"first", "features", "logits", *(tier["name"] for tier in TIERS)}
TEMPLATES = sorted((PACKAGE / "templates").glob("*.html"))


def poison(value: Any, marks: dict[str, str], numbers: count[int], at: str) -> Any:
    """`value` with every text that a page may show made hostile, each with a number of its own;
    `marks` says which is where."""
    if isinstance(value, dict):
        return {key: poison(entry, marks, numbers, f"{at}.{key}") for key, entry in value.items()}
    if isinstance(value, list):
        return [poison(entry, marks, numbers, at) for entry in value]
    if not isinstance(value, str) or value in KEPT:
        return value
    mark = f"#{next(numbers)}-"
    marks[mark] = at
    return mark + HOSTILE


SHOWN = {
    "summary.json.title", "summary.json.data", "summary.json.model", "summary.json.commit",
    "summary.json.versions.torch",
    "federation.json.tiers.title", "federation.json.tiers.kind", "federation.json.tiers.core",
    "federation.json.tiers.board",
    "federation.json.tiers.model", "federation.json.tiers.binding", "federation.json.model.name",
    "federation.json.tiers.reasons", "federation.json.split.kinds",
    "federation.json.split.kind", "analysis.json.kinds", "analysis.json.maps.how",
    "analysis.json.notes",
    "boards.jsonl.board",
}  # fmt: skip


def hostile_run(folder: Path) -> tuple[Path, dict[str, str]]:
    """A run with everything that a page can show, all of its texts hostile, in a folder and under
    tiers with hostile names."""
    made = write_analysis(write_run(folder / f"run {HOSTILE}"))
    change(made / "federation.json", tiers=[{**tier, "board": "host board"} for tier in TIERS])
    (made / "boards.jsonl").write_text(
        json.dumps({"client": 0, "board": "nucleo", "ram_there": 1000}) + "\n"
    )
    (made / "experiment.toml").write_text(
        f"# config {HOSTILE}\nrounds = 20\n".replace("\n{{", "\n# {{")
    )
    marks: dict[str, str] = {}
    numbers = count(1)
    for path in made.iterdir():
        if path.suffix in (".json", ".jsonl"):
            lines = [
                poison(json.loads(line), marks, numbers, path.name)
                for line in path.read_text().splitlines()
            ]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            for tier in TIERS:
                text = text.replace(
                    f'"{tier["name"]}"', json.dumps(f"tier {tier['name']} {HOSTILE}")
                )
            path.write_text(text)
    return made, marks


def test_hostile_text_in_every_field_appears_only_escaped(tmp_path: Path) -> None:
    folder, marks = hostile_run(tmp_path)
    analysis = write_analysis_page(folder, tmp_path / "analysis.html")
    pages = [
        write_report(folder),
        write_comparison([folder, write_run(tmp_path / "b")], tmp_path / "all.html"),
        analysis,
    ]
    shown = set()
    for page in pages:
        text, found = page.read_text(encoding="utf-8"), outline(page)
        assert "<evil" not in text
        assert "&amp;lt;" not in text  # and nothing is escaped twice
        assert "evil" not in {tag for tag, _ in found.tags} and not any(
            "onclick" in attrs for _, attrs in found.tags
        )
        shown |= {at for mark, at in marks.items() if mark + ESCAPED in text}
    assert shown >= SHOWN, SHOWN - shown
    report = pages[0].read_text(encoding="utf-8")
    for told in ("config ", "run ", "tier server "):
        assert told + ESCAPED.replace("\n", "\n# " if told == "config " else "\n") in report, told


def test_every_piece_escapes_what_is_no_markup() -> None:
    pieces = [
        section(HOSTILE, HOSTILE, HOSTILE, Markup("<b>kept</b>")),
        section("a", "b", "c", HOSTILE),  # type: ignore[arg-type]
        table(
            [Column(HOSTILE, group=HOSTILE)], [[Cell(HOSTILE)]], label=HOSTILE, foot=[Cell(HOSTILE)]
        ),
        pairs([(HOSTILE, HOSTILE)], HOSTILE),
        source(HOSTILE),
        note(HOSTILE) + HOSTILE,
    ]
    assert all(
        isinstance(piece, Markup) and "<evil" not in piece and ESCAPED in piece for piece in pieces
    )
    assert "<b>kept</b>" in pieces[0]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_no_template_says_that_something_is_safe(path: Path) -> None:
    assert not re.search(r"\|\s*safe|autoescape|Markup", path.read_text(encoding="utf-8"))
    assert environment().get_template(path.name)


def test_a_value_that_is_forgotten_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'heading' is undefined"):
        fill("comparison_header.html", facts=[], cautions=[])


def test_jinja_is_not_imported_before_a_page_is_made() -> None:
    asked = (
        "import sys, nestling, nestling.cli, nestling.report.page; sys.exit('jinja2' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0

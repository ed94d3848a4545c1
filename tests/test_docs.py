"""The pages of the methods: one for each, as the generator makes them now; the page of settings,
likewise; and what other pages name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import nestling
from nestling import Experiment
from nestling.methods import METHODS
from nestling.report.page import write_comparison
from nestling.runs.assemble import assemble
from nestling.runs.describe import describe
from tests.small import small

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "methods"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    subprocess.run(
        [sys.executable, str(ROOT / "docs" / "make_method_pages.py"), str(folder)],
        check=True,
        cwd=ROOT,
    )
    return folder


@pytest.mark.parametrize("name", ["README", *METHODS])
def test_the_page_is_what_the_docstring_says_now(name: str, fresh: Path) -> None:
    assert (PAGES / f"{name}.md").read_text() == (fresh / f"{name}.md").read_text(), (
        "run python docs/make_method_pages.py"
    )


def test_there_is_no_page_without_a_method() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} == {"README", *METHODS}


def test_the_page_of_settings_is_what_the_code_says_now(tmp_path: Path) -> None:
    fresh = tmp_path / "settings.md"
    script = ROOT / "docs" / "make_settings_page.py"
    subprocess.run([sys.executable, str(script), str(fresh)], check=True, cwd=ROOT)
    assert (ROOT / "docs" / "settings.md").read_text() == fresh.read_text(), (
        "run python docs/make_settings_page.py"
    )


def test_every_test_that_the_threat_model_names_is_there() -> None:
    rows = (ROOT / "docs" / "threat_model.md").read_text().splitlines()
    named = [
        re.findall(r"`((?:tests/)?[\w/]+(?:\.py)?)`", row.split("|")[-2])
        for row in rows
        if "| `tests" in row
    ]
    assert len(named) > 15
    for names in named:
        folder = Path()
        for name in names:
            path = ROOT / name if name.startswith("tests") else folder / name
            assert path.exists(), path
            folder = path.parent


def test_the_pictures_are_small_and_each_is_shown() -> None:
    pictures = {path.name: path.stat().st_size for path in (ROOT / "docs/pictures").iterdir()}
    assert max(pictures.values()) < 100_000 and sum(pictures.values()) < 600_000
    kinds = {
        f"{name}{end}.png"
        for name in ("page", "coverage", "live")
        for end in ("", "-dark", "-phone")
    }
    assert kinds == set(pictures)
    for page in ("README.md", "docs/reading_the_page.md"):  # each shows or links all of them
        text = (ROOT / page).read_text()
        assert set(re.findall(r"pictures/([\w-]+\.png)", text)) == kinds


def test_what_is_pictured_is_on_the_pages(tmp_path: Path) -> None:
    shown = re.findall(r'"#(\w+)', (ROOT / "docs/make_pictures.py").read_text())
    nestling.run(small("heterofl", rounds=1), out=tmp_path / "run")
    both = write_comparison([tmp_path / "run"], tmp_path / "both.html")
    pages = (tmp_path / "run" / "report.html").read_text() + both.read_text()
    there = set(re.findall(r'<section id="(\w+)"', pages))
    assert len(set(shown)) > 1 and set(shown) <= there


def test_the_drawing_of_the_readme_is_what_the_default_run_gives_each_device() -> None:
    text = (ROOT / "README.md").read_text()
    (sizes, pieces), *_ = re.findall(
        r"^( +\d+ KB .*)\n(.*) parameters trained$", text, re.MULTILINE
    )
    kilobytes = [int(size) for size in re.findall(r"(\d+) KB", sizes)]
    *small, whole = [int(n.replace(" ", "")) for n in re.findall(r"\d{1,3}(?: \d{3})+", pieces)]
    assert len(small) == len(kilobytes) == 3 and "Raspberry Pi, GPU box" in sizes
    tiers = {tier["name"]: tier for tier in describe(*assemble(Experiment()))["tiers"]}
    trained = {tier["limits"]["ram"]: tier["params"] for tier in tiers.values()}
    assert [trained[size * 1024] for size in kilobytes] == small
    assert {tiers[name]["params"] for name in ("raspberry-pi-zero-2w", "gpu-box")} == {whole}
    assert max(trained.values()) == whole
    devices = sum(tier["count"] for tier in tiers.values())
    assert f"{devices} devices of {len(tiers)} kinds" in text

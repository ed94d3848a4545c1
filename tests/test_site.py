"""The pages as a site: it is built without a warning, and it has every setting and every public
name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import nestling
from nestling.methods import api
from nestling.models import MODELS
from nestling.sections import network_section, sections

ROOT = Path(__file__).resolve().parent.parent
PAGES = {path: path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
NAMES = [f"nestling.{name}" for name in nestling.__all__]
NAMES += [f"nestling.methods.api.{name}" for name in api.__all__ if name != "InputError"]
needs_mkdocs = pytest.mark.skipif(
    find_spec("mkdocs") is None or find_spec("mkdocstrings") is None,
    reason="mkdocs is not installed (pip install 'nestling[docs]')",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


@needs_mkdocs
def test_every_page_is_built(site: Path) -> None:
    docs = ROOT / "docs"
    names = {path: path.with_suffix(".html").relative_to(docs) for path in PAGES}
    wanted = {
        str(n.with_name("index.html") if path.name == "README.md" else n)
        for path, n in names.items()
    }
    assert wanted <= {str(path.relative_to(site)) for path in site.rglob("*.html")}


@needs_mkdocs
def test_the_reference_has_every_public_name(site: Path) -> None:
    reference = (site / "api.html").read_text()
    assert [name for name in NAMES if f'id="{name}"' not in reference] == []


@needs_mkdocs
def test_a_list_below_a_line_of_text_is_a_list(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = re.sub(r"<pre.*?</pre>", "", path.read_text(), flags=re.DOTALL)
        assert re.findall(r"<p>[^<]*\n- ", text) == [], path


@needs_mkdocs
def test_no_link_of_the_site_leads_out_of_it(site: Path) -> None:
    found = []
    for path in site.rglob("*.html"):
        for link in re.findall(r'href="((?!\w+:|#)[^"#]+)', path.read_text()):
            if path.name != "404.html" and not (path.parent / link).resolve().exists():
                found.append(f"{path.relative_to(site)}: {link}")
    assert found == []


def test_every_link_out_of_the_pages_leads_to_a_file() -> None:
    found = [
        (path, link)
        for path, text in {**PAGES, ROOT / "README.md": (ROOT / "README.md").read_text()}.items()
        for link in re.findall(r"\]\(((?!\w+:|#)[^)#\s]+)", text)
    ]
    assert len(found) > 100
    assert [f"{p.name}: {link}" for p, link in found if not (p.parent / link).exists()] == []


@pytest.mark.parametrize("name", list(sections()))
def test_every_setting_stands_on_a_page(name: str) -> None:
    keys = [f"`{row.key}`" for row in sections()[name].rows]
    assert [key for key in keys if not any(key in text for text in PAGES.values())] == []


def _own_chapter(name: str) -> str:
    """The part of the page of settings that names a network in its title."""
    page = PAGES[ROOT / "docs" / "settings.md"]
    (found,) = re.findall(rf"^### [^\n]*`{name}`[^\n]*\n(.*?)(?=^#|\Z)", page, re.M | re.S)
    return found


@pytest.mark.parametrize("name", list(MODELS))
def test_every_option_of_a_network_stands_on_a_page_with_its_default(name: str) -> None:
    page = PAGES[ROOT / "docs" / "settings.md"]
    common = page.partition("### All of them")[2].partition("###")[0]
    for row in network_section(name).rows:
        lines = (_own_chapter(name) + common).splitlines()  # its own word goes first
        line = next(line for line in lines if line.startswith(f"| `{row.key}` |"))
        assert f"`{row.default}`" in line and row.meaning in line


def test_every_public_name_stands_on_a_page() -> None:
    written = "\n".join(PAGES.values())
    assert [n for n in NAMES if not re.search(rf"^::: {re.escape(n)}$", written, re.M)] == []

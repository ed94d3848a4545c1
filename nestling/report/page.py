"""One self-contained HTML file for a run, or for several compared: nothing in it is fetched from
anywhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from nestling.errors import InputError
from nestling.files import write_atomic, writing
from nestling.report.compare import Comparison, compare
from nestling.report.comparison import COMPARISON_PARTS, comparison_body, comparison_title
from nestling.report.folder import read_run
from nestling.report.markup import empty, fill
from nestling.report.run_page import analysis_body, run_body, run_parts, run_title

_ICON = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path d="M1 7a7 7 0 0 0 14 0z" '
    b'fill="#0b63b0"/>'
    b'<circle cx="8" cy="5" r="2.6" fill="#d98c00"/></svg>'
)


@dataclass(frozen=True)
class PageParts:
    """A page before it is one: its title, its sections as (id, name), and what is in it."""

    title: str
    sections: list[tuple[str, str]]
    body: Markup

    def told(self) -> dict[str, Any]:
        """The same as plain data."""
        return {"title": self.title, "sections": self.sections, "body": str(self.body)}


def page_parts(folder: Path) -> PageParts:
    """The page of the run in `folder` as it is now; where the run cannot be read yet, the reason
    in its place."""
    try:
        run = read_run(Path(folder))
        title, parts, body = run_title(run), run_parts(run), run_body(run)
    except InputError as error:
        title, parts, body = Path(folder).resolve().name, [], empty(str(error))
    return PageParts(title, _linked(parts, body), body)


def live_page(parts: PageParts, stamp: str) -> str:
    """The page that brings itself up to date: it asks its server for what is not of this `stamp`
    any more, and nobody else for anything."""
    return _page(parts.title, parts.sections, parts.body, live=stamp)


def write_report(folder: Path) -> Path:
    """Write `folder`/report.html for the run in `folder`, finished or not, and give its path."""
    run = read_run(Path(folder))
    page = _page(run_title(run), run_parts(run), run_body(run))
    return _write(run.folder / "report.html", page, field="RUN")


def write_analysis_page(folder: Path, out: Path) -> Path:
    """Write the analysis of the run in `folder` as a page of its own to the file `out`, and give
    its path."""
    run = read_run(Path(folder))
    body = analysis_body(run)
    if not body:
        raise InputError(
            "the run folder has no analysis",
            field=str(folder),
            fix="make one: nestling analyse RUN",
        )
    return _write(Path(out), _page(run_title(run), run_parts(run), body))


def write_comparison(folders: Sequence[Path], out: Path) -> Path:
    """Write one page to the file `out` that compares the runs in `folders`, and give its path."""
    return _write(Path(out), comparison_page(compare(*folders)))


def comparison_page(comparison: Comparison) -> str:
    """The page of a comparison."""
    body = comparison_body(comparison)
    return _page(comparison_title(comparison), COMPARISON_PARTS, body)


def _linked(parts: Sequence[tuple[str, str]], body: Markup) -> list[tuple[str, str]]:
    """Those of the parts that `body` has."""
    return [(ident, name) for ident, name in parts if f'<section id="{ident}"' in body]


def _page(
    title: str, parts: Sequence[tuple[str, str]], body: Markup, live: str | None = None
) -> str:
    """The whole file; `parts` that `body` does not have are not linked to."""
    script = _asset("page.js")
    page = fill(
        "page.html",
        title=title,
        parts=_linked(parts, body),
        body=body,
        live=live,
        style=_asset("page.css"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        icon=base64.b64encode(_ICON).decode(),
    )
    return f"{page}\n"


def _asset(name: str) -> Markup:
    """A file of this package, which is part of the page as it is."""
    return Markup(files("nestling.report").joinpath(name).read_text(encoding="utf-8"))


def _write(path: Path, text: str, field: str = "--out") -> Path:
    """Write beside the target and rename, so that a reader never meets half a page."""
    with writing(path, field):
        if path.is_dir():
            raise InputError(
                f"{path} is a folder", field=field, fix="give the name of an HTML file"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        # JSON may hold half a surrogate pair, which UTF-8 cannot write.
        write_atomic(path, text.encode("utf-8", "replace"))
    return path

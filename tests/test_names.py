"""One public name, one meaning."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from nestling.methods import METHODS

PACKAGE = Path(__file__).resolve().parent.parent / "nestling"
FILES = [path for path in PACKAGE.rglob("*.py") if "app" not in path.parts]


def test_no_public_class_name_stands_for_two_things() -> None:
    found = defaultdict[str, list[str]](list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_no_file_at_the_top_shares_its_name_with_another() -> None:
    top = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    inside = [path for path in FILES if path.parent != PACKAGE and path.stem in top]
    assert not inside


def test_what_is_read_beside_a_paper_or_on_one_page_stays_short() -> None:
    """A method's file, and the loop."""
    most = {f"{name.partition(':')[0].replace('.', '/')}.py": 200 for name in METHODS.values()}
    most["nestling/runs/loop.py"] = 100
    lines = {name: len((PACKAGE.parent / name).read_text().splitlines()) for name in most}
    assert {name: found for name, found in lines.items() if found > most[name]} == {}

"""What `CONTRIBUTING.md` tells a newcomer is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ANSWERS = re.findall(
    r"^\| ([^|`]+) \| `([^`]+)` \| `([^`]+)` \|$",
    (ROOT / "CONTRIBUTING.md").read_text(),
    flags=re.MULTILINE,
)


def names_in(path: Path) -> set[str]:
    """What a file defines at its top."""
    found = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def test_there_are_twenty_answers() -> None:
    assert len(ANSWERS) >= 20 and len({question for question, *_ in ANSWERS}) == len(ANSWERS)


@pytest.mark.parametrize(("question", "file", "name"), ANSWERS)
def test_the_answer_is_there(question: str, file: str, name: str) -> None:
    assert name in names_in(ROOT / file)


@pytest.mark.parametrize(
    "page", re.findall(r"\]\(([^)#]+\.md)\)", (ROOT / "CONTRIBUTING.md").read_text())
)
def test_linked_pages_exist(page: str) -> None:
    assert (ROOT / page).is_file()

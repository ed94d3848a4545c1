"""Every code block and command of the pages: played by a test, or with a reason why not; and every
command that is shown exists, with the options that it is shown with."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from itertools import pairwise
from pathlib import Path

import click
import pytest
import typer

from nestling.cli.main import app
from tests.shell import ROOT

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "reproduction").glob("*.md")),
]

DEVICES = "needs machines of one's own; what it says is parsed here, and played in tests/fleet"
TRAINS = "a plain run of minutes; what it says is parsed here, and its settings are checked"
SHOWN = "what a program says, or a drawing: nothing to play"

CLAIMS: dict[str, dict[str, tuple[int, str]]] = {
    "README.md": {
        "": (1, SHOWN),
        "sh": (1, "make run and make test are what this project is built by"),
        "python": (1, "tests/test_python_api.py"),
    },
    "analysis.md": {"sh": (1, TRAINS), "python": (1, TRAINS)},
    "comparing.md": {
        "python": (2, "tests/test_comparing_page.py"),
        "toml": (1, "tests/test_comparing_page.py"),
        "sh": (5, "tests/test_comparing_page.py"),
        "latex": (1, SHOWN),
        "": (3, SHOWN),
    },
    "data.md": {
        "": (1, SHOWN),
        "sh": (2, "needs a user's files; the doors are played in tests/data"),
        "python": (2, "lines to put a user's own names into"),
    },
    "export.md": {"": (3, TRAINS), "c": (1, "its calls are those of tests/export, which compile")},
    "first_run.md": {
        "sh": (3, TRAINS),
        "toml": (1, TRAINS),
        "python": (1, "the README's example, word for word"),
    },
    "first_table.md": {
        "python": (1, "tests/test_package.py"),
        "toml": (1, "tests/test_package.py"),
        "sh": (10, "tests/test_package.py"),
        "": (1, SHOWN),
    },
    "fleet.md": {"": (3, DEVICES)},
    "gateway.md": {"": (4, DEVICES), "toml": (1, DEVICES)},
    "microcontrollers.md": {"": (1, "needs an emulator of the system's")},
    "new_method.md": {"python": (2, "tests/test_new_method.py"), "sh": (3, TRAINS)},
    "reading_the_page.md": {"sh": (1, "tests/report/test_report_coverage.py")},
    "runbook.md": {"": (8, DEVICES)},
    "training.md": {"sh": (2, TRAINS)},
    "trust.md": {"sh": (3, TRAINS)},
}
"""By page and kind of block: how many there are, and the test that plays them or why none does."""


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT)).removeprefix("docs/")


def fences(page: Path) -> list[tuple[str, str]]:
    """The blocks of a page: what kind each is, and its text."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [(str(kind), str(text)) for kind, text in found]


def test_every_block_is_claimed() -> None:
    found = {_name(page): Counter(kind for kind, _ in fences(page)) for page in PAGES}
    shown = {name: dict(counts) for name, counts in found.items() if counts}
    claimed = {
        name: {kind: count for kind, (count, _) in own.items()} for name, own in CLAIMS.items()
    }
    assert shown == claimed, "a test must play a new block, or a reason say why none does"


@pytest.mark.parametrize("page", [name for name in CLAIMS if name != "README.md"])
def test_the_test_that_is_named_is_there_and_reads_the_page(page: str) -> None:
    for _, claim in CLAIMS[page].values():
        if claim.startswith("tests/") and claim.endswith(".py"):
            assert page in (ROOT / claim).read_text()


def test_the_first_run_shows_the_readmes_example() -> None:
    shown = [
        [text for kind, text in fences(page) if kind == "python"]
        for page in (ROOT / "README.md", ROOT / "docs" / "first_run.md")
    ]
    assert shown[0] == shown[1]


def commands() -> list[tuple[str, str]]:
    """Every line that calls `nestling`, and the page that it stands on."""
    return [
        (page.name, line.strip())
        for page in PAGES
        for _, text in fences(page)
        for line in text.replace("\\\n", " ").splitlines()
        if re.match(r"\s*(\$ )?nestling \w", line)
    ]


def test_many_commands_are_found() -> None:
    assert len(commands()) > 50


@pytest.mark.parametrize(("page", "line"), commands(), ids=lambda value: str(value)[:60])
def test_the_command_exists_with_its_options(page: str, line: str) -> None:
    words = shlex.split(line.removeprefix("$ "), comments=True)
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    command = group.commands[words[1]]
    known = {name for own in command.params for name in (*own.opts, *own.secondary_opts)}
    for word in words[2:]:
        if word.startswith("--") and len(word) > 2:
            assert word.partition("=")[0] in {*known, "--help"}, f"{page}: {line}"


@pytest.mark.parametrize(("page", "line"), commands(), ids=lambda value: str(value)[:60])
def test_the_settings_of_the_command_exist(page: str, line: str) -> None:
    from nestling.experiment import Experiment

    words = shlex.split(line, comments=True)
    given = [after for word, after in pairwise(words) if word == "--set"]
    if given:
        Experiment.from_parts({}, given)

"""Every code block and command of the pages, fenced or indented: played by a test, or with a reason
why not; and every command that is shown exists, with the options that it is shown with."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import click
import pytest
import typer

from nestling.cli.main import app
from nestling.methods import METHODS
from tests.shell import ROOT

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "reproduction").glob("*.md")),
    *sorted((ROOT / "docs" / "methods").glob("*.md")),
]
INDENTED = "indented"
"""The kind of a block that stands four spaces to the right and not in a fence."""

DEVICES = "needs machines of one's own; what it says is parsed here, and played in tests/fleet"
TRAINS = "a plain run of minutes; what it says is parsed here, and its settings are checked"
SHOWN = "what a program says, or a drawing: nothing to play"
MEASURES = "minutes to hours, on a GPU or beside others' code; that it exists is looked at here"

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
        "": (2, SHOWN),
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
    "networks.md": {INDENTED: (1, SHOWN)},
    "new_method.md": {"python": (2, "tests/test_new_method.py"), "sh": (3, TRAINS)},
    "oracles.md": {INDENTED: (2, MEASURES)},
    "performance.md": {INDENTED: (6, MEASURES), "sh": (1, MEASURES)},
    "reading_the_page.md": {"sh": (1, "tests/report/test_report_coverage.py")},
    "reproduction/README.md": {INDENTED: (4, MEASURES)},
    "results.md": {INDENTED: (2, MEASURES)},
    "runbook.md": {"": (8, DEVICES)},
    "tasks.md": {"sh": (2, TRAINS), INDENTED: (1, SHOWN)},
    "training.md": {"sh": (2, TRAINS)},
    "trust.md": {"sh": (3, TRAINS)},
    **{f"methods/{name}.md": {"sh": (1, TRAINS)} for name in METHODS},
}
"""By page and kind of block: how many there are, and the test that plays them or why none does."""


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT)).removeprefix("docs/")


def fences(page: Path) -> list[tuple[str, str]]:
    """The blocks of a page: what kind each is, and its text."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [(str(kind), str(text)) for kind, text in found]


def indented(page: Path) -> Iterator[str]:
    """The blocks of a page that are four spaces to the right behind an empty line. What stands so
    below an entry of a list belongs to the entry and is none."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    listed = False
    for part in re.split(r"\n\s*\n", text):
        if part.startswith("    ") and not listed:
            yield part
        elif not part.startswith(" "):
            listed = bool(re.match(r"[-*] |\d+\. ", part.splitlines()[-1] if part else ""))
            listed = listed or bool(re.match(r"[-*] |\d+\. ", part))


def found_in(page: Path) -> list[tuple[str, str]]:
    """Every block of a page, fenced or indented: what kind it is, and its text."""
    return [*fences(page), *((INDENTED, text) for text in indented(page))]


def test_every_block_is_claimed() -> None:
    found = {_name(page): Counter(kind for kind, _ in found_in(page)) for page in PAGES}
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


def lines(starts: str) -> list[tuple[str, str]]:
    """Every line of a block that calls what `starts` says, without what it sets in the environment
    before, and the page that it stands on."""
    return [
        (_name(page), found[1])
        for page in PAGES
        for _, text in found_in(page)
        for line in text.replace("\\\n", " ").splitlines()
        if (found := re.match(rf"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*({starts}.*)", line))
    ]


def commands() -> list[tuple[str, str]]:
    """Every line that calls `nestling`, and every call in the middle of a text."""
    said = [
        (_name(page), call.replace("\n", " "))
        for page in PAGES
        for call in re.findall(r"`(?:[A-Z_]+=\S+ )*(nestling [a-z][^`]*)`", page.read_text())
    ]
    return lines(r"nestling \w") + said


def test_many_commands_are_found() -> None:
    pages = {page for page, _ in commands()}
    assert len(commands()) > 100 and len(lines("python benchmarks/")) > 20
    assert {"reproduction/README.md", "methods/fedavg.md", "runbook.md"} <= pages


@pytest.mark.parametrize(("page", "line"), commands(), ids=lambda value: str(value)[:60])
def test_the_command_exists_with_its_options(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)
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
    if any(re.search(r"\b\w+:[A-Z]\w+", text) for text in given):
        return  # of the reader's own code, which is not here
    if given:
        Experiment.from_parts({}, given)


def beside(script: Path) -> Iterator[Path]:
    """A script, and the files of the checkout that it imports by name."""
    yield script
    for name in re.findall(r"^(?:from|import) (\w+)", script.read_text(), re.MULTILINE):
        for folder in (script.parent, ROOT / "benchmarks"):
            if (folder / f"{name}.py").exists():
                yield from beside(folder / f"{name}.py")


@pytest.mark.parametrize(("page", "line"), lines("python (?:benchmarks|docs)/"), ids=str)
def test_the_script_exists_with_its_options(page: str, line: str) -> None:
    _, script, *words = shlex.split(line, comments=True)
    known = {
        word
        for file in beside(ROOT / script)
        for word in re.findall(r"""["'](--[\w-]+)["']""", file.read_text())
    }
    given = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert given <= known, f"{page}: {line}"


@pytest.mark.parametrize(("page", "line"), lines(r"make \w"), ids=str)
def test_the_goal_of_make_exists(page: str, line: str) -> None:
    goals = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    wanted = [word for word in shlex.split(line, comments=True)[1:] if "=" not in word]
    assert set(wanted) <= set(goals), f"{page}: {line}"

"""What all commands share."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from nestling.cli.completing import complete_override
from nestling.errors import unknown
from nestling.harmless import harmless, harmless_lines

if TYPE_CHECKING:
    from nestling.report.compare import Comparison

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Override a field.",
        autocompletion=complete_override,
    ),
]
Loggers = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        help="Also log every round to mlflow or wandb; repeatable.",
        autocompletion=lambda: ["mlflow", "wandb"],
    ),
]
Trusted = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="MODULE:NAME",
        help="Code that the run folder names and that may be imported; repeatable.",
    ),
]
Written = Annotated[
    list[Path] | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Also write a file: .md, .tex, .csv, .json or .html (a page); repeatable.",
    ),
]
Studied = Annotated[
    list[str] | None,
    typer.Option(
        "--by",
        metavar="KEY.PATH",
        help="A field under study, e.g. split.alpha (default: the method); repeatable.",
    ),
]
Measure = Annotated[str, typer.Option(help="What the best is chosen by: global or personal score.")]
Target = Annotated[
    float | None,
    typer.Option(help="A score, e.g. 0.9: what it took to reach it becomes columns."),
]
Form = Annotated[
    str,
    typer.Option("--format", help="Print markdown, latex, csv or json instead of a table."),
]
Columns = Annotated[
    str,
    typer.Option(
        help="Columns by name, with commas: global_last, global_best, personal_last, "
        "personal_best, bytes_up, bytes_down, clock_seconds, energy_joules, target_rounds, "
        "target_bytes, target_seconds, target_joules (default: all there are)."
    ),
]


def listed(text: str) -> list[str]:
    """Words with commas as a list."""
    return [word.strip() for word in text.split(",") if word.strip()]


class SaidStop(Exception):
    """Ctrl-C ended a command that has said itself how to go on."""


class GentleStop:
    """Ctrl-C that lets a round end: the first one is noted, the second stops at once. Nothing is
    noted before `arm`, as there is nothing yet to go on from."""

    def __init__(self) -> None:
        """Not armed yet."""
        self.armed = self.pressed = False

    def arm(self) -> None:
        """From now on there are rounds."""
        self.armed = True

    def __call__(self) -> bool:
        """Whether the run is to end after this round."""
        return self.pressed

    def _heard(self, *_: object) -> None:
        if self.pressed or not self.armed:
            raise KeyboardInterrupt
        self.pressed = True
        # not print: what is printed just now might be interrupted by this very signal
        os.write(2, b"\nnestling: finishing the round; ctrl-C again stops at once\n")

    @contextmanager
    def listening(self) -> Iterator[GentleStop]:
        """Hears ctrl-C while the block lasts; only a program's main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = signal.signal(signal.SIGINT, self._heard)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)


def show_comparison(found: Comparison, form: str, files: Iterable[Path]) -> None:
    """Prints a comparison and what is to be said of it, and writes it to files. In a format for
    programs the remarks go to standard error."""
    forms = ("markdown", "latex", "csv", "json")
    if form and form not in forms:
        raise unknown("format", form, forms, field="--format")
    if form:
        print(harmless_lines(getattr(found, f"to_{form}")()), end="")
    else:
        print_table(found.terminal())
    for line in [*found.cautions, *found.gaps]:
        say(line, file=sys.stderr if form else sys.stdout)
    for path in files:
        print(f"written: {found.save(path)}", file=sys.stderr if form else sys.stdout)


def show_rows(
    rows: Callable[[], list[dict[str, Any]]],
    table: Callable[[list[dict[str, Any]]], Any],
    as_json: bool,
) -> None:
    """Prints what `rows` gives, as JSON or as what `table` makes of it."""
    found = rows()
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print_table(table(found))


def print_table(table: Any) -> None:
    """Prints a table as wide as the terminal, or 200 columns wide where there is none."""
    from nestling.cli.terminal import Console

    # A pipe has no width of its own: it gets the whole table.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def complain(text: str) -> None:
    """Prints a line to standard error, with the program's name in front."""
    say(f"nestling: {text}", file=sys.stderr)


def say(text: str, file: TextIO | None = None) -> None:
    """Prints a line in which words of others may stand: of a device, or of a file that somebody
    made. It stays one line, and is no order to the terminal."""
    print(harmless(text, len(text)), file=file, flush=True)


def need_something_merged(summary: dict[str, Any]) -> None:
    """Ends with a code of its own, and says why, where no reply of the whole run counted: its
    figures are of untrained models."""
    if summary.get("nothing_merged"):  # what an earlier version wrote does not say
        from nestling.runs.run import emptiness

        complain(emptiness(summary))
        raise typer.Exit(3)

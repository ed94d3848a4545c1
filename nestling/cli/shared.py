"""What all commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a field.")
]
Trusted = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="MODULE:NAME",
        help="Code that the run folder names and that may be imported; repeatable.",
    ),
]


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
    from rich.console import Console

    # A pipe has no width of its own: it gets the whole table.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def complain(text: str) -> None:
    """Prints a line to standard error, with the program's name in front."""
    print(f"nestling: {text}", file=sys.stderr)


def need_something_merged(summary: dict[str, Any]) -> None:
    """Ends with a code of its own, and says why, where no reply of the whole run counted: its
    figures are of untrained models."""
    if summary.get("nothing_merged"):  # what an earlier version wrote does not say
        from nestling.runs.run import emptiness

        complain(emptiness(summary))
        raise typer.Exit(3)

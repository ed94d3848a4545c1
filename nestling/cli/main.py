"""The entry point: every command, and what an error becomes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer

from nestling.cli import fleet, lists, results, runs, starting
from nestling.cli.shared import SaidStop, complain
from nestling.errors import InputError
from nestling.harmless import harmless_lines

app = typer.Typer(
    name="nestling",
    help="Federated learning for fleets in which no two devices are alike.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(wanted: bool) -> None:
    if wanted:
        lists.version()
        raise typer.Exit


COMMANDS = (
    runs.run,
    runs.sweep,
    runs.reproduce,
    starting.new,
    lists.methods,
    lists.devices,
    lists.models,
    lists.config,
    lists.fit,
    results.report,
    results.analyse,
    results.compare,
    results.back,
    results.export,
    results.verify,
    results.keygen,
    fleet.serve,
    fleet.join,
    fleet.gateway,
    fleet.certs,
    fleet.watch,
    fleet.audit,
    lists.version,
)
"""Every command, in the order in which the help lists them."""

RESUME = "a run that finished a round can go on: nestling run --resume FOLDER"
STOPPED = dict.fromkeys(
    ("serve", "join", "gateway", "sweep"), "the same command goes on where it stood"
)
"""What can be done after ctrl-C, by command."""

for _command in COMMANDS:
    app.command()(_command)


@app.callback()
def _whole(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_say_version),
    ] = False,
) -> None:
    """Federated learning for fleets in which no two devices are alike."""
    del version  # its callback said it


def main() -> None:
    """The entry point: 0 done, 2 the user's input is wrong, 1 our fault or a check that failed, 3 a
    run went to its end and merged nothing."""
    sys.exit(_guarded(app))


def _guarded(command: Callable[..., Any]) -> int:
    try:
        code = command(standalone_mode=False)
        if code != 130:
            return code if isinstance(code, int) else 0
        # Typer before 0.21 gives ctrl-C as a number; newer ones raise it.
        raise KeyboardInterrupt
    except InputError as error:
        complain(str(error))
        return 2
    except typer.Exit as stop:
        return stop.exit_code
    except SaidStop:
        return 130
    except (KeyboardInterrupt, typer.Abort):
        complain(f"stopped; {STOPPED.get(sys.argv[1] if len(sys.argv) > 1 else '', RESUME)}")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        # Usage errors come from click, which newer versions of Typer carry inside; they are known
        # by what they can do.
        if hasattr(error, "format_message"):
            complain(" ".join(error.format_message().split()))
            return 2
        print(harmless_lines(traceback.format_exc()), end="", file=sys.stderr)
        complain("this is a fault of nestling, not yours; please report it with the lines above")
        return 1

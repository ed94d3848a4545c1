"""The command line. Heavy imports wait until a command needs them, so that `nestling --help` answers at once."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from nestling.errors import InputError
from nestling.version import __version__

app = typer.Typer(
    name="nestling",
    help="Federated learning for fleets in which no two devices are alike.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
def run(
    file: Annotated[Path | None, typer.Argument(help="An experiment's TOML file; without one, the default experiment.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a field.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder to make (default: a new one under runs/).")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line a round, then the summary.")] = False,
) -> None:
    """Run an experiment and write its run folder."""
    if quiet and as_json:
        raise InputError("--quiet and --json exclude each other", field="--json")
    if resume is not None and (file is not None or out is not None):
        raise InputError("a resumed run has its file and folder already", field="--resume", fix="leave out FILE and --out")
    from nestling import running
    from nestling.experiment import Experiment
    from nestling.progress import json_watcher, quiet_watcher, show_result, terminal_watcher

    overrides = tuple(set_ or ())
    choose = quiet_watcher if quiet else json_watcher if as_json else terminal_watcher
    with choose() as watcher:
        if resume is not None:
            result = running.resume(resume, watcher=watcher, overrides=overrides)
        else:
            experiment = Experiment.read(file, overrides)
            result = running.run(experiment, out=out or _new_folder(experiment.method.name), watcher=watcher)
    if as_json:
        print(json.dumps(result.summary))
    elif not quiet:
        show_result(result)


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List the methods."""
    from nestling.listing import method_rows, method_table

    _show(method_rows, method_table, as_json)


@app.command()
def devices(as_json: AsJson = False) -> None:
    """List the device catalogue."""
    from nestling.listing import device_rows, device_table

    _show(device_rows, device_table, as_json)


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the networks."""
    from nestling.listing import model_rows, model_table

    _show(model_rows, model_table, as_json)


@app.command()
def fit(
    model: Annotated[str, typer.Argument(help="A network by name (see `nestling models`) or package.module:callable.")],
    device: Annotated[str | None, typer.Option(help="A device of the catalogue.")] = None,
    fleet: Annotated[Path | None, typer.Option(help="A fleet's TOML file.")] = None,
    shape: Annotated[str, typer.Option(help="The shape of one input, e.g. 3,32,32.")] = "1,28,28",
    classes: Annotated[int, typer.Option(help="How many classes.")] = 10,
    batch: Annotated[int, typer.Option(help="Samples a batch.")] = 20,
    samples: Annotated[int, typer.Option(help="Training samples on the device.")] = 500,
    epochs: Annotated[int, typer.Option(help="Epochs a round.")] = 2,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum or adam.")] = "momentum",
    seconds: Annotated[float, typer.Option(help="Time a round may take (0: no limit).")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """The largest piece of a network that trains on a device, with the numbers that prove it."""
    if (device is None) == (fleet is None):
        raise InputError("give either --device or --fleet", field="--device")
    from nestling.devices import Budget
    from nestling.listing import fit_rows, fit_table

    budget = Budget(batch=batch, samples=samples, epochs=epochs, optimizer=optimizer, seconds=seconds)
    rows = fit_rows(model, _shape(shape), classes, budget, device, fleet)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        _print(fit_table(model, rows))
        if device is not None:
            for reason in rows[0]["reasons"]:
                print(f"  {reason}")


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders; several make a comparison.")],
    out: Annotated[Path | None, typer.Option(help="Where to write a comparison.")] = None,
) -> None:
    """Write the HTML report of a run, or a page that compares several."""
    from nestling.report.page import compare_runs, write_comparison, write_report

    if len(folders) == 1:
        print(f"report: {write_report(folders[0])}")
        return
    print(f"report: {write_comparison(folders, out or Path('comparison.html'))}")
    for caution in compare_runs(folders)[1]:
        print(caution)


@app.command()
def analyse(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    clients: Annotated[int, typer.Option(help="How many clients' models, spread over the tiers.")] = 10,
    rows: Annotated[int, typer.Option(help="How many rows of the test set, the same of every class.")] = 250,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the analysis as a page of its own.")] = None,
) -> None:
    """Compare the clients' models of a run: how alike they see (CKA, maps) and what they say; its report then shows it."""
    from nestling.analysing import write_analysis
    from nestling.progress import step_watcher
    from nestling.report.page import write_analysis_page, write_report

    with step_watcher() as step:
        found = write_analysis(folder, clients=clients, rows=rows, step=step)
    for remark in found["notes"]:
        print(remark)
    print(f"analysis: {folder / 'analysis.json'}")
    print(f"report: {write_report(folder)}")
    if out is not None:
        print(f"page: {write_analysis_page(folder, out)}")


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders.")],
    out: Annotated[Path | None, typer.Option(help="Also write the comparison as a page.")] = None,
) -> None:
    """Compare runs: mean and spread over seeds, and why they are not one fair column where they are not."""
    from nestling.report.page import compare_runs, write_comparison

    table, cautions = compare_runs(folders)
    _print(table)
    for caution in cautions:
        print(caution)
    if out is not None:
        print(f"report: {write_comparison(folders, out)}")


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """The entry point: 0 done, 2 the user's input is wrong, 1 our fault."""
    sys.exit(_guarded(app))


def _guarded(command: Callable[..., Any]) -> int:
    try:
        command(standalone_mode=False)
        return 0
    except InputError as error:
        _complain(str(error))
        return 2
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        _complain("stopped; a run that finished a round can go on with --resume")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        # Usage errors come from click, which newer versions of Typer carry inside; they are known by what they can do.
        if hasattr(error, "format_message"):
            _complain(error.format_message())
            return 2
        traceback.print_exc()
        _complain("this is a fault of nestling, not yours; please report it with the lines above")
        return 1


def _complain(text: str) -> None:
    print(f"nestling: {text}", file=sys.stderr)


def _new_folder(method: str) -> Path:
    stem = f"{method.rpartition(':')[2]}-{datetime.now():%Y%m%d-%H%M%S}"
    path = Path("runs") / stem
    for number in range(2, 1000):
        if not path.exists():
            return path
        path = Path("runs") / f"{stem}-{number}"
    return path


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise InputError(f"cannot read the shape {text!r}", field="--shape", fix="write sizes with commas, e.g. 3,32,32")
    return shape


def _show(rows: Callable[[], list[dict[str, Any]]], table: Callable[[list[dict[str, Any]]], Any], as_json: bool) -> None:
    found = rows()
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print(table(found))


def _print(table: Any) -> None:
    from rich.console import Console

    # A pipe has no width of its own: it gets the whole table.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


if __name__ == "__main__":
    main()

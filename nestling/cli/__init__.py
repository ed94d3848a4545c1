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
    from nestling.cli.progress import json_watcher, quiet_watcher, show_result, terminal_watcher
    from nestling.experiment import Experiment
    from nestling.runs import run as running

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
    _need_something_merged(result.summary)


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(help="A paper's table, or a TOML file of one; without, the list of them.")] = None,
    lines: Annotated[str, typer.Option(help="Lines of the table, separated by commas (default: all).")] = "",
    seeds: Annotated[int, typer.Option(help="Runs a line (0: as the paper's file says).")] = 0,
    minutes: Annotated[float, typer.Option(help="Stop after so many minutes; the same command goes on (0: no limit).")] = 0.0,
    runs: Annotated[Path, typer.Option(help="Where the run folders are.")] = Path("runs/reproduce"),
    out: Annotated[Path | None, typer.Option(help="A small JSON file of the results, beside the published ones.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a field of all runs.")
    ] = None,
) -> None:
    """Play a published table again, run by run, in pieces of as many minutes as one has; the paper's numbers stand beside ours."""
    from nestling.cli.progress import terminal_watcher
    from nestling.runs import reproduction as reproducing

    if name is None:
        for known in reproducing.names():
            print(f"{known}: {reproducing.read(known).title}")
        return
    paper = reproducing.read(name)
    kept = out or runs / Path(name).stem / "results.json"
    reproducing.check_file(paper, kept, "--out" if out else "--runs")
    with terminal_watcher() as watcher:
        found = reproducing.reproduce(
            paper,
            runs / Path(name).stem,
            lines=[line.strip() for line in lines.split(",")] if lines else [],
            seeds=seeds,
            minutes=minutes,
            overrides=tuple(set_ or ()),
            watcher=watcher,
            told=lambda outcomes: reproducing.save(paper, outcomes, kept),
        )
    _print(reproducing.table_of(paper, found))
    for what, choice in paper.choices.items():
        print(f"{what}: {choice}")
    print(f"results: {kept}")


@app.command()
def methods(as_json: AsJson = False) -> None:
    """List the methods."""
    from nestling.cli.listing import method_rows, method_table

    _show(method_rows, method_table, as_json)


@app.command()
def devices(as_json: AsJson = False) -> None:
    """List the device catalogue."""
    from nestling.cli.listing import device_rows, device_table

    _show(device_rows, device_table, as_json)


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the networks."""
    from nestling.cli.listing import model_rows, model_table

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
    from nestling.cli.listing import fit_rows, fit_table
    from nestling.devices import Budget

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
    from nestling.cli.progress import step_watcher
    from nestling.report.page import write_analysis_page, write_report
    from nestling.runs.analysis import write_analysis

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
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    device: Annotated[str, typer.Option(help="Whose model: a tier of the run, or its device.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where to write (default: RUN/export-TIER).")] = None,
    format_: Annotated[str, typer.Option("--format", help="What to write, with commas.")] = "c,tflite,onnx",
    calibration: Annotated[int, typer.Option(help="Training rows that the ranges of the eight bits are taken from.")] = 500,
    name: Annotated[str, typer.Option(help="Of the files and of the function in C.")] = "model",
    as_json: AsJson = False,
) -> None:
    """Write a run's model for one of its devices: int8 C source and .tflite, and ONNX."""
    from nestling.runs.export import export, export_table

    formats = tuple(part.strip() for part in format_.split(","))
    report = export(folder, device=device, out=out, formats=formats, calibration=calibration, name=name)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        _print(export_table(report))


@app.command()
def serve(
    file: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="The experiment; its fleet says who can take part.")],
    certs: Annotated[Path | None, typer.Option(metavar="DIR", help="Certificates and keys (see `nestling certs`).")] = None,
    out: Annotated[Path | None, typer.Option(metavar="RUN", help="The run folder (default: runs/EXPERIMENT).")] = None,
    host: Annotated[str | None, typer.Option(help="The address to listen on (default: all; with --insecure 127.0.0.1).")] = None,
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8443,
    min_clients: Annotated[int, typer.Option(metavar="N", help="Clients that must be there to begin (0: a round's).")] = 0,
    deadline: Annotated[float, typer.Option(metavar="S", help="Seconds after which a round goes on without the late.")] = 600.0,
    quorum: Annotated[int, typer.Option(metavar="N", help="Replies that a round must have at its deadline (0: one).")] = 0,
    health: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to tell how the run is: /health, /metrics; or `off`.")
    ] = "127.0.0.1:8444",
    insecure: Annotated[bool, typer.Option("--insecure", help="Neither TLS nor keys: this machine only.")] = False,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a field.")] = None,
) -> None:
    """Serve an experiment to a fleet of real devices; the same command again goes on where the run stands."""
    if insecure == (certs is not None):
        raise InputError(
            "give either --certs or --insecure", field="--certs", fix="`nestling certs DIR` makes a test authority and keys"
        )
    from nestling.experiment import Experiment
    from nestling.fleet.server.server import Options, serve

    _log_to_terminal()
    if insecure:
        print("no TLS and no keys: only processes on this machine can join", file=sys.stderr)
    experiment = Experiment.read(file, tuple(set_ or ()))
    options = Options(
        experiment=experiment.to_toml(),
        out=out or Path("runs") / file.stem,
        certs=certs,
        host=host or ("127.0.0.1" if insecure else "0.0.0.0"),
        port=port,
        min_clients=min_clients or experiment.participants or 10**9,  # all there are
        deadline=deadline,
        quorum=quorum,
        health=health,
    )
    summary = serve(options)["summary"]
    accuracy = summary["global_accuracy"]["last"]
    print(f"done: {summary['rounds_done']} rounds" + (f", global accuracy {accuracy:.2%}" if accuracy is not None else ""))
    print(f"report: {options.out / 'report.html'}")
    _need_something_merged(summary)


@app.command()
def join(
    server: Annotated[str, typer.Argument(metavar="SERVER", help="host or host:port.")],
    device: Annotated[str, typer.Option(help="What this device is: a tier of the experiment, or a device of the catalogue.")],
    data: Annotated[str, typer.Option(metavar="PATH", help="Its data; `experiment`: its share of the experiment's own.")],
    certs: Annotated[Path | None, typer.Option(metavar="DIR", help="This device's key and the authority to trust.")] = None,
    name: Annotated[str | None, typer.Option(help="What this device is called (default: as its key is).")] = None,
    client: Annotated[
        int | None, typer.Option(metavar="K", help="Which client of the experiment (default: a free one of its kind).")
    ] = None,
    memory: Annotated[str, typer.Option(help='What training may take: a share of what is free, or a size ("300 MB").')] = "100%",
    folder: Annotated[Path | None, typer.Option(metavar="DIR", help="Where it keeps what it must not forget.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Neither TLS nor keys: a server on this machine only.")] = False,
) -> None:
    """Join a server as one of its devices, until stopped."""
    _join(server, certs, name, folder, insecure, device=device, data=data, client=client, memory=memory)


@app.command()
def gateway(
    server: Annotated[str, typer.Argument(metavar="SERVER", help="host or host:port.")],
    devices: Annotated[Path, typer.Option(metavar="FILE.toml", help="The devices that it speaks for, and how they are reached.")],
    certs: Annotated[Path | None, typer.Option(metavar="DIR", help="The gateway's key and the authority to trust.")] = None,
    name: Annotated[str | None, typer.Option(help="What the gateway is called (default: as its key is).")] = None,
    folder: Annotated[Path | None, typer.Option(metavar="DIR", help="Where it keeps what it must not forget.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Neither TLS nor keys: a server on this machine only.")] = False,
) -> None:
    """Join a server for many small devices that cannot run Python, until stopped."""
    from nestling.fleet.node.gateway import read_devices

    read_devices(devices)  # what is wrong with the file is said here, and not by a process that is started again and again
    _join(server, certs, name, folder, insecure, device="", data="", devices=devices.absolute())


def _join(server: str, certs: Path | None, name: str | None, folder: Path | None, insecure: bool, **more: Any) -> None:
    if insecure == (certs is not None):
        raise InputError(
            "give either --certs or --insecure", field="--certs", fix="`nestling certs` makes keys, on the server's side"
        )
    import platform

    from nestling.fleet.care.certs import check_name, device_files
    from nestling.fleet.node.joining import Options, default_folder, join
    from nestling.fleet.protocol.addresses import parse_server

    _log_to_terminal()
    if insecure:
        print("no TLS and no keys: only a server on this machine can be joined", file=sys.stderr)
    address, port = parse_server(server)
    files = device_files(certs, name) if certs is not None else None
    called = files.name if files else check_name(name or platform.node(), "--name")
    place = (folder or default_folder(called)).absolute()
    join(Options(host=address, port=port, name=called, folder=place, certs=files, **more))


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the authority; made where it is missing.")],
    host: Annotated[
        list[str] | None, typer.Option(metavar="NAME_OR_IP", help="What devices call the server; repeatable.")
    ] = None,
    device: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A device to make a key for; repeatable.")] = None,
    revoke: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A device that may not join any more.")] = None,
    days: Annotated[int, typer.Option(help="How long the server's certificate lasts.")] = 365,
    force: Annotated[bool, typer.Option("--force", help="Replace what exists of what is named.")] = False,
) -> None:
    """Make the certificates and keys of a fleet: an authority, the server's certificate, a key pair for every device."""
    from nestling.fleet.care.certs import issue

    done = issue(folder, hosts=host or (), devices=device or (), revoke=revoke or (), force=force, days=days)
    for line in done or [f"nothing to do: {folder} has an authority and a server; name a --device, a --host or one to --revoke"]:
        print(line)


@app.command()
def watch(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_URL", help="A run folder, or what `nestling serve` names as health.")],
    once: Annotated[bool, typer.Option("--once", help="Show how it is now, and end.")] = False,
    every: Annotated[float, typer.Option(metavar="S", help="Seconds between two looks.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print how it is now as JSON.")] = False,
) -> None:
    """Watch a fleet of real devices: who is there, how the round stands, what was refused."""
    from rich.console import Console

    from nestling.fleet.care.watching import follow, looker, view

    look = looker(target)
    console = Console(width=None if sys.stdout.isatty() else 200)
    if as_json:
        print(json.dumps(look(), indent=1))
    elif once or not console.is_terminal:
        console.print(view(look()))
    else:
        follow(look, console, max(0.2, every))


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """The entry point: 0 done, 2 the user's input is wrong, 1 our fault, 3 a run went to its end and merged nothing."""
    sys.exit(_guarded(app))


def _guarded(command: Callable[..., Any]) -> int:
    try:
        code = command(standalone_mode=False)
        if code != 130:
            return code if isinstance(code, int) else 0
        # Typer before 0.21 gives ctrl-C as a number; newer ones raise it.
        raise KeyboardInterrupt
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


def _log_to_terminal() -> None:
    import logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    from nestling.fleet.care.logs import Discreet

    for handler in logging.getLogger().handlers:
        handler.addFilter(Discreet())


def _need_something_merged(summary: dict[str, Any]) -> None:
    """Ends with a code of its own, and says why, where no reply of the whole run counted: its figures are of untrained models."""
    if summary.get("nothing_merged"):  # what an earlier version wrote does not say
        from nestling.runs.run import emptiness

        _complain(emptiness(summary))
        raise typer.Exit(3)


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

"""Commands that look at runs that were played, and ship what came of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from nestling.cli.completing import complete_device
from nestling.cli.shared import (
    AsJson,
    Columns,
    Form,
    Measure,
    Studied,
    Target,
    Trusted,
    Written,
    complain,
    listed,
    print_table,
    say,
    show_comparison,
)
from nestling.errors import InputError


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run folders; several make a comparison.")
    ],
    out: Annotated[Path | None, typer.Option(help="Where to write a comparison.")] = None,
) -> None:
    """Write the HTML report of a run, or a page that compares several."""
    from nestling.report.compare import compare
    from nestling.report.page import write_comparison, write_report
    from nestling.runfiles import SWEEP

    if len(folders) == 1 and not (folders[0] / SWEEP).exists():
        print(f"report: {write_report(folders[0])}")
        return
    print(f"report: {write_comparison(folders, out or Path('comparison.html'))}")
    for caution in compare(*folders).cautions:
        say(caution)


def analyse(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    clients: Annotated[
        int, typer.Option(help="How many clients' models, spread over the tiers.")
    ] = 10,
    rows: Annotated[
        int, typer.Option(help="How many rows of the test set, the same of every class.")
    ] = 250,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the analysis as a page of its own."),
    ] = None,
    trust: Trusted = None,
) -> None:
    """Compare the clients' models of a run: how alike they see (CKA, maps) and what they say; its
    report then shows it."""
    from nestling.cli.progress import step_watcher
    from nestling.report.page import write_analysis_page, write_report
    from nestling.runs.analysis import write_analysis

    with step_watcher() as step:
        found = write_analysis(folder, clients=clients, rows=rows, step=step, trust=trust or ())
    for remark in found["notes"]:
        say(remark)
    print(f"analysis: {folder / 'analysis.json'}")
    print(f"report: {write_report(folder)}")
    if out is not None:
        print(f"page: {write_analysis_page(folder, out)}")


def compare(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Run folders, or folders that hold some: a sweep."),
    ],
    out: Written = None,
    by: Studied = None,
    measure: Measure = "",
    target: Target = None,
    columns: Columns = "",
    form: Form = "",
) -> None:
    """Compare runs: mean and spread over seeds, every difference that is not the one under study,
    and what is inside the noise."""
    from nestling.report.compare import compare

    found = compare(*folders, by=by or (), measure=measure, target=target, columns=listed(columns))
    show_comparison(found, form, out or [])


def export(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="The folder of a run, or the one that `nestling join` keeps on a device.",
        ),
    ],
    device: Annotated[
        str,
        typer.Option(
            help="Whose model: a tier of the run, or its device (a device knows its own).",
            autocompletion=complete_device,
        ),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write (default: RUN/export-TIER).")
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", help="What to write, with commas.")
    ] = "c,tflite,onnx",
    calibration: Annotated[
        int, typer.Option(help="Training rows that the ranges of the eight bits are taken from.")
    ] = 500,
    name: Annotated[str, typer.Option(help="Of the files and of the function in C.")] = "model",
    sign: Annotated[
        Path | None,
        typer.Option(metavar="KEY", help="Sign the files with this key (see `nestling keygen`)."),
    ] = None,
    data: Annotated[
        str,
        typer.Option(metavar="PATH", help="On a device: its data, as `nestling join` has them."),
    ] = "",
    shared: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="On a device: the server's run folder, or a copy, for what clients share.",
        ),
    ] = None,
    run: Annotated[
        str,
        typer.Option(metavar="NAME", help="On a device: which of its runs (default: the last)."),
    ] = "",
    client: Annotated[
        int | None, typer.Option(metavar="K", help="On a device: which of several clients.")
    ] = None,
    as_json: AsJson = False,
    trust: Trusted = None,
) -> None:
    """Write a run's model for one of its devices, or the model that is on a device: int8 C source
    and .tflite, and ONNX."""
    from nestling.runs.export import export_table

    wanted: dict[str, Any] = {
        "device": device,
        "out": out,
        "formats": tuple(part.strip() for part in format_.split(",")),
        "calibration": calibration,
        "name": name,
        "trust": trust or (),
        "sign": sign,
    }
    only = {"data": data, "shared": shared, "run": run, "client": client}
    report = _export(folder, wanted, only)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        print_table(export_table(report))


def _export(folder: Path, wanted: dict[str, Any], only: dict[str, Any]) -> dict[str, Any]:
    """The export of a run, or of a device, which alone has what is in `only`."""
    from nestling.fleet.node.exporting import export_device, is_device_folder
    from nestling.runfiles import EXPERIMENT
    from nestling.runs.export import export

    if is_device_folder(folder):
        return export_device(folder, **wanted, **only)
    if not (folder / EXPERIMENT).is_file():
        raise InputError(
            f"{folder} is neither a run folder nor a device's",
            field="RUN",
            fix=f"name a folder that holds {EXPERIMENT}, or the one that `nestling join` keeps",
        )
    for option, value in only.items():
        if value not in ("", None):
            raise InputError(
                f"{folder} is a run's folder, and this is for a device's",
                field=f"--{option}",
                fix="leave it out",
            )
    if not wanted["device"]:
        raise InputError(
            "no device is named", field="--device", fix="name a tier of the run, or its device"
        )
    return export(folder, **wanted)


def back(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    to: Annotated[
        int, typer.Option(metavar="ROUND", help="After which round (0: list what is kept).")
    ] = 0,
) -> None:
    """Put an earlier state that passed the gate (`server.good`) in place of a run's last one."""
    from nestling.fleet.care.audit import RETURNED, Audit, digest_of
    from nestling.runfiles import AUDIT, how_to_go_on
    from nestling.runs.good import go_back, kept

    if not to:
        rounds = ", ".join(map(str, kept(folder)))
        print(f"kept: the states after the rounds {rounds}" if rounds else "no state is kept")
        return

    def tell(round: int, state: Mapping[str, Any]) -> None:
        if (folder / AUDIT).exists():
            facts = {"round": round, "to": to, "state": digest_of(state)}
            Audit(folder / AUDIT).add(RETURNED, flush=True, **facts)

    round = go_back(folder, to, tell)
    print(f"the state after round {to} is in place of that after round {round}")
    print(f"go on with it: {how_to_go_on(folder)}")


def verify(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What `export` wrote.")],
    key: Annotated[
        Path | None,
        typer.Option(metavar="PUBLIC", help="The exporter's public key; without, only the sums."),
    ] = None,
) -> None:
    """Check that an exported folder is what its exporter wrote and signed."""
    from nestling.export.manifest import NotAsExported, verify

    try:
        files = verify(folder, key)
    except NotAsExported as differs:
        complain(str(differs))
        raise typer.Exit(1) from None
    who = f"signed by the holder of {key}" if key else "who wrote it was not asked: give --key"
    print(f"{folder}: {files} files are as exported; {who}")


def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the private key.")],
) -> None:
    """Make a key pair to sign exports with: FILE, which stays with you, and FILE.pub for others."""
    from nestling.keys import make_keys

    public = make_keys(file)
    print(f"private: {file} (keep it where nobody else reads)")
    print(f"public: {public} (for those who verify)")

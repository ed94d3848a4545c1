"""Commands that play: a run, a published table."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from nestling.cli.shared import Overrides, Trusted, need_something_merged, print_table
from nestling.errors import InputError


def run(
    file: Annotated[
        Path | None,
        typer.Argument(help="An experiment's TOML file; without one, the default experiment."),
    ] = None,
    set_: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder to make (default: a new one under runs/).")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON line a round, then the summary.")
    ] = False,
    trust: Trusted = None,
) -> None:
    """Run an experiment and write its run folder."""
    if quiet and as_json:
        raise InputError("--quiet and --json exclude each other", field="--json")
    if resume is not None and (file is not None or out is not None):
        raise InputError(
            "a resumed run has its file and folder already",
            field="--resume",
            fix="leave out FILE and --out",
        )
    if trust and resume is None:
        raise InputError(
            "it is for run folders: what your own FILE names is imported anyhow",
            field="--trust",
            fix="leave it out, or give --resume",
        )
    from nestling.cli.progress import json_watcher, quiet_watcher, show_result, terminal_watcher
    from nestling.experiment import Experiment
    from nestling.runs import run as running

    overrides = tuple(set_ or ())
    choose = quiet_watcher if quiet else json_watcher if as_json else terminal_watcher
    with choose() as watcher:
        if resume is not None:
            result = running.resume(resume, watcher=watcher, overrides=overrides, trust=trust or ())
        else:
            experiment = Experiment.read(file, overrides)
            result = running.run(
                experiment, out=out or new_folder(experiment.method.name), watcher=watcher
            )
    if as_json:
        print(json.dumps(result.summary))
    elif not quiet:
        show_result(result)
    need_something_merged(result.summary)


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(help="A paper's table, or a TOML file of one; without, the list of them."),
    ] = None,
    lines: Annotated[
        str, typer.Option(help="Lines of the table, separated by commas (default: all).")
    ] = "",
    seeds: Annotated[int, typer.Option(help="Runs a line (0: as the paper's file says).")] = 0,
    minutes: Annotated[
        float,
        typer.Option(help="Stop after so many minutes; the same command goes on (0: no limit)."),
    ] = 0.0,
    runs: Annotated[Path, typer.Option(help="Where the run folders are.")] = Path("runs/reproduce"),
    out: Annotated[
        Path | None,
        typer.Option(help="A small JSON file of the results, beside the published ones."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a field of all runs."),
    ] = None,
) -> None:
    """Play a published table again, run by run, in pieces of as many minutes as one has; the
    paper's numbers stand beside ours."""
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
    print_table(reproducing.table_of(paper, found))
    for what, choice in paper.choices.items():
        print(f"{what}: {choice}")
    print(f"results: {kept}")


def new_folder(method: str) -> Path:
    """A path under runs/ named by method and time, with a number added where that exists
    already."""
    stem = f"{method.rpartition(':')[2]}-{datetime.now():%Y%m%d-%H%M%S}"
    path = Path("runs") / stem
    for number in range(2, 1000):
        if not path.exists():
            return path
        path = Path("runs") / f"{stem}-{number}"
    return path

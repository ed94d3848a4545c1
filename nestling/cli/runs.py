"""Commands that play: a run, a published table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nestling.cli.completing import complete_method
from nestling.cli.shared import (
    Form,
    GentleStop,
    Loggers,
    Overrides,
    SaidStop,
    Target,
    Trusted,
    complain,
    listed,
    need_something_merged,
    print_table,
    show_comparison,
)
from nestling.errors import InputError

if TYPE_CHECKING:
    from nestling.runs.run import Watcher


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
    log: Loggers = None,
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
    from nestling.runs import checkpoint
    from nestling.runs import run as running
    from nestling.runs.logged import logged
    from nestling.runs.pictured import picture

    overrides = tuple(set_ or ())
    choose = quiet_watcher if quiet else json_watcher if as_json else terminal_watcher
    experiment = Experiment.read(file, overrides) if resume is None else None
    folder = resume or out or new_folder(experiment.method.name if experiment else "")
    own = experiment.named_code() if experiment is not None else trust or ()
    stop = GentleStop()
    try:
        with (
            stop.listening(),
            choose() as chosen,
            logged(chosen, log or (), folder) as told,
        ):
            watcher = _starting(told, stop, None if quiet or as_json else folder)
            result = (
                running.run(experiment, out=folder, watcher=watcher)
                if experiment is not None
                else running.resume(folder, watcher=watcher, overrides=overrides, trust=trust or ())
            )
    except KeyboardInterrupt:
        if not checkpoint.exists(folder):
            raise
        complain(f"stopped at once; {_go_on(folder, own)}")
        raise SaidStop from None
    if as_json:
        print(json.dumps(result.summary))
    elif not quiet:
        show_result(result)
    if result.summary["rounds_done"] < result.summary["rounds"]:
        complain(f"stopped after round {result.summary['rounds_done']}; {_go_on(folder, own)}")
        raise SaidStop
    picture(folder)
    need_something_merged(result.summary)


def _starting(watcher: Watcher, stop: GentleStop, folder: Path | None) -> Watcher:
    """A watcher that says where the run is before its first round, and that ctrl-C may stop."""

    def started(*what: Any) -> None:
        stop.arm()
        if folder is not None:
            print(f"run folder: {folder}", flush=True)
        watcher.started(*what)

    return replace(watcher, started=started, stop=stop)


def _go_on(folder: Path, own: Iterable[str]) -> str:
    """What to type next; `own` is the user's code that a folder alone may not import."""
    from nestling.runfiles import how_to_go_on

    trusted = "".join(f" --trust {name}" for name in sorted(own))
    return f"go on with: {how_to_go_on(folder)}{trusted}"


def sweep(
    file: Annotated[
        Path | None,
        typer.Argument(help="An experiment's TOML file, which may have a table [sweep]."),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(help="Methods by name, with commas.", autocompletion=complete_method),
    ] = "",
    seeds: Annotated[
        str, typer.Option(help="How many seeds, or a list with commas: 0,5,7 (default: 3).")
    ] = "",
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY.PATH=A,B,...", help="A field and the values it is to have; repeatable."
        ),
    ] = None,
    set_: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The sweep's folder (default: under runs/, by the file's name)."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs at once (0: as many as there is room for).")] = 0,
    target: Target = None,
    form: Form = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    log: Loggers = None,
) -> None:
    """Run methods × seeds × settings, several at once, and compare them; the same command goes on
    where it stood."""
    from nestling.cli.progress import sweep_watcher
    from nestling.runs.sweep import TABLE, play_sweep, read_sweep, seeds_of

    made = read_sweep(
        file,
        tuple(set_ or ()),
        methods=listed(methods),
        seeds=seeds_of(_seeds(seeds)) if seeds else (),
        vary=dict(_varied(text) for text in vary or ()),
        target=target,
    )
    folder = out or Path("runs") / f"sweep-{file.stem if file else 'default'}"
    stop = GentleStop()
    with stop.listening(), sweep_watcher(folder, stop, quiet or bool(form)) as watcher:
        found = play_sweep(made, folder, jobs=jobs, watcher=watcher, log=tuple(log or ()))
    show_comparison(found, form, ())
    print(
        f"tables: {folder / TABLE}.md .tex .csv .json .html",
        file=sys.stderr if form else sys.stdout,
    )
    if stop():
        complain("stopped; the same command goes on where it stood")
        raise SaidStop
    if any(" failed: " in text for text in found.cautions):
        raise typer.Exit(1)


def _seeds(text: str) -> int | list[int]:
    try:
        listed = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        listed = []
    if not listed:
        raise InputError(
            f"cannot read the seeds {text!r}",
            field="--seeds",
            fix="give how many, or a list with commas: 0,5,7",
        )
    return listed if "," in text else listed[0]


def _varied(text: str) -> tuple[str, list[Any]]:
    """A field and its values: with commas, or as a TOML list where values are lists themselves."""
    from nestling.experiment import value_of

    name, equals, values = text.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise InputError(
            f"cannot read {text!r}",
            field="--vary",
            fix="write key.path=a,b,c, e.g. split.alpha=0.1,1.0",
        )
    whole = value_of(values.strip()) if values.strip().startswith("[") else None
    if isinstance(whole, list):
        return name.strip(), whole
    return name.strip(), [value_of(part.strip()) for part in values.split(",")]


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

"""What a person sees while a run goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from nestling.cli.shared import GentleStop, say
from nestling.cli.terminal import Console
from nestling.experiment import Experiment
from nestling.report.metrics_part import metrics_line
from nestling.report.pace import Pace, scores
from nestling.report.tables import terminal_table
from nestling.runfiles import score_word
from nestling.runs.federation import Metrics
from nestling.runs.run import Result, Watcher, emptiness
from nestling.runs.sweep_cells import SweepWatcher
from nestling.views.cutting import Cutting


@contextmanager
def quiet_watcher() -> Iterator[Watcher]:
    """Nothing."""
    yield Watcher()


@contextmanager
def json_watcher() -> Iterator[Watcher]:
    """One JSON line per round on standard output."""
    yield Watcher(
        started=lambda _experiment, description, _done: _tell_note(description["data"]["line"]),
        round=lambda metrics: print(json.dumps(metrics), flush=True),
        refusal=_tell_refusal,
        note=_tell_note,
        clipped=_tell_clipped,
    )


@contextmanager
def terminal_watcher() -> Iterator[Watcher]:
    """A bar with the current score and the time left; one plain line per round where there is no
    terminal."""
    console = Console()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        yield _follow(console, bar)


def _always_zero(tiers: list[dict[str, Any]]) -> str:
    """How many of the largest piece's parameters a method never uses, if any."""
    largest = max(tiers, key=lambda t: t["params"])
    return (
        f" ({largest['zeros'] / largest['params']:.0%} of the largest always zero)"
        if largest.get("zeros")
        else ""
    )


def _follow(console: Console, bar: Progress) -> Watcher:
    task = bar.add_task("rounds", total=None, note="setting up")
    state: dict[str, Any] = {"rounds": 0}

    def started(experiment: Experiment, description: dict[str, Any], done: int) -> None:
        state["rounds"] = experiment.rounds
        tiers = description["tiers"]
        console.print(
            f"[bold]{experiment.method.name}[/bold] on {experiment.data.name}: "
            f"{experiment.fleet.size} devices of {len(tiers)} kinds, "
            f"{min(t['params'] for t in tiers):,} to {max(t['params'] for t in tiers):,} "
            f"parameters of {experiment.model.name}" + _always_zero(tiers)
        )
        for line in Cutting(**description["model"]["cut"]).lines():
            console.print(f"[yellow]{escape(line)}[/yellow]", soft_wrap=True)
        engine = description["engine"]
        place = engine.get("device_name", engine["device"])
        console.print(f"engine {engine['name']} on {place}, {engine['precision']}")
        console.print(escape(description["data"]["line"]), soft_wrap=True)
        bar.update(task, total=experiment.rounds, completed=done, note="")

    def client(done: int, of: int) -> None:
        bar.update(task, note=f"{state.get('scores', '')} clients {done}/{of}")

    def round_(metrics: Metrics) -> None:
        state["scores"] = scores(metrics) or state.get("scores", "")
        bar.update(task, advance=1, note=state.get("scores", ""))
        if bar.disable:
            print(
                f"round {metrics['round']}/{state['rounds']}  {state.get('scores', '')}  "
                f"{metrics['seconds']:.1f} s",
                flush=True,
            )

    def refusal(client: int, round: int, reason: str) -> None:
        console.print(
            f"[yellow]round {round}: the reply of client {client} was refused: {escape(reason)}"
            "[/yellow]"
        )

    def clipped(client: int, round: int, reason: str) -> None:
        text = f"round {round}: the reply of client {client} was clipped: {reason}"
        console.print(f"[yellow]{escape(text)}[/yellow]")

    def note(text: str) -> None:
        console.print(f"[dim]{escape(text)}[/dim]")

    return Watcher(started, client, round_, refusal, note, clipped)


@contextmanager
def sweep_watcher(folder: Path, stop: GentleStop, quiet: bool) -> Iterator[SweepWatcher]:
    """One bar over the rounds of all cells, with the time left; a plain line for every cell that
    ends where there is no terminal."""
    if quiet:
        yield SweepWatcher(started=lambda _: stop.arm(), stop=stop)
        return
    console = Console()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        yield _follow_sweep(console, bar, folder, stop)


def _follow_sweep(console: Console, bar: Progress, folder: Path, stop: GentleStop) -> SweepWatcher:
    task = bar.add_task("rounds", total=None, note="")
    pace = Pace({})
    latest: dict[str, str] = {}
    told: set[str] = set()

    def started(cells: Mapping[str, tuple[int, int]]) -> None:
        nonlocal pace
        stop.arm()
        pace = Pace({name: rounds - done for name, (rounds, done) in cells.items()})
        done = sum(rounds <= done for rounds, done in cells.values())
        console.print(f"sweep folder: {folder}", soft_wrap=True)
        console.print(f"{len(cells)} runs, {done} of them done")
        total = sum(rounds for rounds, _ in cells.values())
        bar.update(task, total=total, completed=total - pace.more)

    def round_(name: str, metrics: Metrics) -> None:
        pace.round(name)
        latest[name] = scores(metrics) or latest.get(name, "")
        bar.update(task, advance=1, note=f"{name} {latest[name]}")

    def ended(name: str, why: str) -> None:
        pace.over(name)
        if why:
            console.print(f"[bold]{escape(name)} failed: {escape(why)}[/bold]", soft_wrap=True)
            return
        when = pace.time_left()
        console.print(
            f"{name}  {latest.get(name, '')}" + (f"  {when}" if when else ""),
            highlight=False,
            soft_wrap=True,
        )

    def note(text: str) -> None:
        if text not in told:
            told.add(text)
            console.print(f"[dim]{escape(text)}[/dim]")

    return SweepWatcher(started, round_, ended, note, stop)


@contextmanager
def step_watcher() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for what goes in steps, told (what, done, of); nothing where there is no terminal."""
    console = Console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task("setting up", total=None)
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of)


def show_result(result: Result) -> None:
    """The table per tier and where the report is."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    summary, folder = result.summary, result.folder
    assert folder is not None
    console.print(terminal_table(folder))
    if summary["empty_rounds"]:
        console.print(f"[bold]{escape(emptiness(summary))}[/bold]", soft_wrap=True)
    whole, own = summary["global_score"], summary["personal_score"]
    word = score_word(summary)
    what = (
        "global model"
        if summary["global_model"]
        else "mean of the clients' models (no global model)"
    )
    if whole["last"] is not None:
        console.print(
            f"{what}: {word} {whole['last']:.2%} last, {whole['best']:.2%} best (round "
            f"{whole['best_round']})"
        )
    if own["last"] is not None:
        console.print(f"personal: {word} {own['last']:.2%} last, {own['best']:.2%} best")
    if told := metrics_line(summary):
        console.print(escape(told), soft_wrap=True)
    for name, other in summary.get("others", {}).items():
        console.print(
            f"{name} instead: {other['global_score']:.2%} on the common test, personal "
            f"{other['personal_score']:.2%}"
        )
    console.print(f"norm: {summary['norm'] or 'as the network has it'}")
    console.print(
        f"sent up {_megabytes(summary['bytes_up'])}, down {_megabytes(summary['bytes_down'])}, "
        f"{summary['seconds']:.0f} s"
    )
    console.print(f"report: {folder / 'report.html'}", soft_wrap=True)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.2f} MB"


def _tell_refusal(client: int, round: int, reason: str) -> None:
    print(f"round {round}: the reply of client {client} was refused: {reason}", file=sys.stderr)


def _tell_clipped(client: int, round: int, reason: str) -> None:
    print(f"round {round}: the reply of client {client} was clipped: {reason}", file=sys.stderr)


def _tell_note(text: str) -> None:
    say(text, file=sys.stderr)

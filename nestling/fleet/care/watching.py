"""`nestling watch`: a fleet on the terminal, from its run folder or from the address where its
server tells of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nestling.errors import InputError
from nestling.fleet.care import health
from nestling.harmless import harmless
from nestling.report.words import DASH, memory, percent, traffic

COLOURS = {health.OK: "green", health.WAITING: "yellow", health.STALLED: "red"}
STATES = {"answered": "green", "working": "cyan", "next": "cyan", "ready": "", "away": "red"}
SHOWN_REFUSALS = 8
ENDED = ("done", "stopped")

ReadStatus = Callable[[], dict[str, Any]]


def status_reader(target: str) -> ReadStatus:
    """What looks at a run: a URL, or a run folder."""
    if target.startswith(("http://", "https://")):
        return lambda: health.fetch(target)
    return lambda: health.run_status(Path(target), begun=True)


def follow(
    read: ReadStatus,
    console: Console,
    every: float = 1.0,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Shows a fleet until its run is over, or ctrl-C; what was seen last."""
    table = read()
    with Live(
        view(table, console.height), console=console, auto_refresh=False, screen=False
    ) as live:
        while table["phase"] not in ENDED:
            sleep(every)
            try:
                table = read()
            except InputError as error:  # a server that restarts is away for a moment
                table = {
                    **table,
                    "health": {**table["health"], "state": health.STALLED, "reason": str(error)},
                }
            live.update(view(table, console.height), refresh=True)
    return table


def view(table: dict[str, Any], height: int | None = None) -> Group:
    """A fleet as it is now; where there is a height, no more rows of clients than fit."""
    refusals = table["refusals"][-SHOWN_REFUSALS:]
    room = max(3, height - 12 - len(refusals)) if height else None
    parts: list[Any] = [
        _head(table),
        _rounds(table),
        _numbers(table),
        Text(""),
        _clients(table, room),
    ]
    if refusals:
        parts += [Text(""), _refusals(refusals)]
    return Group(*parts)


def _head(table: dict[str, Any]) -> Text:
    verdict = table["health"]
    text = Text.assemble(
        (verdict["state"], f"bold {COLOURS.get(verdict['state'], '')}"),
        ": ",
        clean(verdict["reason"]),
    )
    if verdict["since"]:
        text.append(f" (since {_clock(verdict['since'])})", "dim")
    down = [name for name, row in table["programs"].items() if not row["running"]]
    if down:
        text.append(f"\nnot running: {clean(', '.join(down))}", "red")
    for warning in verdict.get("warnings", ()):  # an older server tells none
        text.append("\n").append_text(clean(f"warning: {warning}", "yellow"))
    return text


def _rounds(table: dict[str, Any]) -> Table:
    line = Table.grid(padding=(0, 1))
    what = f"{table['method']} on {table['data']}" if table["method"] else table["folder"]
    line.add_row(
        clean(what, "bold"),
        ProgressBar(total=max(1, table["rounds"]), completed=table["round"], width=24),
        f"round {table['round']}/{table['rounds']}",
        *_of_round(table),
    )
    return line


def _of_round(table: dict[str, Any]) -> list[Any]:
    doing = table["doing"] if table["phase"] == "round" else {}
    if not doing:
        return []
    chosen = len(doing["chosen"])
    bar = ProgressBar(total=max(1, chosen), completed=chosen - len(doing["missing"]), width=12)
    return ["now", bar, f"{doing['answered']}/{chosen} replies, {doing['seconds']:.0f} s"]


def _numbers(table: dict[str, Any]) -> Text:
    totals, kinds, word = table["totals"], table["scores"], table["score"]
    words = [
        f"{kind.removesuffix('_score')} {word} {percent(row['last'])} (best "
        f"{percent(row['best'])}, round {row['best_round']})"
        for kind, row in kinds.items()
        if row["last"] is not None
    ]
    words.append(
        f"{totals['replies']} replies, {totals['dropped']} missed, {totals['refused']} refused, "
        f"{totals['late']} late" + (f", {totals['clipped']} clipped" if totals["clipped"] else "")
    )
    words.append(f"{traffic(totals['bytes_up'])} up, {traffic(totals['bytes_down'])} down")
    if totals["typical_seconds"] is not None:
        words.append(f"{totals['typical_seconds']:.1f} s a round")
    return Text("; ".join(words))


def _clients(table: dict[str, Any], room: int | None) -> Table:
    grid = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("client", "name", "tier", "device"):
        grid.add_column(name, no_wrap=True)
    grid.add_column("state", no_wrap=True)
    for name in ("last seen", "memory free"):
        grid.add_column(name, justify="right", no_wrap=True)
    # Who is missing comes first: with many clients the others may not fit.
    rows = sorted(
        table["clients"], key=lambda row: (list(STATES)[::-1].index(row["state"]), row["client"])
    )
    if room is None or len(rows) <= room:
        rows.sort(key=lambda row: row["client"])
    for row in rows[:room]:
        grid.add_row(
            str(row["client"]),
            clean(row["name"]),
            clean(row["tier"]),
            clean(row.get("device") or DASH),
            Text(row["state"], STATES.get(row["state"], "")),
            _ago(table["time"] - row["seen"]),
            f"{memory(row['free'])} of {memory(row['ram'])}" if row["free"] else DASH,
        )
    left = len(rows) - len(rows[:room])
    awaited = {
        t: r["expected"] - r["here"] - r["away"]
        for t, r in table["tiers"].items()
        if r["expected"] > r["here"] + r["away"]
    }
    notes = [f"{left} more"] if left else []
    notes += (
        [f"not seen yet: {', '.join(f'{count} {clean(tier)}' for tier, count in awaited.items())}"]
        if awaited
        else []
    )
    grid.caption, grid.caption_justify = Text("; ".join(notes)) if notes else None, "left"
    return grid


def _refusals(rows: list[dict[str, Any]]) -> Table:
    grid = Table(
        box=None, padding=(0, 2, 0, 0), title="refused", title_justify="left", show_header=False
    )
    for row in rows:
        who = row.get("name") or (
            f"client {row['client']}"
            if row.get("client") is not None
            else f"node {row.get('node')}"
        )
        when = f"round {row['round']}" if row.get("round") else ""
        grid.add_row(_clock(row["time"]), when, clean(who), clean(row.get("reason") or ""))
    return grid


def clean(value: object, style: str = "") -> Text:
    """What others wrote, as plain text: neither markup nor control characters of theirs reach the
    terminal."""
    return Text(harmless(str(value), 300), style)


def _clock(when: float) -> str:
    return datetime.fromtimestamp(when).strftime(
        "%d %b %H:%M:%S" if abs(time.time() - when) > 80_000 else "%H:%M:%S"
    )


def _ago(seconds: float) -> str:
    if seconds < 2:
        return "now"
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"

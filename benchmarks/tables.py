"""What the scripts share that play many runs and put a table into the documentation."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nestling import EngineConfig
from nestling.report.words import mean_and_spread

DOCS = Path(__file__).resolve().parent.parent / "docs"

Row = dict[str, Any]


def options(
    what: str,
    cache: str,
    lines: str,
    rounds: int = 0,
    data: Sequence[str] = (),
    seeds: int = 3,
    columns: str = "",
    other_seeds: bool = False,
) -> argparse.Namespace:
    """--lines --seeds --workers --cache --write, and where a table has another length at will
    --rounds and --device, where it has several data sets --data, where columns can be chosen
    --columns, where it can be played with seeds that nothing was chosen by --first; `lines` and
    `columns` say what they are."""
    parser = argparse.ArgumentParser(
        description=what, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", default="", help=f"separated by commas (default: all): {lines}")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cache", default=cache, help="runs that it holds are not played again")
    parser.add_argument("--write", action="store_true", help="put the table into the documentation")
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds)
        parser.add_argument(
            "--device",
            default="cpu",
            help="cpu: one run a worker, in-process; cuda: the cohort engine",
        )
    if other_seeds:
        parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    if columns:
        told = f"separated by commas (default: all): {columns}"
        parser.add_argument("--columns", default=columns, help=told)
    if data:
        parser.add_argument("--data", default=data[0], choices=data)
    return parser.parse_args()


def played(
    play: Callable[..., Row], wanted: dict[str, tuple[Hashable, ...]], chosen: argparse.Namespace
) -> dict[str, Row]:
    """The row of every run, by its name; `wanted` says what `play` is called with. Each is written
    down as soon as it is there."""
    cache = Path(chosen.cache)
    known: dict[str, Row] = json.loads(cache.read_text()) if cache.exists() else {}
    missing = {name: given for name, given in wanted.items() if name not in known}
    print(f"{len(wanted)} runs, {len(missing)} to play", flush=True)
    # A process that was forked cannot use a GPU that its parent has looked at.
    new = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        chosen.workers, new, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        running = {pool.submit(play, *given): name for name, given in missing.items()}
        for done in as_completed(running):
            name, error = running[done], done.exception()
            if error is not None:
                print(f"{name}: FAILED, {type(error).__name__}: {error}", flush=True)
                continue
            row = known[name] = done.result()
            cache.write_text(json.dumps(known, indent=1))
            shares = [
                f"{k} {v:.2%}"
                for k, v in row.items()
                if isinstance(v, float) and v <= 1 and k != "lr"
            ]
            print(f"{name}: {', '.join(shares)}, {row['seconds']:.0f} s", flush=True)
    if lost := [name for name in wanted if name not in known]:
        raise SystemExit(f"{len(lost)} runs failed: {', '.join(lost)}")
    return {name: known[name] for name in wanted}


def played_by_seed(
    play: Callable[..., Row], lines: Iterable[str], chosen: argparse.Namespace
) -> dict[str, list[Row]]:
    """The rows of every line, seed by seed; `play` is called with the line, the seed, how many
    rounds, and where."""
    names = {
        line: [f"{line} {seed}, {chosen.rounds} rounds" for seed in range(chosen.seeds)]
        for line in lines
    }
    wanted: dict[str, tuple[Hashable, ...]] = {
        name: (line, seed, chosen.rounds, chosen.device)
        for line, own in names.items()
        for seed, name in enumerate(own)
    }
    found = played(play, wanted, chosen)
    return {line: [found[name] for name in own] for line, own in names.items()}


def best_rates(
    play: Callable[..., Row],
    tries: Mapping[Hashable, Mapping[float, Mapping[str, tuple[Hashable, ...]]]],
    score: Callable[[Any, Row], float],
    chosen: argparse.Namespace,
) -> dict[Any, float]:
    """The learning rate of every line: the one whose runs score best in the mean. `tries` says line
    by line and rate by rate which runs they are, by name, and what `play` is called with."""
    runs = {
        name: given
        for rates in tries.values()
        for named in rates.values()
        for name, given in named.items()
    }
    found = played(play, runs, chosen)

    def reached(line: Hashable, rate: float) -> float:
        return statistics.mean(score(line, found[name]) for name in tries[line][rate])

    return {
        line: max(rates, key=lambda rate, line=line: reached(line, rate))
        for line, rates in tries.items()
    }  # type: ignore[misc]


def engine_on(device: str) -> EngineConfig:
    """Where the runs of a table are played: in-process on a CPU, where every worker has a run of
    its own, else by the cohort engine."""
    return EngineConfig("inline") if device == "cpu" else EngineConfig("cohort", device=device)


def spread(values: Sequence[float], sign: str = "", unit: str = " %") -> str:
    """Mean and standard deviation of shares, in points."""
    return f"{mean_and_spread(values, sign)}{unit}"


def megabytes(rows: Sequence[Row]) -> str:
    """The mean bytes a round."""
    return f"{statistics.mean(row['bytes'] for row in rows) / 1e6:.2f} MB"


@dataclass(frozen=True)
class Measured:
    """A method's row, for its page: the network, and the cells of the table."""

    network: str
    cells: str


def write_rows(rows: Mapping[str, Measured], setting: str, columns: Sequence[str]) -> None:
    """Puts rows beside those of other tables in docs/methods/measured.json."""
    page = DOCS / "methods" / "measured.json"
    known = json.loads(page.read_text()) if page.exists() else {}
    known |= {
        name: {"setting": setting, "columns": list(columns), **asdict(row)}
        for name, row in rows.items()
    }
    page.write_text(json.dumps(dict(sorted(known.items())), indent=1, ensure_ascii=False) + "\n")


def beside_floor(
    line: str, setting: str, measure: str, own: Sequence[float], floor: Sequence[float], over: str
) -> Row:
    """A line beside its floor, seed by seed, as the methods' pages show it."""
    gained = [a - b for a, b in zip(own, floor, strict=True)]
    return {
        "line": line,
        "setting": setting,
        "accuracy": f"{measure} {spread(own)}",
        "over": over,
        "by": spread(gained, "+", ""),
        "in how many seeds": f"{sum(d > 0 for d in gained)} of {len(gained)}",
        "clearly": statistics.mean(gained) > statistics.stdev(gained),
    }


def write_floors(data: str, found: Iterable[tuple[str, Row]]) -> None:
    """Puts (method, line) of one data set in the place of those that docs/methods/floors.json
    has."""
    page = DOCS / "methods" / "floors.json"
    known: dict[str, list[Row]] = json.loads(page.read_text()) if page.exists() else {}
    kept = {name: [line for line in told if line["data"] != data] for name, told in known.items()}
    for name, row in found:
        kept.setdefault(name, []).append({"data": data, **row})
    page.write_text(json.dumps(dict(sorted(kept.items())), indent=1, ensure_ascii=False) + "\n")


def write(marker: str, text: str, page: str = "results.md") -> None:
    """Puts text between `<!-- marker: begin -->` and `<!-- marker: end -->` in a page of the
    documentation."""
    path, begin, end = DOCS / page, f"<!-- {marker}: begin -->", f"<!-- {marker}: end -->"
    before, found, rest = path.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise SystemExit(
            f"{path} has no place for the table: write {begin} and {end} where it belongs"
        )
    path.write_text(f"{before}{begin}\n\n{text}\n{end}{after}")

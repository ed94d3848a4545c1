"""The methods that exchange knowledge beside their floors, in the settings of their learning tests.

    python benchmarks/floors_table.py [--lines a,b] [--seeds 5] [--workers 2] [--cache FILE]
        [--write]
    NESTLING_DATA=FOLDER python benchmarks/floors_table.py --data fashion-mnist [--lines a,b]
        [--workers 2] [--write]

On the embedded digits; or those that were above their floors there again, on another data set with
as many rows for clients and as many public ones.

A line is a method in a setting that is meant for it (few classes a client, few rows a client, equal
mixes and unlike networks); its floor is the same clients, networks and local epochs without what
the method adds. Every line, the floors too, has the best of four learning rates, its setting's
times 0.25, 0.5, 1 and 2, by the mean of three seeds that are not in the table: with one such seed a
floor can get a rate that suits it badly, and everything is above it. Runs that the cache already
holds are not played again. `--write` puts the table into docs/results.md and the lines into
docs/methods/floors.json.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tables import beside_floor, best_rates, options, played, spread, write, write_floors

import nestling
from nestling import Data, Experiment, Named

# The learning tests' settings stand with the tests.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.methods.by_class import SHOTS
from tests.methods.exchange import FEW_ROWS
from tests.methods.learning import experiment as tested
from tests.methods.mixed import SETTING
from tests.methods.test_draftfed import SCARCE
from tests.methods.test_feddf import LEARNING as FEDDF
from tests.methods.test_fedet import LEARNING as FEDET

SIZES = {"mnist12k": 10_000, "fashion-mnist": 60_000}
"""The training rows of a data set: shares of public rows are shares of the first one's."""
DIGITS = next(iter(SIZES))

FACTORS, TRIALS = (0.25, 0.5, 1.0, 2.0), (100, 101, 102)

SETTINGS: dict[str, dict[str, Any]] = {
    "three classes, 20 rows a client, MLPs of three widths": {**SETTING, **SHOTS},
    "40 rows a client, three families": {**SETTING, **FEW_ROWS},
    "equal mixes of 40 rows, three families, ten rounds": FEDDF,
    "equal mixes of 40 rows, three families, fifteen rounds": FEDET,
    "equal mixes of 30 rows, three families": SCARCE,
}
CLASSES, ROWS, MIXES, LONGER, SCARCE_ROWS = SETTINGS


@dataclass(frozen=True)
class Line:
    """A method as it is set in a setting, by what it is measured, and the line that it must beat
    ("": it is a floor itself)."""

    title: str
    setting: str
    method: Named
    measure: str = "personal"
    floor: str = ""


def _line(
    title: str, setting: str, name: str, floor: str, measure: str = "personal", **given: Any
) -> Line:
    return Line(title, setting, Named(name, given), measure, floor)


def _alone(title: str, setting: str) -> Line:
    return _line(title, setting, "local", "")


_FEDMD = {"pretrain": 10, "digest_batch": 32}
_FARTHER = {"digest_lr": 0.003}
_FEDDF = {"steps": 20, "batch": 64}

LINES = (
    _alone("alone (three classes)", CLASSES),
    _line("FedProto", CLASSES, "fedproto", "alone (three classes)"),
    _line("FedProto (by head)", CLASSES, "fedproto", "alone (three classes)", predict="head"),
    _line("FedHKD", CLASSES, "fedhkd", "alone (three classes)"),
    _line("Fed-CMA", CLASSES, "fedcma", "alone (three classes)"),
    _line("FedTGP", CLASSES, "fedtgp", "alone (three classes)"),
    _line("FedGH", CLASSES, "fedgh", "alone (three classes)"),
    _line("LG-FedAvg", CLASSES, "lg-fedavg", "alone (three classes)"),
    _line("FedKD", CLASSES, "fedkd", "alone (three classes)"),
    _line("FML", CLASSES, "fml", "alone (three classes)"),
    _alone("alone (40 rows)", ROWS),
    _line(
        "public labels without a consensus", ROWS, "fedmd", "alone (40 rows)", digest=0, **_FEDMD
    ),
    _line("FedMD", ROWS, "fedmd", "public labels without a consensus", **_FEDMD),
    _line(
        "FedMD without public labels", ROWS, "fedmd", "alone (40 rows)", **{**_FEDMD, "pretrain": 0}
    ),
    _line("KT-pFL", ROWS, "kt-pfl", "alone (40 rows)"),
    _line("FedHeNN", ROWS, "fedhenn", "alone (40 rows)"),
    _line("FD", ROWS, "fd", "alone (40 rows)"),
    _line("averages within architectures", MIXES, "feddf", "", "global", **{**_FEDDF, "steps": 0}),
    _line("FedDF", MIXES, "feddf", "averages within architectures", "global", **_FEDDF),
    _line(
        "averages within architectures (of all three)", MIXES, "feddf", "", **{**_FEDDF, "steps": 0}
    ),
    _line(
        "FedDF (of all three)",
        MIXES,
        "feddf",
        "averages within architectures (of all three)",
        **_FEDDF,
    ),
    _alone("alone (equal mixes)", LONGER),
    _line("Fed-ET", LONGER, "fedet", "alone (equal mixes)", steps=24, features=64),
    _alone("alone (30 rows)", SCARCE_ROWS),
    _line("DraftFed", SCARCE_ROWS, "draftfed", "alone (30 rows)", epochs=2, batch=32),
    _line("KT-pFL (equal mixes)", SCARCE_ROWS, "kt-pfl", "alone (30 rows)"),
    _line(
        "FedMD without public labels (equal mixes)",
        SCARCE_ROWS,
        "fedmd",
        "alone (30 rows)",
        **{**_FEDMD, **_FARTHER, "pretrain": 0},
    ),
    _line(
        "public labels without a consensus (equal mixes)",
        SCARCE_ROWS,
        "fedmd",
        "alone (30 rows)",
        digest=0,
        **_FEDMD,
    ),
    _line(
        "FedMD (equal mixes)",
        SCARCE_ROWS,
        "fedmd",
        "public labels without a consensus (equal mixes)",
        **_FEDMD,
        **_FARTHER,
    ),
    _line("FedHeNN (equal mixes)", SCARCE_ROWS, "fedhenn", "alone (30 rows)"),
    _line("FD (equal mixes)", SCARCE_ROWS, "fd", "alone (30 rows)"),
)


AGAIN = (
    "FedDF (of all three)",
    "Fed-ET",
    "DraftFed",
    "KT-pFL (equal mixes)",
    "FedMD without public labels (equal mixes)",
)
"""What is played on another data set: the lines that are above their floors by more than the spread
on the digits."""


def main() -> None:
    chosen = options(
        __doc__ or "", "floors_table.json", "titles of lines", data=tuple(SIZES), seeds=5
    )
    data = chosen.data
    if chosen.write and chosen.lines:
        raise SystemExit("--write is for the whole table: leave --lines out")
    lines = lines_of(chosen.lines or ("" if data == DIGITS else ",".join(AGAIN)))
    tries = {
        line.title: {
            factor: {_key(line, s, factor, data): (line, s, factor, data) for s in TRIALS}
            for factor in FACTORS
        }
        for line in lines
    }
    measures = {line.title: line.measure for line in lines}
    factors = best_rates(play, tries, lambda title, row: float(row[measures[title]]), chosen)
    wanted = {
        line.title: {
            _key(line, s, factors[line.title], data): (line, s, factors[line.title], data)
            for s in range(chosen.seeds)
        }
        for line in lines
    }
    found = played(
        play, {name: given for runs in wanted.values() for name, given in runs.items()}, chosen
    )
    rows = {title: [found[name] for name in runs] for title, runs in wanted.items()}
    text = table(lines, rows, factors)
    print(text)
    if chosen.write:
        write("floors" if data == DIGITS else f"floors, {data}", text)
        beside = [(line.method.name, _beside_floor(line, rows)) for line in lines if line.floor]
        write_floors(data, beside)


def lines_of(chosen: str) -> list[Line]:
    """The lines with these titles (empty: all), and their floors."""
    titles = set(chosen.split(",")) if chosen else {line.title for line in LINES}
    while more := {line.floor for line in LINES if line.title in titles and line.floor} - titles:
        titles |= more
    return [line for line in LINES if line.title in titles]


def play(line: Line, seed: int, factor: float, data: str) -> dict[str, Any]:
    """One run."""
    summary = nestling.run(experiment(line, seed, factor, data)).summary
    return {
        "personal": summary["personal_score"]["last"],
        "global": summary["global_score"]["last"],
        "seconds": summary["seconds"],
    }


def experiment(line: Line, seed: int, factor: float, data: str = DIGITS) -> Experiment:
    """The experiment of one line."""
    found = tested(line.method, seed, **SETTINGS[line.setting])
    split = replace(found.split, public=found.split.public * SIZES[DIGITS] / SIZES[data])
    return found.with_changes(
        train=replace(found.train, lr=factor * found.train.lr), data=Data(data), split=split
    )


def table(
    lines: list[Line], rows: dict[str, list[dict[str, Any]]], factors: dict[str, float]
) -> str:
    """One line each, under its setting."""
    text = []
    for setting in dict.fromkeys(line.setting for line in lines):
        text += [
            f"**{setting[0].upper()}{setting[1:]}**",
            "",
            "| | accuracy | learning rate | over | by | in how many seeds |",
            "|---|---|---|---|---|---|",
        ]
        for line in (line for line in lines if line.setting == setting):
            own = [row[line.measure] for row in rows[line.title]]
            rate = factors[line.title] * tested(line.method, 0, **SETTINGS[setting]).train.lr
            cells = [line.title, f"{line.measure} {spread(own)}", f"{rate:g}", *_above(line, rows)]
            text.append(f"| {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text)


def _above(line: Line, rows: dict[str, list[dict[str, Any]]]) -> list[str]:
    if not line.floor:
        return ["–", "–", "–"]
    found = _beside_floor(line, rows)
    return [found["over"], found["by"], found["in how many seeds"]]


def _beside_floor(line: Line, rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    own, floor = ([row[line.measure] for row in rows[n]] for n in (line.title, line.floor))
    return beside_floor(line.title, line.setting, line.measure, own, floor, line.floor)


def _key(line: Line, seed: int, factor: float, data: str) -> str:
    return f"{line.title} {seed}, rate times {factor:g}{'' if data == DIGITS else f' on {data}'}"


if __name__ == "__main__":
    main()

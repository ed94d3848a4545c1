"""The table of the methods that exchange knowledge: Fashion-MNIST, three unrelated families of
networks, three seeds.

    NESTLING_DATA=FOLDER python benchmarks/exchange_table.py [--lines a,b] [--seeds 3]
        [--rounds 50] [--device cpu|cuda] [--workers 2] [--cache FILE] [--write]

Twelve clients with 120 rows each (Dirichlet 0.5), everybody in every round, 300 public rows. All
networks are convolutional, so that DraftFed can take part. The method's settings are its defaults;
every line, training alone too, has the best of four learning rates by the mean of two seeds that
are not in the table, in half of the rounds. Accuracies are means over the last three of five tests.
Runs that the cache already holds are not played again. `--write` puts the tables into
docs/results.md and the rows into docs/methods/measured.json.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from tables import (
    Measured,
    beside_floor,
    best_rates,
    engine_on,
    megabytes,
    options,
    played,
    spread,
    write,
    write_floors,
    write_rows,
)

import nestling
from nestling import (
    Data,
    EngineConfig,
    Evaluation,
    Experiment,
    FleetConfig,
    Named,
    SplitConfig,
    Tier,
    Train,
)
from nestling.fair import GROUPS
from nestling.methods import METHODS, method_class

ROUNDS, TESTS, LAST = 50, 5, 3
RATES, TRIALS = (0.01, 0.02, 0.05, 0.1), (100, 101)
FLEET = FleetConfig(
    tiers=(
        Tier(name="tinycnn", ratio=1.0, count=4),
        Tier(
            name="tinyresnet",
            model="tinyresnet",
            model_options={"blocks": [2, 1], "channels": [8, 16, 16]},
            count=4,
        ),
        Tier(name="dscnn", model="dscnn", model_options={"width": 0.25, "blocks": 3}, count=4),
    )
)
COLUMNS = (
    "learning rate",
    "global accuracy",
    "personal accuracy",
    "over training alone",
    *(tier.name for tier in FLEET.tiers),
    "up + down a round",
)
SETTING = (
    "Fashion-MNIST, Dirichlet(0.5), 12 clients of three families with 120 rows each, all "
    "in every round, {rounds} rounds, 3 seeds"
)
MEASURED = {"D": "personal", "E": "global", "F": "personal", "": "personal"}
"""By what a group is measured, and a learning rate chosen."""
ALONE, FLOOR_DATA = "local", "fashion-mnist, 120 rows a client"


def main() -> None:
    chosen = options(__doc__ or "", "exchange_table.json", "names of methods", ROUNDS)
    lines, rounds = lines_of(chosen.lines), chosen.rounds

    def runs(
        name: str, lr: float, seeds: Iterable[int], rounds: int
    ) -> dict[str, tuple[Hashable, ...]]:
        return {
            f"{name} {seed}, {rounds} rounds at {lr:g}": (name, seed, lr, rounds, chosen.device)
            for seed in seeds
        }

    tries = {name: {lr: runs(name, lr, TRIALS, rounds // 2) for lr in RATES} for name in lines}
    rates = best_rates(play, tries, lambda name, row: float(row[_measured(name)]), chosen)
    wanted = {name: runs(name, rates[name], range(chosen.seeds), rounds) for name in lines}
    found = played(
        play, {run: given for own in wanted.values() for run, given in own.items()}, chosen
    )
    rows = {name: [found[run] for run in own] for name, own in wanted.items()}
    text = tables(rows)
    print(text)
    if chosen.write:
        write("exchange table", text)
        own = {
            name: Measured("three families", _cells(name, rows)) for name in rows if name != ALONE
        }
        write_rows(own, SETTING.format(rounds=rounds), COLUMNS)
        write_floors(FLOOR_DATA, beside_alone(rows, rounds))


def play(name: str, seed: int, lr: float, rounds: int, device: str) -> dict[str, Any]:
    """One run."""
    result = nestling.run(experiment(name, seed, lr, rounds).with_changes(engine=engine_on(device)))
    tested = [row for row in result.metrics if row["global_score"] is not None][-LAST:]
    return {
        "global": statistics.mean(row["global_score"] for row in tested),
        "personal": statistics.mean(row["personal_score"] for row in tested),
        "tiers": {
            tier: statistics.mean(row["by_tier"][tier]["personal_score"] for row in tested)
            for tier in tested[-1]["by_tier"]
        },
        "lr": lr,
        "bytes": (result.summary["bytes_up"] + result.summary["bytes_down"]) / rounds,
        "seconds": result.summary["seconds"],
    }


def beside_alone(
    rows: dict[str, list[dict[str, Any]]], rounds: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every method's personal accuracy beside that of training alone with the same networks."""
    for name, found in rows.items():
        if name != ALONE and method_class(name).info.own_networks:
            own, floor = ([row["personal"] for row in some] for some in (found, rows[ALONE]))
            setting = f"skewed mixes, three families, {rounds} rounds"
            title = method_class(name).info.title
            yield name, beside_floor(title, setting, "personal", own, floor, "training alone")


def _measured(name: str) -> str:
    return MEASURED[method_class(name).info.group]


def experiment(name: str, seed: int, lr: float = 0.05, rounds: int = ROUNDS) -> Experiment:
    """The experiment of one line of the table."""
    # FedFTG fine-tunes the average of one network's parts: the same clients, each with the tinycnn.
    fleet = (
        FLEET
        if method_class(name).info.own_networks
        else FleetConfig(tiers=(Tier(name="tinycnn", ratio=1.0, count=12),))
    )
    return Experiment(
        method=Named(name),
        model=Named("tinycnn", {"channels": [8, 16, 32]}),
        data=Data("fashion-mnist"),
        seed=seed,
        rounds=rounds,
        participants=0,
        split=SplitConfig(kind="dirichlet", alpha=0.5, size=120, public=0.005),
        fleet=fleet,
        train=Train(epochs=2, batch=20, lr=lr, augment="none"),
        engine=EngineConfig("inline"),
        evaluate=Evaluation(every=max(1, rounds // TESTS), clients=12),
    )


def tables(rows: dict[str, list[dict[str, Any]]]) -> str:
    """A table for every group, with training alone in each."""
    parts = []
    for group in ("D", "E", "F"):
        own = [name for name in rows if method_class(name).info.group == group]
        if own:
            parts.append(
                f"**Group {group}: {GROUPS[group].title}.** Measured by {GROUPS[group].metric}.\n"
            )
            parts += [f"| method | {' | '.join(COLUMNS)} |", "|" + "---|" * (len(COLUMNS) + 1)]
            shown = [*own, *([ALONE] if ALONE in rows else [])]
            parts += [
                f"| {method_class(name).info.title} | {_cells(name, rows)} |" for name in shown
            ]
            parts.append("")
    return "\n".join(parts)


def _cells(name: str, rows: dict[str, list[dict[str, Any]]]) -> str:
    found, key = rows[name], _measured(name)
    every = [spread([row[key] for row in found]) for key in ("global", "personal")]
    # Where all have the same network, training alone with three others is no floor.
    fair = name != ALONE and ALONE in rows and method_class(name).info.own_networks
    over = (
        spread([a[key] - b[key] for a, b in zip(found, rows[ALONE], strict=True)], "+", "")
        if fair
        else "–"
    )
    tiers = [
        f"{100 * statistics.mean(row['tiers'][tier.name] for row in found):.2f} %"
        if tier.name in found[0]["tiers"]
        else "–"
        for tier in FLEET.tiers
    ]
    return " | ".join([f"{found[0]['lr']:g}", *every, over, *tiers, megabytes(found)])


def lines_of(chosen: str) -> list[str]:
    names = [name for name in METHODS if method_class(name).info.group in ("D", "E", "F")] + [ALONE]
    return [name for name in names if not chosen or name in chosen.split(",")]


if __name__ == "__main__":
    main()

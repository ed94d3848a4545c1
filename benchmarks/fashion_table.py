"""The table of the sub-model methods: Fashion-MNIST, Dirichlet(0.5), 100 clients, ten a round, five
tiers, three seeds.

    NESTLING_DATA=FOLDER python benchmarks/fashion_table.py [--lines a,A:b] [--seeds 3]
        [--rounds 300] [--device cpu|cuda] [--workers 2] [--cache FILE] [--write]
        [--data fashion-mnist|cifar-10]

Every tier has a budget of parameters, the same for all methods of a group: those of a network of
that width, or in group B, where the network is cut in depth, that share of its parameters. What a
method really trains there stands in the table, because methods reach a budget more or less closely.
The learning rate is the best of three, the same three for every method: each is tried in one run of
a third of the rounds, with a seed of its own, on 10 000 training rows that are held out for this
and for nothing else. Accuracies are means over the last five tests, one every thirtieth of the run.
Runs that the cache already holds are not played again. `--write` puts the tables into
docs/results.md, group by group, and the rows of Fashion-MNIST into docs/methods/measured.json.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
from tables import (
    Measured,
    best_rates,
    engine_on,
    megabytes,
    options,
    played,
    spread,
    write,
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
from nestling.data import load
from nestling.fair import GROUPS
from nestling.methods import METHODS, method_class

BUDGETS = (1.0, 0.75, 0.5, 0.375, 0.25)
ROUNDS = 300
DATA = ("fashion-mnist", "cifar-10")
RATES = (0.02, 0.05, 0.1)
TESTS, LAST = 30, 5
TRIAL = 100
"""The seed of the runs that choose a learning rate."""

WIDE = Named("tinycnn", {"norm": "group"})
DEEP = Named("tinyresnet", {"norm": "group", "blocks": [9], "channels": [16, 16]})
EXITS = Named("tinyresnet", {**DEEP.options, "exits": [2, 3, 4, 6, 9]})
"""Nine equal blocks, of which 9, 6, 4, 3 and 2 are the most that the five budgets allow; with exits
where these cuts are."""

OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"cut": "depth"} for name in ("heteroavg", "fedprox", "scaffold", "fednova", "moon")},
    "fjord": {"levels": sorted(BUDGETS)},
}
"""What a method is told to belong to its group and to meet the budgets; all else is its default."""

COLUMNS = (
    "learning rate",
    "global accuracy",
    "personal accuracy",
    "smallest tier",
    "over FedAvg",
    "parameters a tier trains",
    "up + down a round",
)

MEASURED = {"A": "global", "B": "tiers", "C": "personal", "G": "personal"}
"""By what a group is measured, and a learning rate chosen."""

SETTING = (
    "Fashion-MNIST, Dirichlet(0.5), 100 clients, 10 a round, five tiers, {rounds} rounds, 3 seeds"
)

FLOOR = "fedavg"
EVERYWHERE = (FLOOR, "local")
"""References that stand in every table."""


def main() -> None:
    chosen = options(__doc__ or "", "fashion_table.json", "names of methods", ROUNDS, DATA)
    lines, seeds = lines_of(chosen.lines), range(chosen.seeds)
    rates = chosen_rates(lines, chosen)
    wanted = {
        _key(*line, seed, rates[line], chosen.rounds, chosen.data): (
            *line,
            seed,
            rates[line],
            chosen.rounds,
            chosen.device,
            chosen.data,
        )
        for line in lines
        for seed in seeds
    }
    found = played(play, wanted, chosen)
    rows = {
        line: [found[_key(*line, seed, rates[line], chosen.rounds, chosen.data)] for seed in seeds]
        for line in lines
    }
    texts = tables(rows)
    print("\n\n".join(texts.values()))
    if chosen.write:
        _write(texts, rows, chosen)


def chosen_rates(lines: list[tuple[str, str]], chosen: Any) -> dict[tuple[str, str], float]:
    """The learning rate of every line."""
    rounds = chosen.rounds // 3
    held_out = Path(chosen.cache).with_name(f"{Path(chosen.cache).stem}-{chosen.data}.npz")
    file = str(_held_out(held_out, chosen.data))
    tries = {
        line: {
            lr: {
                f"{_key(*line, TRIAL, lr, rounds, chosen.data)}, held out": (
                    *line,
                    TRIAL,
                    lr,
                    rounds,
                    chosen.device,
                    chosen.data,
                    file,
                )
            }
            for lr in RATES
        }
        for line in lines
    }
    return best_rates(play, tries, lambda line, row: float(row[MEASURED[line[0]]]), chosen)


def _held_out(path: Path, data: str) -> Path:
    """The training rows in a file in which every sixth is a test row."""
    if not path.exists():
        rows = load(data)
        np.savez(path, x=rows.x.numpy(), y=rows.y.numpy(), test=np.arange(len(rows.y)) % 6 == 0)
    return path


def play(
    group: str,
    name: str,
    seed: int,
    lr: float,
    rounds: int,
    device: str,
    data: str = DATA[0],
    file: str = "",
) -> dict[str, Any]:
    """One run."""
    played = experiment(group, name, seed, lr, rounds, data).with_changes(engine=engine_on(device))
    result = nestling.run(played.with_changes(data=Data("npz", path=file)) if file else played)
    summary, world = result.summary, result.federation.world
    trained = [
        world.cost(result.federation.method.piece(world.device(world.fleet.member(t, 0)), 0))
        for t in world.plans
    ]
    tested = [row for row in result.metrics if row["global_score"] is not None][-LAST:]
    tiers = [[tier["global_score"] for tier in row["by_tier"].values()] for row in tested]
    return {
        "global": statistics.mean(row["global_score"] for row in tested),
        "personal": statistics.mean(row["personal_score"] for row in tested),
        "tiers": statistics.mean(statistics.mean(values) for values in tiers),
        "smallest": statistics.mean(
            row["by_tier"]["budget-0.25"]["global_score"] for row in tested
        ),
        "lr": lr,
        "bytes": (summary["bytes_up"] + summary["bytes_down"]) / summary["rounds"],
        "params": [cost.params for cost in trained],
        "seconds": summary["seconds"],
    }


def experiment(
    group: str,
    name: str,
    seed: int,
    lr: float = 0.05,
    rounds: int = ROUNDS,
    data: str = DATA[0],
) -> Experiment:
    """The experiment of one line of the table."""
    cut, share = "depth" if group == "B" else "width", 1 / len(BUDGETS)
    tiers = tuple(
        Tier(name=f"budget-{ratio:g}", ratio=ratio, cut=cut, share=share) for ratio in BUDGETS
    )
    return Experiment(
        method=Named(name, OPTIONS.get(name, {})),
        model=_network(group, name),
        data=Data(data),
        seed=seed,
        rounds=rounds,
        participants=10,
        split=SplitConfig(kind="dirichlet", alpha=0.5),
        fleet=FleetConfig(size=100, tiers=tiers),
        train=Train(epochs=1, batch=20, lr=lr, augment="none"),
        engine=EngineConfig("inline"),
        evaluate=Evaluation(every=max(1, rounds // TESTS), clients=20),
    )


def _network(group: str, name: str) -> Named:
    """The group's network, unless the method needs exits."""
    own = method_class(name).info.model
    if group == "B":
        return EXITS if own == "tinyexits" else DEEP
    return Named(own, {"norm": "group"}) if own else WIDE


def _called(network: Named) -> str:
    return f"{network.name} with exits" if "exits" in network.options else network.name


def tables(rows: dict[tuple[str, str], list[dict[str, Any]]]) -> dict[str, str]:
    """A table for every group that has lines."""
    found = {}
    for group, fair in GROUPS.items():
        own = {name: found for (where, name), found in rows.items() if where == group}
        if own:
            found[group] = "\n".join(
                [
                    f"**Group {group}: {fair.title}.** Measured by {fair.metric}.",
                    "",
                    f"| method | network | {' | '.join(COLUMNS)} |",
                    "|" + "---|" * (2 + len(COLUMNS)),
                    *(
                        f"| {method_class(n).info.title} | {_called(_network(group, n))} | "
                        f"{_cells(group, seeds, own.get(FLOOR))} |"
                        for n, seeds in own.items()
                    ),
                ]
            )
    return found


def _cells(group: str, found: list[dict[str, Any]], floor: list[dict[str, Any]] | None) -> str:
    cells = [spread([r[key] for r in found]) for key in ("global", "personal", "smallest")]
    key = MEASURED[group]
    over = (
        spread([a[key] - b[key] for a, b in zip(found, floor, strict=True)], "+", "")
        if floor and floor is not found
        else "–"
    )
    sizes = " / ".join(f"{count / 1000:.1f}k" for count in found[0]["params"])
    return " | ".join([f"{found[0]['lr']:g}", *cells, over, sizes, megabytes(found)])


def lines_of(chosen: str) -> list[tuple[str, str]]:
    """(group, method) for every line; `chosen` names methods, or one group's (A:fedavg), separated
    by commas (empty: all)."""
    groups = ("A", "B", "C", "G")
    own = [
        (group, name)
        for group in groups
        for name in METHODS
        if method_class(name).info.group == group
    ]
    common = [(group, name) for group in groups for name in EVERYWHERE]
    names = chosen.split(",") if chosen else list(METHODS)
    return sorted(
        [line for line in (*own, *common) if line[1] in names or ":".join(line) in names],
        key=lambda line: (line[0], line[1] in EVERYWHERE, line[1]),
    )


def _key(group: str, name: str, seed: int, lr: float, rounds: int, data: str) -> str:
    return f"{data}: {name} {_network(group, name).name} {seed}, {rounds} rounds at {lr:g}"


def _write(
    texts: dict[str, str], rows: dict[tuple[str, str], list[dict[str, Any]]], chosen: Any
) -> None:
    for group, text in texts.items():
        write(f"{chosen.data.split('-')[0]} table, group {group}", text)
    if chosen.data != DATA[0]:
        return
    # Reversed, so that a method that stands in several tables has the row of the first.
    measured = {
        name: Measured(_called(_network(g, name)), _cells(g, found, rows.get((g, FLOOR))))
        for (g, name), found in reversed(rows.items())
    }
    write_rows(measured, SETTING.format(rounds=chosen.rounds), COLUMNS)


if __name__ == "__main__":
    main()

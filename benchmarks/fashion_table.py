"""The table of the sub-model methods: Fashion-MNIST, Dirichlet(0.5), 100 clients, ten a round, five tiers, three seeds.

    NESTLING_DATA=FOLDER python benchmarks/fashion_table.py [--lines a,b] [--seeds 3] [--workers 2] [--cache FILE] [--write]

Every tier has a budget of parameters, the same for all methods of a group: those of a network of that width, or in group B, where the
network is cut in depth, that share of its parameters. What a method really trains there stands in the table, because methods reach a
budget more or less closely. Runs that the cache already holds are not played again. `--write` puts the tables
into docs/results.md and the rows into docs/methods/measured.json.
"""

from __future__ import annotations

from typing import Any

from tables import Measured, megabytes, options, played, spread, write, write_rows

import nestling
from nestling import Data, EngineConfig, Evaluation, Experiment, FleetConfig, Named, SplitConfig, Tier, Train
from nestling.fair import GROUPS
from nestling.methods import METHODS, method_class

BUDGETS = (1.0, 0.75, 0.5, 0.375, 0.25)
ROUNDS = 30

WIDE = Named("tinycnn", {"norm": "group"})
DEEP = Named("tinyresnet", {"norm": "group", "blocks": [9], "channels": [16, 16]})
EXITS = Named("tinyresnet", {**DEEP.options, "exits": [2, 3, 4, 6, 9]})
"""Nine equal blocks, of which 9, 6, 4, 3 and 2 are the most that the five budgets allow; with exits where these cuts are."""

OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"cut": "depth"} for name in ("heteroavg", "fedprox", "scaffold", "fednova", "moon")},
    "fjord": {"levels": sorted(BUDGETS)},
}
"""What a method is told to belong to its group and to meet the budgets; all else is its default."""

COLUMNS = ("global accuracy", "personal accuracy", "smallest tier", "parameters a tier trains", "up + down a round")

SETTING = "Fashion-MNIST, Dirichlet(0.5), 100 clients, 10 a round, five tiers, 30 rounds, 3 seeds"

EVERYWHERE = ("fedavg", "local")
"""References that stand in every table."""


def main() -> None:
    chosen = options(__doc__ or "", "fashion_table.json", "names of methods")
    lines, seeds = lines_of(chosen.lines), range(chosen.seeds)
    found = played(play, {_key(*line, seed): (*line, seed) for line in lines for seed in seeds}, chosen)
    rows = {line: [found[_key(*line, seed)] for seed in seeds] for line in lines}
    text = tables(rows)
    print(text)
    if chosen.write:
        _write(text, rows)


def play(group: str, name: str, seed: int) -> dict[str, Any]:
    """One run."""
    result = nestling.run(experiment(group, name, seed))
    summary, world = result.summary, result.federation.world
    trained = [world.cost(result.federation.method.piece(world.device(world.fleet.member(t, 0)), 0)) for t in world.plans]
    return {
        "global": summary["global_accuracy"]["last"],
        "personal": summary["personal_accuracy"]["last"],
        "smallest": summary["by_tier"]["budget-0.25"]["global_accuracy"]["last"],
        "bytes": (summary["bytes_up"] + summary["bytes_down"]) / summary["rounds"],
        "params": [cost.params for cost in trained],
        "seconds": summary["seconds"],
    }


def experiment(group: str, name: str, seed: int) -> Experiment:
    """The experiment of one line of the table."""
    cut, share = "depth" if group == "B" else "width", 1 / len(BUDGETS)
    tiers = tuple(Tier(name=f"budget-{ratio:g}", ratio=ratio, cut=cut, share=share) for ratio in BUDGETS)
    return Experiment(
        method=Named(name, OPTIONS.get(name, {})),
        model=_network(group, name),
        data=Data("fashion-mnist"),
        seed=seed,
        rounds=ROUNDS,
        participants=10,
        split=SplitConfig(kind="dirichlet", alpha=0.5),
        fleet=FleetConfig(size=100, tiers=tiers),
        train=Train(epochs=1, batch=20, lr=0.05, augment="none"),
        engine=EngineConfig("inline"),
        evaluate=Evaluation(every=ROUNDS, clients=20),
    )


def _network(group: str, name: str) -> Named:
    """The group's network, unless the method needs exits."""
    own = method_class(name).info.model
    if group == "B":
        return EXITS if own == "tinyexits" else DEEP
    return Named(own, {"norm": "group"}) if own else WIDE


def _called(network: Named) -> str:
    return f"{network.name} with exits" if "exits" in network.options else network.name


def tables(rows: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """A table for every group that has lines."""
    parts = []
    for group, fair in GROUPS.items():
        own = {name: found for (where, name), found in rows.items() if where == group}
        if not own:
            continue
        parts.append(f"**Group {group}: {fair.title}.** Measured by {fair.metric}.\n")
        parts.append(f"| method | network | {' | '.join(COLUMNS)} |")
        parts.append("|---|---|---|---|---|---|---|")
        parts += [
            f"| {method_class(n).info.title} | {_called(_network(group, n))} | {_cells(found)} |" for n, found in own.items()
        ]
        parts.append("")
    return "\n".join(parts)


def _cells(found: list[dict[str, Any]]) -> str:
    cells = [spread([r[key] for r in found]) for key in ("global", "personal", "smallest")]
    sizes = " / ".join(f"{count / 1000:.1f}k" for count in found[0]["params"])
    return " | ".join([*cells, sizes, megabytes(found)])


def lines_of(chosen: str) -> list[tuple[str, str]]:
    """(group, method) for every line; `chosen` names methods, separated by commas (empty: all)."""
    groups = ("A", "B", "C", "G")
    own = [(group, name) for group in groups for name in METHODS if method_class(name).info.group == group]
    common = [(group, name) for group in groups for name in EVERYWHERE]
    names = chosen.split(",") if chosen else list(METHODS)
    return sorted(
        [line for line in (*own, *common) if line[1] in names], key=lambda line: (line[0], line[1] in EVERYWHERE, line[1])
    )


def _key(group: str, name: str, seed: int) -> str:
    return f"{name} {_network(group, name).name} {seed}"


def _write(text: str, rows: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    write("fashion table", text)
    # Reversed, so that a method that stands in several tables has the row of the first.
    measured = {name: Measured(_called(_network(g, name)), _cells(found)) for (g, name), found in reversed(rows.items())}
    write_rows(measured, SETTING, COLUMNS)


if __name__ == "__main__":
    main()

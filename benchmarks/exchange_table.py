"""The table of the methods that exchange knowledge: Fashion-MNIST, three unrelated families of networks, three seeds.

    NESTLING_DATA=FOLDER python benchmarks/exchange_table.py [--lines a,b] [--seeds 3] [--workers 1] [--cache FILE] [--write]

Twelve clients with 120 rows each (Dirichlet 0.5), everybody in every round, 300 unlabelled public rows. All networks are convolutional,
so that DraftFed can take part. The method's settings are its defaults. Runs that the cache already holds are not played again.
`--write` puts the tables into docs/results.md and the rows into docs/methods/measured.json.
"""

from __future__ import annotations

import statistics
from typing import Any

from tables import Measured, megabytes, options, played, spread, write, write_rows

import nestling
from nestling import Data, EngineConfig, Evaluation, Experiment, FleetConfig, Named, SplitConfig, Tier, Train
from nestling.fair import GROUPS
from nestling.methods import METHODS, method_class

ROUNDS = 10
FLEET = FleetConfig(
    tiers=(
        Tier(name="tinycnn", ratio=1.0, count=4),
        Tier(name="tinyresnet", model="tinyresnet", model_options={"blocks": [2, 1], "channels": [8, 16, 16]}, count=4),
        Tier(name="dscnn", model="dscnn", model_options={"width": 0.25, "blocks": 3}, count=4),
    )
)
COLUMNS = ("global accuracy", "personal accuracy", *(tier.name for tier in FLEET.tiers), "up + down a round")
SETTING = "Fashion-MNIST, Dirichlet(0.5), 12 clients of three families with 120 rows each, all in every round, 10 rounds, 3 seeds"
ALONE = "local"


def main() -> None:
    chosen = options(__doc__ or "", "exchange_table.json", "names of methods")
    lines = lines_of(chosen.lines)
    found = played(play, {f"{name} {seed}": (name, seed) for name in lines for seed in range(chosen.seeds)}, chosen)
    rows = {name: [found[f"{name} {seed}"] for seed in range(chosen.seeds)] for name in lines}
    text = tables(rows)
    print(text)
    if chosen.write:
        write("exchange table", text)
        write_rows({n: Measured("three families", _cells(found)) for n, found in rows.items() if n != ALONE}, SETTING, COLUMNS)


def play(name: str, seed: int) -> dict[str, Any]:
    """One run."""
    summary = nestling.run(experiment(name, seed)).summary
    return {
        "global": summary["global_accuracy"]["last"],
        "personal": summary["personal_accuracy"]["last"],
        "tiers": {name: tier["personal_accuracy"]["last"] for name, tier in summary["by_tier"].items()},
        "bytes": (summary["bytes_up"] + summary["bytes_down"]) / summary["rounds"],
        "seconds": summary["seconds"],
    }


def experiment(name: str, seed: int) -> Experiment:
    """The experiment of one line of the table."""
    # FedFTG fine-tunes the average of one network's parts: the same clients, each with the tinycnn.
    fleet = FLEET if method_class(name).info.own_networks else FleetConfig(tiers=(Tier(name="tinycnn", ratio=1.0, count=12),))
    return Experiment(
        method=Named(name),
        model=Named("tinycnn", {"channels": [8, 16, 32]}),
        data=Data("fashion-mnist"),
        seed=seed,
        rounds=ROUNDS,
        participants=0,
        split=SplitConfig(kind="dirichlet", alpha=0.5, size=120, public=0.005),
        fleet=fleet,
        train=Train(epochs=2, batch=20, lr=0.05, augment="none"),
        engine=EngineConfig("inline"),
        evaluate=Evaluation(every=ROUNDS, clients=12),
    )


def tables(rows: dict[str, list[dict[str, Any]]]) -> str:
    """A table for every group, with training alone in each."""
    parts = []
    for group in ("D", "E", "F"):
        own = [name for name in rows if method_class(name).info.group == group]
        if own:
            parts.append(f"**Group {group}: {GROUPS[group].title}.** Measured by {GROUPS[group].metric}.\n")
            parts += [f"| method | {' | '.join(COLUMNS)} |", "|" + "---|" * (len(COLUMNS) + 1)]
            shown = [*own, *([ALONE] if ALONE in rows else [])]
            parts += [f"| {method_class(name).info.title} | {_cells(rows[name])} |" for name in shown]
            parts.append("")
    return "\n".join(parts)


def _cells(found: list[dict[str, Any]]) -> str:
    every = [spread([row[key] for row in found]) for key in ("global", "personal")]
    tiers = [
        f"{100 * statistics.mean(row['tiers'][tier.name] for row in found):.2f} %" if tier.name in found[0]["tiers"] else "–"
        for tier in FLEET.tiers
    ]
    return " | ".join([*every, *tiers, megabytes(found)])


def lines_of(chosen: str) -> list[str]:
    names = [name for name in METHODS if method_class(name).info.group in ("D", "E", "F")] + [ALONE]
    return [name for name in names if not chosen or name in chosen.split(",")]


if __name__ == "__main__":
    main()

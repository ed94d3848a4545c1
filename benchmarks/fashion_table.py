"""The table of the sub-model methods: Fashion-MNIST, Dirichlet(0.5), 100 clients, ten a round, five tiers, three seeds.

    NESTLING_DATA=FOLDER python benchmarks/fashion_table.py [--methods a,b] [--seeds 3] [--workers 2] [--cache FILE] [--write]

Every tier has a budget of parameters, the same for all methods of a group; what a method really trains there stands in the table,
because methods reach a budget more or less closely. Runs that the cache already holds are not played again. `--write` puts the tables
into docs/results.md and the rows into docs/methods/measured.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

import nestling
from nestling import Data, EngineConfig, Evaluation, Experiment, FleetConfig, Named, SplitConfig, Tier, Train
from nestling.fair import GROUPS
from nestling.methods import METHODS, method_class

DOCS = Path(__file__).resolve().parent.parent / "docs"
BUDGETS = (1.0, 0.75, 0.5, 0.375, 0.25)
ROUNDS = 30
BEGIN, END = "<!-- fashion table: begin -->", "<!-- fashion table: end -->"

WIDE = Named("tinycnn", {"norm": "group"})
DEEP = Named("tinyresnet", {"norm": "group"})
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"cut": "depth"} for name in ("heteroavg", "fedprox", "scaffold", "fednova", "moon")},
    "fjord": {"levels": sorted(BUDGETS)},
}
"""What a method is told to belong to its group and to meet the budgets; all else is its default."""

COLUMNS = ("global accuracy", "personal accuracy", "smallest tier", "parameters a tier trains", "up + down a round")

EVERYWHERE = ("fedavg", "local")
"""References that stand in every table."""


def main() -> None:
    options = _options()
    cache = Path(options.cache)
    known: dict[str, Any] = json.loads(cache.read_text()) if cache.exists() else {}
    wanted = [(group, name, seed) for group, name in _lines(options.methods) for seed in range(options.seeds)]
    missing = list({_key(*line): line for line in wanted if _key(*line) not in known}.values())
    print(f"{len(wanted)} runs, {len(missing)} to play", flush=True)
    with ProcessPoolExecutor(options.workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running = {pool.submit(play, *line): line for line in missing}
        for done in as_completed(running):
            line = running[done]
            known[_key(*line)] = done.result()
            cache.write_text(json.dumps(known, indent=1))
            row = known[_key(*line)]
            print(
                f"{_key(*line)}: global {row['global']:.2%}, personal {row['personal']:.2%}, {row['seconds']:.0f} s", flush=True
            )
    rows = {(group, name): [known[_key(group, name, s)] for s in range(options.seeds)] for group, name in _lines(options.methods)}
    text = tables(rows)
    print(text)
    if options.write:
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
    tiers = tuple(Tier(name=f"budget-{ratio:g}", ratio=ratio, share=1 / len(BUDGETS)) for ratio in BUDGETS)
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
    return Named(own, {"norm": "group"}) if own else DEEP if group == "B" else WIDE


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
        parts += [f"| {method_class(n).info.title} | {_network(group, n).name} | {_cells(found)} |" for n, found in own.items()]
        parts.append("")
    return "\n".join(parts)


def _cells(found: list[dict[str, Any]]) -> str:
    cells = [_spread([r[key] for r in found]) for key in ("global", "personal", "smallest")]
    sizes = " / ".join(f"{count / 1000:.1f}k" for count in found[0]["params"])
    travelled = f"{statistics.mean(r['bytes'] for r in found) / 1e6:.2f} MB"
    return " | ".join([*cells, sizes, travelled])


def _spread(values: list[float]) -> str:
    spread = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.2f}{spread} %"


def _lines(chosen: str) -> list[tuple[str, str]]:
    """(group, method) for every line; `chosen` names methods, separated by commas (empty: all)."""
    groups = ("A", "B", "C", "D", "G")
    own = [(group, name) for group in groups for name in METHODS if method_class(name).info.group == group]
    common = [(group, name) for group in groups for name in EVERYWHERE]
    names = chosen.split(",") if chosen else list(METHODS)
    return sorted(
        [line for line in (*own, *common) if line[1] in names], key=lambda line: (line[0], line[1] in EVERYWHERE, line[1])
    )


def _key(group: str, name: str, seed: int) -> str:
    return f"{name} {_network(group, name).name} {seed}"


def _write(text: str, rows: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    page = DOCS / "results.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")
    measured = {name: {"network": _network(g, name).name, "cells": _cells(found)} for (g, name), found in reversed(rows.items())}
    (DOCS / "methods").mkdir(exist_ok=True)
    (DOCS / "methods" / "measured.json").write_text(
        json.dumps(dict(sorted(measured.items())), indent=1, ensure_ascii=False) + "\n"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="", help="separated by commas (default: all there are)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cache", default="fashion_table.json")
    parser.add_argument("--write", action="store_true", help="put the tables into the documentation")
    return parser.parse_args()


if __name__ == "__main__":
    main()

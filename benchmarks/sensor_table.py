"""Sensor windows instead of images: the default experiment on smartphone motion (HAR), every client
one person.

    NESTLING_DATA=FOLDER python benchmarks/sensor_table.py [--lines a,b] [--seeds 3] [--workers 2]
        [--cache FILE] [--write]

All but data and split is as `nestling run` has it: cnn1d, 21 devices of seven kinds, ten a round,
30 rounds of two epochs. Nobody whose windows are tested has trained. Beside it stand ceilings: the
whole network and the piece of the smallest device, each trained by one party that has all rows,
with as many passes over them as the clients make together. `--write` puts the table into
docs/results.md.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from tables import megabytes, options, played, spread, write
from torch import nn

import nestling
from nestling import Data, EngineConfig, Experiment, SplitConfig
from nestling.methods import method_class
from nestling.runs.assemble import assemble
from nestling.training.trainer import train

METHODS = ("shared-average", "heterofl", "fedrolex", "fedavg", "local", "all-large")
CENTRAL = {
    "central": "the whole network, all rows in one place",
    "central-smallest": "the smallest piece, all rows in one place",
}
FLOOR = "fedavg"


def main() -> None:
    chosen = options(
        __doc__ or "", "sensor_table.json", "names of methods, central, central-smallest"
    )
    lines = [
        line for line in (*METHODS, *CENTRAL) if not chosen.lines or line in chosen.lines.split(",")
    ]
    found = played(
        play,
        {f"{name} {seed}": (name, seed) for name in lines for seed in range(chosen.seeds)},
        chosen,
    )
    text = table(
        {name: [found[f"{name} {seed}"] for seed in range(chosen.seeds)] for name in lines}
    )
    print(text)
    if chosen.write:
        write("sensor table", text)


def play(name: str, seed: int) -> dict[str, Any]:
    """One run, or one training of everything in one place."""
    if name in CENTRAL:
        return central(experiment("fedavg", seed), smallest=name != "central")
    summary = nestling.run(experiment(name, seed)).summary
    first = next(iter(summary["by_tier"].values()))
    return {
        "global": summary["global_score"]["last"],
        "smallest": first["global_score"]["last"],
        "bytes": (summary["bytes_up"] + summary["bytes_down"]) / summary["rounds"],
        "seconds": summary["seconds"],
    }


def experiment(name: str, seed: int) -> Experiment:
    """The experiment of one line."""
    return Experiment(
        method=name,
        seed=seed,
        data=Data("har"),
        split=SplitConfig(kind="natural"),
        engine=EngineConfig("inline"),
    )


def central(asked: Experiment, *, smallest: bool) -> dict[str, Any]:
    """The accuracy of a network that sees all rows as often as ten clients a round do together."""
    began = time.perf_counter()
    settled, federation = assemble(asked)
    world, bench = federation.world, federation.bench
    plan = next(iter(world.plans.values()))
    view = plan.piece.view if smallest else world.main.full
    network = copy.deepcopy(world.main.network(view, view.extract(world.main.initial)))
    share = settled.participants / len(world.fleet)
    for epoch in range(round(settled.rounds * settled.train.epochs * share)):
        phase = settled.train.phase(1 + int(epoch / settled.train.epochs / share), epochs=1)
        train(network, phase, bench.x, bench.y, settled.seed, round=epoch)
    return {
        "global": accuracy(network, bench.x_test, bench.y_test),
        "bytes": 0.0,
        "seconds": time.perf_counter() - began,
    }


def accuracy(network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """The share of rows that a network gets right."""
    network.eval()
    with torch.no_grad():
        return float((network(x).argmax(1) == y).double().mean())


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """One line a method, then the ceilings."""
    lines = [
        "| | global accuracy | over FedAvg | smallest tier | up + down a round |",
        "|---|---|---|---|---|",
    ]
    for name, found in rows.items():
        over = "–"
        if name != FLOOR and FLOOR in rows:
            over = spread(
                [a["global"] - b["global"] for a, b in zip(found, rows[FLOOR], strict=True)],
                "+",
                "",
            )
        own = [row["smallest"] for row in found if "smallest" in row]
        title = CENTRAL.get(name) or method_class(name).info.title
        lines.append(
            f"| {title} | {spread([r['global'] for r in found])} | {over} | "
            f"{spread(own) if own else '–'} | {megabytes(found)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""The table of the README: the methods on the default data, fleet and budget.

    python benchmarks/default_table.py [--seeds 3] [--lines a,b] [--workers 2] [--cache FILE]

Prints a Markdown table, mean ± standard deviation over the seeds, with the margin of each method
over FedAvg, which trains the model that fits the smallest device, seed by seed. Where the server
keeps weights it also tests the mean of its last five models (`server.average = 5`), which changes
nothing in training. Runs that the cache already holds are not played again.
"""

from __future__ import annotations

from typing import Any

from tables import megabytes, options, played, spread

import nestling
from nestling import EngineConfig, Experiment
from nestling.methods import method_class
from nestling.methods.server import Server
from nestling.runs.evaluation import evaluate

ORDER = (
    "shared-average",
    "shared-distill",
    "heterofl",
    "fedavg",
    "decoupled",
    "local",
    "all-large",
)
FLOOR, AVERAGE = "fedavg", 5
ALONE = ("decoupled", "local", "shared-distill")
"""Those without such a mean: their servers keep no weights that clients train from, or none of one
model."""


def main() -> None:
    chosen = options(__doc__ or "", "default_table.json", "names of methods")
    lines = chosen.lines.split(",") if chosen.lines else list(ORDER)
    wanted = {f"{name} {seed}": (name, seed) for seed in range(chosen.seeds) for name in lines}
    found = played(play, wanted, chosen)
    rows = {name: [found[f"{name} {seed}"] for seed in range(chosen.seeds)] for name in lines}
    print(table(rows))


def play(name: str, seed: int) -> dict[str, Any]:
    """One run, which ends with a test of the last models and, where there is one, of the mean of
    the last five."""
    server = Server() if name in ALONE else Server(average=AVERAGE)
    result = nestling.run(
        Experiment(method=name, seed=seed, engine=EngineConfig("inline"), server=server)
    )
    federation, summary = result.federation, result.summary
    last = evaluate(federation.method, federation.world, federation.bench)
    smallest = next(iter(last["by_tier"]))
    return {
        "global": last["global_score"],
        "personal": last["personal_score"],
        "smallest": last["by_tier"][smallest]["global_score"],
        "averaged": summary["global_score"]["last"],
        "bytes": (summary["bytes_up"] + summary["bytes_down"]) / summary["rounds"],
        "seconds": summary["seconds"],
    }


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """One line a method."""
    head = (
        "method | global accuracy | over FedAvg | mean of the last five | personal accuracy | "
        "smallest tier | up + down a round"
    )
    lines = [f"| {head} |", "|" + "---|" * (1 + head.count("|"))]
    for name, found in rows.items():
        over = "–"
        if name != FLOOR and FLOOR in rows:
            over = spread(
                [a["global"] - b["global"] for a, b in zip(found, rows[FLOOR], strict=True)],
                "+",
                "",
            )
        cells = [spread([r["global"] for r in found]), over]
        cells.append("–" if name in ALONE else spread([r["averaged"] for r in found]))
        cells += [spread([r[key] for r in found]) for key in ("personal", "smallest")]
        lines.append(
            f"| {method_class(name).info.title} | {' | '.join([*cells, megabytes(found)])} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

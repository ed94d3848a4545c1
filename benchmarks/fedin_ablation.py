"""FedIN's ablation: Fashion-MNIST, Dirichlet(0.5), 51 clients of three depths, ten a round, three
seeds.

    NESTLING_DATA=FOLDER python benchmarks/fedin_ablation.py [--lines FedIN,…] [--seeds 3]
        [--rounds 300] [--device cpu|cuda] [--workers 1] [--cache FILE] [--write]

The lines are those of the paper's own ablation (its networks and rounds are far larger): FedAvg
averaged by layer, the pull alone, the pairs alone, the pairs with plainly added gradients,
everything, and everything with noise. Accuracy is the mean of the clients' models on the global
test set, as there. Runs that the cache already holds are not played again. `--write` puts the table
into docs/results.md.
"""

from __future__ import annotations

import statistics
from typing import Any

from tables import engine_on, megabytes, options, played_by_seed, spread, write

import nestling
from nestling import (
    Data,
    Evaluation,
    Experiment,
    FleetConfig,
    Named,
    SplitConfig,
    Tier,
    Train,
)

ROUNDS = 300
TESTS, LAST = 30, 5
"""Accuracies are means over the last five of thirty tests."""
BUDGETS = (1.0, 0.72, 0.45)
"""Shares of the parameters; with three blocks a client trains 3, 2 or 1 of them."""

LINES: dict[str, Named] = {
    "FedAvg (HeteroAvg)": Named("heteroavg", {"cut": "depth"}),
    "w/o IN": Named("fedin", {"exchange": False}),
    "w/o Prox": Named("fedin", {"mu": 0.0}),
    "w/o Opt": Named("fedin", {"rule": "sum"}),
    "FedIN": Named("fedin"),
    "FedIN + noise": Named("fedin", {"noise": 0.8}),
}


def main() -> None:
    chosen = options(__doc__ or "", "fedin_ablation.json", ", ".join(LINES), ROUNDS)
    lines = chosen.lines.split(",") if chosen.lines else list(LINES)
    text = table(played_by_seed(play, lines, chosen))
    print(text)
    if chosen.write:
        write("fedin", text)


def play(line: str, seed: int, rounds: int, device: str) -> dict[str, Any]:
    """One run."""
    made = experiment(line, seed, rounds).with_changes(engine=engine_on(device))
    result = nestling.run(made)
    summary = result.summary
    tested = [row for row in result.metrics if row["global_score"] is not None][-LAST:]
    tiers = [tier["global_score"] for row in tested for tier in row["by_tier"].values()]
    return {
        # Every depth has as many clients, and clients of one depth have one model.
        "clients": statistics.mean(tiers),
        "global": statistics.mean(row["global_score"] for row in tested),
        "bytes": (summary["bytes_up"] + summary["bytes_down"]) / summary["rounds"],
        "seconds": summary["seconds"],
    }


def experiment(line: str, seed: int, rounds: int = ROUNDS) -> Experiment:
    """The experiment of one line of the table."""
    tiers = tuple(
        Tier(name=f"budget-{ratio:g}", ratio=ratio, cut="depth", share=1 / len(BUDGETS))
        for ratio in BUDGETS
    )
    return Experiment(
        method=LINES[line],
        model=Named("tinyresnet", {"blocks": [3], "channels": [8, 8]}),
        data=Data("fashion-mnist"),
        seed=seed,
        rounds=rounds,
        participants=10,
        split=SplitConfig(kind="dirichlet", alpha=0.5, size=300),
        fleet=FleetConfig(size=51, tiers=tiers),
        train=Train(epochs=2, batch=16, lr=0.05, augment="none"),
        evaluate=Evaluation(every=max(1, rounds // TESTS), clients=9),
    )


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """The table in Markdown."""
    lines = [
        "| | mean of the clients' models | deepest model | up + down a round |",
        "|---|---|---|---|",
    ]
    for line, found in rows.items():
        cells = [spread([row[key] for row in found]) for key in ("clients", "global")]
        lines.append(f"| {line} | {' | '.join(cells)} | {megabytes(found)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

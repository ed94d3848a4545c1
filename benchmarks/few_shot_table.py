"""The methods that exchange knowledge where they are meant to work: a few classes and a few rows a client, on Fashion-MNIST.

    NESTLING_DATA=FOLDER python benchmarks/few_shot_table.py [--mix mild|strong] [--lines a,b] [--seeds 3] [--rounds 50]
        [--device cpu|cuda] [--workers 2] [--cache FILE] [--write]

Twelve clients hold three classes each and twenty rows of each class, everybody takes part in every round, and the server has 1 200
public rows. In the mild mix all networks are TinyCNNs of three widths with equally many features, in the strong one three unrelated
families. The floor is training alone with the same networks and the same local epochs, at the best of three learning rates (by seed
100); every method has its defaults at one rate, so that what is above the floor is not the floor's rate. Accuracies are means over the
last three of five tests. Runs that the cache already holds are not played again. `--write` puts the table into docs/results.md.
"""

from __future__ import annotations

import statistics
from typing import Any

import exchange_table
from tables import engine_on, megabytes, options, played, spread, write

import nestling
from nestling import Data, Evaluation, Experiment, FleetConfig, Named, SplitConfig, Tier, Train
from nestling.methods import method_class

ROUNDS, TESTS, LAST, TRIAL = 50, 5, 3, 100
RATE, RATES = 0.05, (0.02, 0.05, 0.1)
MIXES = {
    "mild": FleetConfig(
        tiers=tuple(
            Tier(name=f"{narrow}-{wide}", model="tinycnn", model_options={"channels": [narrow, wide, 32]}, count=4)
            for narrow, wide in ((8, 16), (10, 20), (12, 24))
        )
    ),
    "strong": exchange_table.FLEET,
}
ALONE = "local"
METHODS = (
    "fedmd", "feddf", "fedet", "draftfed", "kt-pfl", "fedhenn", "fd", "fml", "fedkd", "fedgen", "fedproto", "fedtgp", "fedhkd",
    "fedcma", "fedgh", "lg-fedavg",
)  # fmt: skip


def main() -> None:
    chosen = options(__doc__ or "", "few_shot_table.json", "names of methods", ROUNDS, mixes=tuple(MIXES))
    lines, seeds, rounds, mix = (
        chosen.lines.split(",") if chosen.lines else METHODS,
        range(chosen.seeds),
        chosen.rounds,
        chosen.mix,
    )
    trials = {_key(mix, ALONE, TRIAL, lr, rounds): (mix, ALONE, TRIAL, lr, rounds, chosen.device) for lr in RATES}
    tried = played(play, trials, chosen)
    best = max(RATES, key=lambda lr: tried[_key(mix, ALONE, TRIAL, lr, rounds)]["personal"])
    rates = {**dict.fromkeys(lines, RATE), ALONE: best}
    wanted = {
        _key(mix, name, seed, lr, rounds): (mix, name, seed, lr, rounds, chosen.device)
        for seed in seeds
        for name, lr in rates.items()
    }
    found = played(play, wanted, chosen)
    rows = {name: [found[_key(mix, name, seed, lr, rounds)] for seed in seeds] for name, lr in rates.items()}
    text = table(rows, best)
    print(text)
    if chosen.write:
        write(f"few-shot table, {mix}", text)


def play(mix: str, name: str, seed: int, lr: float, rounds: int, device: str) -> dict[str, Any]:
    """One run."""
    result = nestling.run(experiment(mix, name, seed, lr, rounds).with_changes(engine=engine_on(device)))
    tested = [row for row in result.metrics if row["global_accuracy"] is not None][-LAST:]
    return {
        "personal": statistics.mean(row["personal_accuracy"] for row in tested),
        "global": statistics.mean(row["global_accuracy"] for row in tested),
        "bytes": (result.summary["bytes_up"] + result.summary["bytes_down"]) / rounds,
        "seconds": result.summary["seconds"],
    }


def experiment(mix: str, name: str, seed: int, lr: float = RATE, rounds: int = ROUNDS) -> Experiment:
    """The experiment of one line of the table."""
    return Experiment(
        method=Named(name),
        model=Named("tinycnn", {"channels": [8, 16, 32]}),
        data=Data("fashion-mnist"),
        seed=seed,
        rounds=rounds,
        participants=0,
        split=SplitConfig(kind="classes", classes=3, size=60, public=0.02),
        fleet=MIXES[mix],
        train=Train(epochs=2, batch=10, lr=lr, augment="none"),
        evaluate=Evaluation(every=max(1, rounds // TESTS), clients=12),
    )


def table(rows: dict[str, list[dict[str, Any]]], rate: float) -> str:
    """One line a method, the floor last."""
    alone = rows[ALONE]
    lines = [
        "| method | personal accuracy | over training alone | in how many seeds | up + down a round |",
        "|---|---|---|---|---|",
    ]
    for name, found in rows.items():
        over = [a["personal"] - b["personal"] for a, b in zip(found, alone, strict=True)]
        cells = ["–", "–"] if name == ALONE else [spread(over, "+", ""), f"{sum(d > 0 for d in over)} of {len(over)}"]
        lines.append(
            f"| {method_class(name).info.title} | {spread([r['personal'] for r in found])} | {' | '.join(cells)} | {megabytes(found)} |"
        )
    return "\n".join([*lines, "", f"Training alone at a learning rate of {rate:g}, the best of three; all others at {RATE:g}."])


def _key(mix: str, name: str, seed: int, lr: float, rounds: int) -> str:
    return f"{mix}: {name} {seed}, {rounds} rounds at {lr:g}"


if __name__ == "__main__":
    main()

"""DraftFed's orderings: training alone, FedMD, and DraftFed with all, single and paired losses on a
mix of small CNNs, three seeds.

    NESTLING_DATA=FOLDER python benchmarks/draftfed_orderings.py [--lines a,b] [--seeds 3]
        [--rounds 50] [--device cpu|cuda] [--workers 1] [--cache FILE] [--write]

Fashion-MNIST, 20 clients of three families with 100 rows each, IID, everybody in every round, |G| =
512 unlabelled rows. Measured as published: the mean of the clients' models on the common test rows.
The published networks, optimiser and rounds are out of reach or unknown, so that what can be
compared are orders, not figures. Runs that the cache already holds are not played again. `--write`
puts the table into docs/results.md.
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

ROWS, BATCH, ROUNDS = 512, 32, 50
TESTS, LAST = 10, 3
"""Accuracies are means over the last three of ten tests."""

FLEET = FleetConfig(
    tiers=(
        Tier(name="tinycnn", model="tinycnn", model_options={"channels": [8, 16, 32]}, count=4),
        Tier(
            name="wide tinycnn", model="tinycnn", model_options={"channels": [16, 32, 64]}, count=4
        ),
        Tier(
            name="tinyresnet",
            model="tinyresnet",
            model_options={"blocks": [2, 1], "channels": [8, 16, 16]},
            count=6,
        ),
        Tier(name="dscnn", model="dscnn", model_options={"width": 0.25, "blocks": 3}, count=6),
    )
)


def _draftfed(*on: int, order: str = "draft-local") -> Named:
    weights = {f"lambda{number}": float(number in on) for number in (1, 2, 3)}
    return Named("draftfed", {**weights, "rows": ROWS, "batch": BATCH, "order": order})


LINES: dict[str, tuple[str, Named]] = {
    "local": ("Local", Named("local")),
    "fedmd": ("FedMD", Named("fedmd", {"align": ROWS, "digest_batch": BATCH, "pretrain": 0})),
    "l1": ("DraftFed, D1", _draftfed(1)),
    "l2": ("DraftFed, D2", _draftfed(2)),
    "l3": ("DraftFed, D3", _draftfed(3)),
    "l1+l2": ("DraftFed, D1 + D2", _draftfed(1, 2)),
    "l1+l3": ("DraftFed, D1 + D3", _draftfed(1, 3)),
    "l2+l3": ("DraftFed, D2 + D3", _draftfed(2, 3)),
    "all": ("DraftFed, D1 + D2 + D3", _draftfed(1, 2, 3)),
    "all-last": (
        "DraftFed, D1 + D2 + D3, local training first",
        _draftfed(1, 2, 3, order="local-draft"),
    ),
}
"""Name → title and method. FedMD goes without public labels, as the others do. DraftFed is looked
at after local training, as FedMD is, but for the last line."""

PUBLISHED = {
    "local": "68.55",
    "fedmd": "68.65",
    "l1": "68.49",
    "l2": "68.86",
    "l3": "68.84",
    "l1+l2": "68.86",
    "l1+l3": "68.88",
    "l2+l3": "68.91",
    "all": "68.92",
}
"""The paper's DenseNets: Local and FedMD with CIFAR-10 as G, DraftFed's losses as the mean over
three other sets as G."""

COLUMNS = (
    "method",
    *(tier.name for tier in FLEET.tiers),
    "all",
    "above Local",
    "up + down a round",
    "published (DenseNets)",
)


def main() -> None:
    chosen = options(__doc__ or "", "draftfed_orderings.json", ", ".join(LINES), ROUNDS)
    names = chosen.lines.split(",") if chosen.lines else list(LINES)
    text = table(played_by_seed(play, names, chosen))
    print(text)
    if chosen.write:
        write("draftfed", text)


def play(name: str, seed: int, rounds: int, device: str) -> dict[str, Any]:
    """One run."""
    made = experiment(name, seed, rounds).with_changes(engine=engine_on(device))
    result = nestling.run(made)
    summary = result.summary
    tested = [row for row in result.metrics if row["global_score"] is not None][-LAST:]
    return {
        "global": statistics.mean(row["global_score"] for row in tested),
        "tiers": [
            statistics.mean(row["by_tier"][tier.name]["global_score"] for row in tested)
            for tier in FLEET.tiers
        ],
        "bytes": (summary["bytes_up"] + summary["bytes_down"]) / summary["rounds"],
        "seconds": summary["seconds"],
    }


def experiment(name: str, seed: int, rounds: int = ROUNDS) -> Experiment:
    """The experiment of one line of the table."""
    return Experiment(
        method=LINES[name][1],
        data=Data("fashion-mnist"),
        seed=seed,
        rounds=rounds,
        participants=0,
        split=SplitConfig(kind="iid", size=100, public=0.009),
        fleet=FLEET,
        train=Train(epochs=2, batch=10, optimizer="adam", lr=0.003, augment="none"),
        evaluate=Evaluation(every=max(1, rounds // TESTS), clients=20),
    )


def table(rows: dict[str, list[dict[str, Any]]]) -> str:
    """One line a method."""
    floor = [run["global"] for run in rows.get("local", [])]
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for name, runs in rows.items():
        tiers = [
            f"{100 * statistics.mean(of):.2f} %"
            for of in zip(*(run["tiers"] for run in runs), strict=True)
        ]
        found = [run["global"] for run in runs]
        # Seeds share networks, rows and split, so that differences are taken seed by seed.
        above = (
            spread([a - b for a, b in zip(found, floor, strict=True)], "+", "")
            if floor and name != "local"
            else "–"
        )
        cells = [
            LINES[name][0],
            *tiers,
            spread(found),
            above,
            megabytes(runs),
            PUBLISHED.get(name, "–"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()

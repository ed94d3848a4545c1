"""The table of the README: every method on the default data, fleet and budget.

    python benchmarks/default_table.py [SEEDS]

Prints a Markdown table (mean over the seeds, ± standard deviation where there are several), and last the margin of each fusion over
FedAvg with the model that fits the smallest device.
"""

from __future__ import annotations

import statistics
import sys

import nestling
from nestling.methods import METHODS, method_class

ORDER = ("shared-average", "shared-distill", "heterofl", "fedavg", "decoupled", "local", "all-large")


def main(seeds: int) -> None:
    print("| method | global accuracy | personal accuracy | smallest tier | up + down a round |")
    print("|---|---|---|---|---|")
    means = {}
    for name in ORDER:
        runs = [nestling.run(nestling.Experiment(method=name, seed=seed)).summary for seed in range(seeds)]
        means[name] = statistics.mean(r["global_accuracy"]["last"] for r in runs)
        tier = next(iter(runs[0]["by_tier"]))
        cells = [
            _spread([r["global_accuracy"]["last"] for r in runs]),
            _spread([r["personal_accuracy"]["last"] for r in runs]),
            _spread([r["by_tier"][tier]["global_accuracy"]["last"] for r in runs]),
            f"{statistics.mean((r['bytes_up'] + r['bytes_down']) / r['rounds'] for r in runs) / 1e6:.2f} MB",
        ]
        print(f"| {method_class(name).info.title} | {' | '.join(cells)} |", flush=True)
    for name in ("shared-average", "shared-distill"):
        print(
            f"{name} over fedavg: {100 * (means[name] - means['fedavg']):+.2f} points, {_ratio(means, name):.2f} times fewer errors"
        )


def _ratio(means: dict[str, float], name: str) -> float:
    return (1 - means["fedavg"]) / (1 - means[name])


def _spread(values: list[float]) -> str:
    spread = f" ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.2f}{spread} %"


if __name__ == "__main__":
    assert set(ORDER) <= set(METHODS)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)

"""What registered devices cost: a fleet of 100 000 against one of 100, ten of them a round.

    python benchmarks/fleet_size.py [LARGE] [SMALL]

Each fleet runs in a process of its own. Prints peak memory and the time of a round, and last the
two differences that matter.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys

import nestling


def measure(size: int) -> dict[str, float]:
    """Peak memory (MB) and median seconds a round of a fleet of that size."""
    experiment = nestling.Experiment(
        method="shared-average",
        rounds=8,
        participants=10,
        fleet=nestling.FleetConfig(size=size),
        split=nestling.SplitConfig(size=100),
        engine=nestling.EngineConfig("inline"),
        evaluate=nestling.Evaluation(every=8, clients=14),
    )
    result = nestling.run(experiment)
    # Pieces differ between devices, so rounds are compared by the time a trained parameter takes.
    world = result.federation.world
    times = []
    for row in result.metrics[:-1]:
        work = sum(world.plans[world.device(c).tier].cost.train_macs for c in row["clients"])
        times.append(row["seconds"] / work)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"megabytes": peak, "seconds_per_gmac": statistics.median(times) * 1e9}


def in_own_process(size: int) -> dict[str, float]:
    found = subprocess.run(
        [sys.executable, __file__, "--one", str(size)], capture_output=True, text=True, check=True
    )
    return json.loads(found.stdout.splitlines()[-1])


def main(large: int, small: int) -> None:
    rows = {size: in_own_process(size) for size in (small, large)}
    for size, row in rows.items():
        print(
            f"{size:>9} devices: peak {row['megabytes']:.0f} MB, {row['seconds_per_gmac']:.3f} s "
            "a round per 10⁹ MACs"
        )
    more = rows[large]["megabytes"] - rows[small]["megabytes"]
    print(
        f"memory: {more:+.0f} MB; time of a round: "
        f"{rows[large]['seconds_per_gmac'] / rows[small]['seconds_per_gmac']:.2f} times"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(int(sys.argv[2]))))
    else:
        sizes = [int(a) for a in sys.argv[1:]]
        main(*(sizes or [100_000, 100]))

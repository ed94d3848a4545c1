"""What a million registered devices cost: a fleet of 1 000 000 against one of 10 000, a thousand of them a round.

    python benchmarks/million_devices.py [LARGE] [SMALL]

With a method whose clients keep nothing (heterofl) and one whose clients keep their model (local), the latter without and with a run
folder. Each fleet runs in a process of its own, twice, and the quieter time counts. Prints peak memory and the time of a round, and
last the largest two ratios.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import nestling

RUNS = ("heterofl", "local", "local, run folder")
TIERS = (
    nestling.Tier(name="small", ratio=0.25, share=0.5),
    nestling.Tier(name="middle", ratio=0.5, share=0.3),
    nestling.Tier(name="large", ratio=1.0, share=0.2),
)


def experiment(method: str, size: int, rounds: int = 6, participants: int = 1000) -> nestling.Experiment:
    """A tiny network and twenty rows a client, so that what a device costs beside its training would show."""
    return nestling.Experiment(
        method=method,
        rounds=rounds,
        participants=participants,
        model=nestling.Named("mlp", {"hidden": [64]}),
        fleet=nestling.FleetConfig(size=size, tiers=TIERS),
        split=nestling.SplitConfig(size=20),
        train=nestling.Train(epochs=1, augment="none"),
        engine=nestling.EngineConfig("inline"),
        evaluate=nestling.Evaluation(every=rounds, clients=3),
    )


def measure(run: str, size: int, rounds: int = 6, participants: int = 1000) -> dict[str, float]:
    """Peak memory (MB), median seconds a round, and how many clients kept a model."""
    method, _, written = run.partition(", ")
    with tempfile.TemporaryDirectory() as home:
        result = nestling.run(experiment(method, size, rounds, participants), out=Path(home) / "run" if written else None)
        return {
            "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "seconds": statistics.median(row["seconds"] for row in result.metrics[:-1]),  # the last round also tests
            "kept": len(result.federation.world.store.clients()),
        }


def in_own_process(run: str, size: int) -> dict[str, float]:
    found = subprocess.run([sys.executable, __file__, "--one", run, str(size)], capture_output=True, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def main(large: int, small: int) -> None:
    ratios = []
    for run in RUNS:
        # In turn, so that whatever else the machine does meets both.
        rows = [{size: in_own_process(run, size) for size in (small, large)} for _ in range(2)]
        best = {size: {key: min(row[size][key] for row in rows) for key in rows[0][size]} for size in (small, large)}
        for size, row in best.items():
            kept = f", {row['kept']} clients kept a model" if row["kept"] else ""
            print(f"{run}, {size} devices: peak {row['megabytes']:.0f} MB, {row['seconds']:.2f} s a round{kept}", flush=True)
        ratios.append([best[large][key] / best[small][key] for key in ("megabytes", "seconds")])
    memory, seconds = (max(column) for column in zip(*ratios, strict=True))
    print(f"at most: memory {memory:.2f} times; time of a round {seconds:.2f} times")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2], *(int(a) for a in sys.argv[3:]))))
    else:
        sizes = [int(a) for a in sys.argv[1:]]
        main(*(sizes or [1_000_000, 10_000]))

"""What a million registered devices cost: a fleet of 1 000 000 against one of 10 000, a thousand of
them a round.

    python benchmarks/million_devices.py [--large 1000000] [--small 10000] [--device cpu|cuda]
        [--runs heterofl,local] [--turns 2]

With a method whose clients keep nothing (heterofl) and one whose clients keep their model (local),
the latter without and with a run folder. Each fleet runs in a process of its own, in turns, and the
quieter time counts; on a CPU in-process, on a GPU as a cohort. Prints peak memory and the time of a
round, and last the largest two ratios.
"""

from __future__ import annotations

import argparse
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


def experiment(
    method: str, size: int, rounds: int = 6, participants: int = 1000, device: str = "cpu"
) -> nestling.Experiment:
    """A tiny network and twenty rows a client, so that what a device costs beside its training
    would show."""
    return nestling.Experiment(
        method=nestling.Named("local", {"everybody": False}) if method == "local" else method,
        rounds=rounds,
        participants=participants,
        model=nestling.Named("mlp", {"hidden": [64]}),
        fleet=nestling.FleetConfig(size=size, tiers=TIERS),
        split=nestling.SplitConfig(size=20),
        train=nestling.Train(epochs=1, augment="none"),
        engine=nestling.EngineConfig("inline" if device == "cpu" else "cohort", device=device),
        evaluate=nestling.Evaluation(every=rounds, clients=3),
    )


def measure(
    run: str, size: int, device: str = "cpu", rounds: int = 6, participants: int = 1000
) -> dict[str, float]:
    """Peak memory (MB), median seconds a round, and how many clients kept a model."""
    method, _, written = run.partition(", ")
    with tempfile.TemporaryDirectory() as home:
        result = nestling.run(
            experiment(method, size, rounds, participants, device),
            out=Path(home) / "run" if written else None,
        )
        return {
            "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            # the last round also tests
            "seconds": statistics.median(row["seconds"] for row in result.metrics[:-1]),
            "kept": len(result.federation.world.store.clients()),
        }


def in_own_process(run: str, size: int, device: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", run, "--large", str(size), "--device", device]
    return json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    )


def main() -> None:
    options = _options()
    if options.one:
        print(
            json.dumps(
                measure(
                    options.one, options.large, options.device, options.rounds, options.participants
                )
            )
        )
        return
    ratios = []
    for run in options.runs.split(",") if options.runs else RUNS:
        # In turn, so that whatever else the machine does meets both.
        sizes = (options.small, options.large)
        rows = [
            {size: in_own_process(run, size, options.device) for size in sizes}
            for _ in range(options.turns)
        ]
        best = {
            size: {key: min(row[size][key] for row in rows) for key in rows[0][size]}
            for size in sizes
        }
        for size, row in best.items():
            kept = f", {row['kept']} clients kept a model" if row["kept"] else ""
            print(
                f"{run}, {size} devices: peak {row['megabytes']:.0f} MB, {row['seconds']:.3f} s "
                f"a round{kept}",
                flush=True,
            )
        ratios.append(
            [
                best[options.large][key] / best[options.small][key]
                for key in ("megabytes", "seconds")
            ]
        )
    memory, seconds = (max(column) for column in zip(*ratios, strict=True))
    print(f"at most: memory {memory:.2f} times; time of a round {seconds:.2f} times")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--large", type=int, default=1_000_000)
    parser.add_argument("--small", type=int, default=10_000)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--runs", default="", help=f"separated by commas (default: {'; '.join(RUNS)})"
    )
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--participants", type=int, default=1000)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

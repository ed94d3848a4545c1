"""What devices that vanish or come too late cost: 30 % drop-outs and 20 % stragglers in every round
of the default experiment.

    python benchmarks/dropouts.py [--seeds 3] [--lines shared-average,heterofl] [--rounds 30]

A drop-out works and is never heard of; a straggler answers after the deadline, and what it sends is
thrown away. Both are drawn anew for every client and round. Prints a table, mean ± standard
deviation over the seeds, and last the difference in global accuracy of the first line in points.
Runs that the cache already holds are not played again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tables import options, played, spread

from nestling import EngineConfig, Evaluation, Experiment, FleetConfig
from nestling.devices import DEFAULT_TIERS
from nestling.runs.assemble import assemble, site_of
from nestling.runs.loop import play as rounds_of
from nestling.seeds import stream

DROPPED, LATE = 0.3, 0.2
SLOWER = 1e9
"""How many times as long as otherwise a straggler takes: devices are hundreds of times as fast as
others, and the fastest must be too late too."""


def main() -> None:
    chosen = options(__doc__ or "", "dropouts.json", "names of methods", rounds=30)
    lines = chosen.lines.split(",") if chosen.lines else ["shared-average"]
    wanted = {
        f"{name} {chosen.rounds} {seed} {weather}": (name, chosen.rounds, seed, weather)
        for name in lines
        for seed in range(chosen.seeds)
        for weather in ("fair", "foul")
    }
    found = played(play, wanted, chosen)
    print("| method | fair | 30 % dropped, 20 % late | difference | dropped | late |")
    print("|---|---|---|---|---|---|")
    costs: dict[str, list[float]] = {}
    for name in lines:
        fair, foul = (
            [found[f"{name} {chosen.rounds} {seed} {w}"] for seed in range(chosen.seeds)]
            for w in ("fair", "foul")
        )
        costs[name] = [b["global"] - a["global"] for a, b in zip(fair, foul, strict=True)]
        columns = [spread([row["global"] for row in rows]) for rows in (fair, foul)]
        shares = [sum(row[k] for row in foul) / len(foul) for k in ("dropped", "late")]
        told = " | ".join([*columns, spread(costs[name], "+", ""), *(f"{s:.1%}" for s in shares)])
        print(f"| {name} | {told} |")
    first = costs[lines[0]]
    print(f"difference of {lines[0]}: {100 * sum(first) / len(first):+.2f} points")


def play(method: str, rounds: int, seed: int, weather: str) -> dict[str, Any]:
    """One run, and which share of those who were asked dropped out or came too late."""
    torch.set_num_threads(1)
    plain = Experiment(
        method=method,
        seed=seed,
        rounds=rounds,
        engine=EngineConfig("inline"),
        evaluate=Evaluation(every=rounds),
    )
    return _played(plain if weather == "fair" else _foul(plain), seed, weather)


def _foul(plain: Experiment) -> Experiment:
    """The experiment with clients that vanish, and a deadline that honest ones always meet."""
    # any slowness at all has the clock ask for every client anew
    tiers = tuple(replace(tier, dropout=DROPPED, slow=1e-9) for tier in DEFAULT_TIERS)
    settled, federation = assemble(plain.with_changes(rounds=1))
    federation.engine.open(settled.make_method(), site_of(federation))
    slowest = next(iter(rounds_of(federation)))["clock_seconds"]
    federation.engine.close()
    return plain.with_changes(fleet=FleetConfig(tiers=tiers, deadline=100 * slowest))


def _played(experiment: Experiment, seed: int, weather: str) -> dict[str, Any]:
    settled, federation = assemble(experiment)
    if weather == "foul":

        def slowdown(client: int, round: int) -> float:
            drawn = stream(seed, "stragglers", client, round).random()
            return SLOWER if drawn < LATE else 1.0

        federation.world.fleet.slowdown = slowdown  # type: ignore[method-assign]
    federation.engine.open(settled.make_method(), site_of(federation))
    rows = list(rounds_of(federation))
    federation.engine.close()
    asked = sum(len(row["clients"]) for row in rows)
    heard = asked - sum(row["dropped"] for row in rows)
    return {
        "global": rows[-1]["global_score"],
        "dropped": sum(row["dropped"] for row in rows) / asked,
        "late": sum(row["late"] for row in rows) / heard,
        "seconds": sum(row["seconds"] for row in rows),
    }


if __name__ == "__main__":
    main()

"""What a fleet with liars reaches, by merge: clean, and under every attack.

    python benchmarks/trust.py [--lines a,b] [--seeds 3] [--workers 2] [--cache FILE] [--write]

The embedded digits, 20 devices of the default kinds with 60 rows each of all classes, all of them
in every round, 15 rounds of two epochs. A line is a method and an attack at a share of the fleet,
"heterofl sign 20"; "heterofl clean" is nobody. Its columns are the merges. A start of a line's
name stands for all that begin with it: "heterofl", "flexfl labels". `--write` puts the table into
docs/trust.md.
"""

from __future__ import annotations

from typing import Any

from tables import options, played, spread, write

import nestling
from nestling import Attack, EngineConfig, Evaluation, Experiment, Server, SplitConfig
from nestling.methods import method_class

METHODS = ("heterofl", "shared-average", "flexfl")
KINDS = ("sign", "scale", "labels", "counts", "huge", "free-rider")
SHARES = (10, 20, 30)
MERGES = ("mean", "clipped", "median", "trimmed", "krum")
ATTACKS = ("clean", *(f"{kind} {share}" for kind in KINDS for share in SHARES))
ROUNDS = 15


def main() -> None:
    chosen = options(__doc__ or "", "trust.json", "starts of lines, e.g. heterofl sign")
    asked = [start.strip() for start in chosen.lines.split(",")]
    lines = [
        line
        for line in (f"{method} {attack}" for method in METHODS for attack in ATTACKS)
        if any(line.startswith(start) for start in asked)
    ]
    wanted = {
        f"{line} | {merge} {seed}": (line, merge, seed)
        for line in lines
        for merge in MERGES
        for seed in range(chosen.seeds)
    }
    text = table(lines, chosen.seeds, played(play, wanted, chosen))
    print(text)
    if chosen.write:
        write("trust table", text, "trust.md")


def play(line: str, merge: str, seed: int) -> dict[str, Any]:
    """One run."""
    summary = nestling.run(experiment(line, merge, seed)).summary
    return {"global": summary["global_accuracy"]["last"], "seconds": summary["seconds"]}


def experiment(line: str, merge: str, seed: int) -> Experiment:
    """The experiment of one cell."""
    method, *attack = line.split()
    lies = Attack(attack[0], int(attack[1]) / 100) if len(attack) > 1 else Attack()  # type: ignore[arg-type]
    return Experiment(
        method=method,
        seed=seed,
        rounds=ROUNDS,
        participants=0,
        split=SplitConfig(kind="iid", size=60),
        # The share to leave out is that of the largest attack played: one does not know how many.
        server=Server(merge=merge, trim=0.3),
        attack=lies,
        engine=EngineConfig("inline"),
        evaluate=Evaluation(every=ROUNDS, clients=1),
    )


def table(lines: list[str], seeds: int, found: dict[str, dict[str, Any]]) -> str:
    """One line a method and attack, one column a merge."""
    head = [f"| | | {' | '.join(MERGES)} |", f"|---|---|{'---|' * len(MERGES)}"]
    rows = []
    for line in lines:
        method, _, attack = line.partition(" ")
        cells = [
            spread([found[f"{line} | {merge} {seed}"]["global"] for seed in range(seeds)], unit="")
            for merge in MERGES
        ]
        said = attack if attack == "clean" else f"{attack} %"
        rows.append(f"| {method_class(method).info.title} | {said} | {' | '.join(cells)} |")
    return "\n".join([*head, *rows, ""])


if __name__ == "__main__":
    main()

"""What a fleet with liars reaches, by merge: clean, and under every attack.

    python benchmarks/trust.py [--lines a,b] [--seeds 3] [--first 0] [--rounds 15]
        [--device cpu|cuda] [--workers 2] [--columns mean,median] [--cache FILE] [--write]

The embedded digits, 20 devices of the default kinds with 60 rows each of all classes, all of them
in every round, 15 rounds of two epochs. A line is a method and an attack at a share of the fleet,
"heterofl sign 20"; "heterofl clean" is nobody. Its columns are the merges, and the mean behind a
gate where there is a global model; where there is none, clients' own models are measured. A start
of a line's name stands for all that begin with it: "heterofl", "flexfl labels". `--write` puts the
table into docs/trust.md, one of fewer columns or of other seeds beside that of all.
"""

from __future__ import annotations

from typing import Any

from tables import engine_on, options, played, spread, write

import nestling
from nestling import Attack, Evaluation, Experiment, Server, SplitConfig
from nestling.methods import method_class

METHODS = ("heterofl", "shared-average", "flexfl", "fedmd", "fedproto")
KINDS = ("sign", "scale", "labels", "counts", "huge", "free-rider")
SHARES = (10, 20, 30)
MERGES = ("mean", "clipped", "median", "trimmed", "krum", "aligned", "gate")
ATTACKS = ("clean", *(f"{kind} {share}" for kind in KINDS for share in SHARES))
ROUNDS, GATE = 15, 2.0


def main() -> None:
    chosen = options(
        __doc__ or "",
        "trust.json",
        "starts of lines, e.g. heterofl sign",
        ROUNDS,
        columns=",".join(MERGES),
        other_seeds=True,
    )
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    merges = tuple(chosen.columns.split(","))
    asked = [start.strip() for start in chosen.lines.split(",")]
    lines = [
        line
        for line in (f"{method} {attack}" for method in METHODS for attack in ATTACKS)
        if any(line.startswith(start) for start in asked) and can_be(line)
    ]
    wanted = {
        f"{line} | {merge} {seed}": (line, merge, seed, chosen.rounds, chosen.device)
        for line in lines
        for merge in merges_of(line)
        if merge in merges
        for seed in seeds
    }
    text = table(lines, merges, seeds, played(play, wanted, chosen))
    print(text)
    if chosen.write:
        marker = "trust table" if merges == MERGES else "trust table, fewer columns"
        marker = "trust table, other seeds" if chosen.first else marker
        write(marker, text, "trust.md")


def can_be(line: str) -> bool:
    """Whether there is such an attack: who sends no weights cannot send back those it got."""
    return "free-rider" not in line or method_class(line.split()[0]).shares_weights


def merges_of(line: str) -> tuple[str, ...]:
    """The columns that a line has: only a global model can stand behind a gate."""
    return MERGES if method_class(line.split()[0]).info.global_model else MERGES[:-1]


def play(line: str, merge: str, seed: int, rounds: int, device: str) -> dict[str, Any]:
    """One run."""
    made = experiment(line, merge, seed, rounds).with_changes(engine=engine_on(device))
    summary = nestling.run(made).summary
    kind = "global" if "gate" in merges_of(line) else "personal"
    return {kind: summary[f"{kind}_score"]["last"], "seconds": summary["seconds"]}


def experiment(line: str, merge: str, seed: int, rounds: int = ROUNDS) -> Experiment:
    """The experiment of one cell."""
    method, *attack = line.split()
    lies = Attack(attack[0], int(attack[1]) / 100) if len(attack) > 1 else Attack()  # type: ignore[arg-type]
    # The share to leave out is that of the largest attack played: one does not know how many.
    rule = Server(gate=GATE) if merge == "gate" else Server(merge=merge, trim=0.3)
    return Experiment(
        method=method,
        seed=seed,
        rounds=rounds,
        participants=0,
        split=SplitConfig(kind="iid", size=60),
        server=rule,
        attack=lies,
        evaluate=Evaluation(every=rounds, clients=20),
    )


def table(
    lines: list[str], merges: tuple[str, ...], seeds: range, found: dict[str, dict[str, Any]]
) -> str:
    """One line a method and attack, one column a merge."""
    head = [f"| | | {' | '.join(merges)} |", f"|---|---|{'---|' * len(merges)}"]
    rows = []
    for line in lines:
        method, _, attack = line.partition(" ")
        kind = "global" if "gate" in merges_of(line) else "personal"
        cells = [
            spread([found[f"{line} | {merge} {seed}"][kind] for seed in seeds], unit="")
            if merge in merges_of(line)
            else "–"
            for merge in merges
        ]
        said = attack if attack == "clean" else f"{attack} %"
        rows.append(f"| {method_class(method).info.title} | {said} | {' | '.join(cells)} |")
    return "\n".join([*head, *rows, ""])


if __name__ == "__main__":
    main()

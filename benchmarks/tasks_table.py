"""What else than pictures is learned by unequal devices, each task as its file in examples/ has it:
the default method beside trivial baselines, and beside two floors with the same local budget,
FedAvg with the network that fits the smallest device, and clients that train alone.

    NESTLING_DATA=FOLDER python benchmarks/tasks_table.py [--lines a,b] [--seeds 3] [--workers 2]
        [--cache FILE] [--write]

`--lines` are names of `LINES` below; those whose data are not there can be left out. The table has
all that the cache holds of seeds that were played with the method and its floor, FedAvg, so that it
can be played piece by piece; `--write` puts it into docs/results.md.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tables import options, played, spread, write
from torch import Tensor

import nestling
from nestling import EngineConfig, Experiment
from nestling.data import Dataset
from nestling.methods import method_class

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
METHODS = ("shared-average", "fedavg", "local")


def most_frequent(data: Dataset) -> float:
    """The score of who always says the class, or the token, that is most frequent in training."""
    return float((data.y_test == data.y.flatten().bincount().argmax()).double().mean())


def pairs(data: Dataset) -> float:
    """The score of a table that knows, of every token, which one follows it most often."""
    counts = torch.zeros(data.classes, data.classes)
    ones = torch.ones(data.y.numel())
    counts.index_put_((data.x.flatten(), data.y.flatten()), ones, accumulate=True)
    return float((counts.argmax(1)[data.x_test] == data.y_test).double().mean())


def told(data: Dataset, outputs: Tensor) -> float:
    """The score of some outputs for the test rows."""
    task = data.learned
    return float(task.right(task.answers(outputs, data.y_test), data.y_test).double().mean())


def held(data: Dataset) -> float:
    """R² of who repeats the mean of what was seen of every channel."""
    ahead = data.classes // data.shape[0]
    return told(data, data.x_test.mean(-1, keepdim=True).expand(-1, -1, ahead).flatten(1))


def repeated(data: Dataset) -> float:
    """R² of who repeats the last value of every channel."""
    ahead = data.classes // data.shape[0]
    return told(data, data.x_test[..., -1:].expand(-1, -1, ahead).flatten(1))


def distance(data: Dataset) -> float:
    """AUROC of the distance from the mean of the training rows."""
    return told(data, data.y.mean(0).expand_as(data.y_test))


def own_distance(data: Dataset) -> float:
    """The same, every value in its own deviations."""
    mean, scale = data.y.mean(0), data.y.std(0) + 1e-6
    # what is said is as far from a sample as that is from the mean, in deviations
    return told(data, data.y_test - (data.y_test - mean) / scale)


@dataclass(frozen=True)
class Line:
    """A line: the file, what is set beside it, and the baselines by name."""

    title: str
    file: str
    baselines: dict[str, Callable[[Dataset], float]]
    changes: tuple[str, ...] = ()


LINES = {
    "activity": Line(
        "activity by person, `cnn1d`",
        "activity_by_person.toml",
        {"most frequent": most_frequent},
    ),
    "digits": Line(
        "spoken digits by speaker, `dscnn`", "spoken_digits.toml", {"most frequent": most_frequent}
    ),
    "digits-kwt": Line(
        "spoken digits by speaker, `kwt`",
        "spoken_digits.toml",
        {"most frequent": most_frequent},
        ("model.name=kwt",),
    ),
    "anomalies": Line(
        "stairs as anomalies, `autoencoder`",
        "anomalies.toml",
        {"distance from the mean": distance, "in deviations": own_distance},
    ),
    "forecast": Line(
        "motion foretold, `forecaster`",
        "forecast.toml",
        {"last value": repeated, "mean of the window": held},
    ),
    "text": Line(
        "next character, `gpt`",
        "next_character.toml",
        {"most frequent": most_frequent, "table of pairs": pairs},
    ),
}


def main() -> None:
    chosen = options(__doc__ or "", "tasks_table.json", ", ".join(LINES))
    lines = [line for line in LINES if not chosen.lines or line in chosen.lines.split(",")]
    wanted: dict[str, tuple[Any, ...]] = {
        f"{line} {method} {seed}": (line, method, seed)
        for line in lines
        for seed in range(chosen.seeds)
        for method in METHODS
    }
    played(play, wanted, chosen)
    text = table(whole(json.loads(Path(chosen.cache).read_text())))
    print(text)
    if chosen.write:
        write("tasks table", text)


def whole(known: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """By line and method the rows of every seed that has been played with the first two methods,
    and of the third where it has been played with all of these seeds."""
    seeds = sorted({int(name.rpartition(" ")[2]) for name in known})
    rows = {}
    for line in LINES:
        there = [s for s in seeds if all(f"{line} {method} {s}" in known for method in METHODS[:2])]
        for method in METHODS if there else ():
            if all(f"{line} {method} {seed}" in known for seed in there):
                rows[line, method] = [known[f"{line} {method} {seed}"] for seed in there]
    return rows


def experiment(line: str, method: str, seed: int) -> Experiment:
    """The experiment of one line."""
    asked = Experiment.read(EXAMPLES / LINES[line].file, LINES[line].changes)
    return asked.with_changes(
        method=nestling.Named(method),
        seed=seed,
        engine=EngineConfig("inline"),
        evaluate=replace(asked.evaluate, every=asked.rounds),
    )


def play(line: str, method: str, seed: int) -> dict[str, Any]:
    """One run."""
    asked = experiment(line, method, seed)
    began = time.process_time()
    result = nestling.run(asked)
    summary = result.summary
    data = asked.data.load()
    first = next(iter(summary["by_tier"].values()))
    return {
        "score": data.learned.score,
        "global": summary["global_score"]["last"],
        "personal": summary["personal_score"]["last"],
        "smallest": first["global_score"]["last"],
        "baselines": {name: told(data) for name, told in LINES[line].baselines.items()},
        "rounds": summary["rounds"],
        "bytes": (summary["bytes_up"] + summary["bytes_down"]) / summary["rounds"],
        "seconds": time.process_time() - began,
    }


def table(rows: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """One line a task and method."""
    lines = [
        "| | score | trivial | method | global | over FedAvg | personal | smallest tier | "
        "up + down a round | minutes of one core |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (line, method), found in rows.items():
        floor = [one["global"] for one in rows[line, "fedavg"]]
        over = [one["global"] - own for one, own in zip(found, floor, strict=True)]
        trivial = ", ".join(f"{n} {100 * v:.1f} %" for n, v in found[0]["baselines"].items())
        head = method == METHODS[0]
        cells = (
            LINES[line].title if head else "",
            f"{found[0]['score']}, {found[0]['rounds']} rounds, seeds: {len(found)}"
            if head
            else "",
            trivial if head else "",
            method_class(method).info.title,
            spread([one["global"] for one in found]),
            "–" if method == "fedavg" else spread(over, "+", ""),
            spread([one["personal"] for one in found]),
            spread([one["smallest"] for one in found]),
            f"{statistics.mean(one['bytes'] for one in found) / 1e6:.2f} MB",
            f"{statistics.mean(one['seconds'] for one in found) / 60:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

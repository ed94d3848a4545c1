"""The files of a run folder, by name, and what follows from its rounds: whoever writes or reads a
run uses these.

A run that is still going, or that ended in a crash, may have a last line that is cut short: it is
left out.
"""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

EXPERIMENT = "experiment.toml"
FEDERATION = "federation.json"
METRICS = "metrics.jsonl"
BOARDS = "boards.jsonl"
SUMMARY = "summary.json"
MODEL = "global.safetensors"
ANALYSIS = "analysis.json"
COVERAGE = "coverage.json"
"""How many clients trained each channel of the shared networks (`runs.coverage`)."""
AUDIT = "audit.jsonl"
"""What a fleet of real devices did, in lines that vouch for each other (`fleet.care.audit`)."""
SWEEP = "sweep.json"
"""What a sweep is made of, in the folder that holds its runs."""
ROSTER = "roster.json"
"""The clients of a fleet of real devices: a folder that has it is such a fleet's."""

NO_MATTER = (
    "seed",
    "data.path",
    "engine.name",
    "engine.workers",
    "engine.device",
    "engine.compile",
    "engine.address",
    "engine.verify_boards",
)
"""Fields in which runs of one setting may differ: the seed, where a file lies, and what carries the
run out."""

Record = dict[str, Any]

SCORES = ("global_score", "personal_score")
FALLING = ("loss", "error", "variance")
"""How the names of metrics end of which less is better."""
_EARLIER = {
    "global_accuracy": "global_score",
    "personal_accuracy": "personal_score",
    "class_names": "kinds",
}
_SUMS = ("bytes_up", "bytes_down", "seconds", "refused", "late", "dropped")
_LAST = ("clock_seconds", "energy_joules")


def how_to_go_on(folder: Path) -> str:
    """The command that goes on with the run in a folder, as a shell takes it."""
    typed = shlex.quote(str(folder))
    if (folder / ROSTER).exists():
        return f"nestling serve EXPERIMENT.toml --out {typed}"
    return f"nestling run --resume {typed}"


def parsed(text: str | bytes) -> Any:
    """JSON as runs write it; what earlier versions called otherwise has its name of today."""
    return json.loads(text, object_hook=_as_today)


def lines_of(path: Path) -> list[Record]:
    """The objects of a file with one on each line; what is no such line is left out."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError, RecursionError):
            record = parsed(line)
            found += [record] if isinstance(record, dict) else []
    return found


def object_in(path: Path) -> Record:
    """The object in a JSON file, empty where there is none."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        found = parsed(path.read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def number(value: object) -> float | None:
    """A finite number as it is, None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    with contextlib.suppress(OverflowError):
        return value if math.isfinite(value) else None
    return None


def counted(rows: Sequence[Mapping[str, Any]], tiers: Iterable[str]) -> Record:
    """What a summary says that follows from the rounds there are."""
    return {
        "rounds_done": int(rows[-1]["round"]) if rows else 0,
        **{kind: last_and_best((row["round"], row.get(kind)) for row in rows) for kind in SCORES},
        "metrics": {
            name: last_and_best(
                ((row["round"], _block(row, "metrics").get(name)) for row in rows),
                least=name.endswith(FALLING),
            )
            for name in dict.fromkeys(name for row in rows for name in _block(row, "metrics"))
        },
        "by_class": next((b for row in reversed(rows) if (b := _block(row, "by_class"))), {}),
        "by_tier": {
            tier: {
                kind: last_and_best((row["round"], tier_block(row, tier).get(kind)) for row in rows)
                for kind in SCORES
            }
            for tier in tiers
        },
        **{key: sum(number(row.get(key)) or 0 for row in rows) for key in _SUMS},
        **{
            key: next(
                (v for row in reversed(rows) if (v := number(row.get(key))) is not None), None
            )
            for key in _LAST
        },
    }


def score_word(record: Mapping[str, Any]) -> str:
    """What ranks models in the run that a federation or a summary tells of: accuracy, where an
    earlier version wrote it."""
    return str(_block(record, "task").get("score") or "accuracy")


def last_and_best(points: Iterable[tuple[Any, Any]], least: bool = False) -> Record:
    """Of (round, value) pairs, some without a value: the last and the best one, and when that was
    (the first of equals). The best is the largest, or with `least` the smallest."""
    known = [(int(at), found) for at, value in points if (found := number(value)) is not None]
    if not known:
        return {"last": None, "best": None, "best_round": None}
    best_round, best = max(known, key=lambda pair: -pair[1] if least else pair[1])
    return {"last": known[-1][1], "best": best, "best_round": best_round}


def _as_today(found: Record) -> Record:
    for name, today in _EARLIER.items():
        if name in found:
            found[today] = found.pop(name)
    return found


def _block(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = record.get(key)
    return found if isinstance(found, Mapping) else {}


def tier_block(record: Mapping[str, Any], tier: str) -> Mapping[str, Any]:
    """What a round (or a summary) says of one tier."""
    by_tier = record.get("by_tier")
    block = by_tier.get(tier) if isinstance(by_tier, Mapping) else None
    return block if isinstance(block, Mapping) else {}

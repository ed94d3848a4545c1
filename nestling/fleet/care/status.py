"""How a fleet is now: a small file of the run folder that the run keeps up to date, and everything
a folder tells, in one table.

The file is for people who look, not for the run itself, which never reads it; so it is replaced
without waiting for the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nestling.errors import InputError
from nestling.files import read_toml, write_atomic
from nestling.fleet.care import logs
from nestling.runfiles import (
    EXPERIMENT,
    FEDERATION,
    METRICS,
    SCORES,
    SUMMARY,
    lines_of,
    object_in,
    score_word,
)

STATUS = "fleet.json"
GATHERING, ROUND, MERGING, DONE, STOPPED = "gathering", "round", "merging", "done", "stopped"
"""What a run does: waits for clients, waits for replies, computes, has finished, has given up."""

SECONDS = 1.0
REFUSALS = 50
CLONED = "a cloned key"
"""How a refusal begins where a key is used by two devices at once."""
Table = dict[str, Any]


class StatusFile:
    """The file, written at most once in `every` seconds unless something must be told at once.
    `path` None: none is kept."""

    def __init__(
        self, path: Path | None, every: float = SECONDS, clock: Callable[[], float] = time.time
    ) -> None:
        """Has written nothing, so that the first `write` is due; remembers the last `REFUSALS`
        refusals."""
        self.path, self.every, self.clock = path, every, clock
        self.refusals: deque[Table] = deque(maxlen=REFUSALS)
        self._written = -1e18

    def refused(
        self,
        reason: str,
        round: int | None = None,
        client: int | None = None,
        node: int | None = None,
    ) -> None:
        """Remembers a refusal, to be told with the rest."""
        self.refusals.append(
            {
                "time": self.clock(),
                "round": round,
                "client": client,
                "node": node,
                "reason": reason[:500],
            }
        )

    def write(self, table: Callable[[], Mapping[str, Any]], now: bool = False) -> None:
        """Writes what `table` gives, where it is time for it."""
        when = self.clock()
        if self.path is None or not (
            now or when - self._written >= self.every or when < self._written
        ):
            return
        self._written = when
        text = json.dumps(
            {**table(), "refusals": list(self.refusals), "written": when, "pid": os.getpid()},
            indent=1,
        )
        # A full disk is told by what matters more: the checkpoint.
        with contextlib.suppress(OSError):
            write_atomic(self.path, text, flush=False)


def snapshot(folder: Path, now: float | None = None, begun: bool = True) -> Table:
    """Everything that a run folder tells of its fleet. Where it is no run folder: an `InputError`,
    or, if it need not have `begun`, the same table with nothing in it."""
    there = (folder / EXPERIMENT).exists()
    if begun and not there:
        raise InputError(
            f"{folder} is not a run folder",
            field="RUN",
            fix=f"name one that holds {EXPERIMENT}, or a URL",
        )
    experiment = read_toml(folder / EXPERIMENT, field="RUN") if there else {}
    status, tiers = object_in(folder / STATUS), _tiers(folder)
    rows = lines_of(folder / METRICS)
    clients = [_client(row, status) for row in status.get("clients", [])]
    return {
        "time": time.time() if now is None else now,
        "folder": str(folder),
        "run": status.get("run"),
        "method": _name(experiment.get("method")),
        "data": _name(experiment.get("data")),
        "rounds": int(experiment.get("rounds", 0)),
        "round": rows[-1]["round"] if rows else 0,
        "phase": status.get("phase"),
        "since": status.get("since"),
        "written": status.get("written"),
        "doing": status.get("doing", {}),
        "clients": clients,
        "tiers": _by_tier(tiers, clients),
        "score": score_word(object_in(folder / FEDERATION)),
        "scores": _scores(rows),
        "totals": _totals(rows),
        "letters": status.get("letters", {}),
        "refusals": _refusals(folder, status),
        "summary": (folder / SUMMARY).exists(),
    }


def _client(row: Table, status: Table) -> Table:
    """A client, and what it is doing."""
    doing = status.get("doing", {}) if status.get("phase") == ROUND else {}
    missing = {one["client"]: one for one in doing.get("missing", [])}
    if not row.get("here"):
        state = "away"
    elif row["client"] in missing:
        state = "working" if missing[row["client"]]["attempts"] else "next"
    else:
        state = "answered" if row["client"] in doing.get("chosen", []) else "ready"
    return {**row, "state": state}


def _by_tier(tiers: dict[str, int], clients: list[Table]) -> dict[str, Table]:
    found = {name: {"expected": count, "here": 0, "away": 0} for name, count in tiers.items()}
    for row in clients:
        tier = found.setdefault(str(row["tier"]), {"expected": 0, "here": 0, "away": 0})
        tier["here" if row["here"] else "away"] += 1
    return found


def _scores(rows: list[Table]) -> Table:
    """The last and the best scores."""
    found: Table = {}
    for kind in SCORES:
        known = [(row["round"], row[kind]) for row in rows if row.get(kind) is not None]
        best = max(known, key=lambda point: point[1], default=(None, None))
        last = known[-1] if known else (None, None)
        found[kind] = {"last": last[1], "round": last[0], "best": best[1], "best_round": best[0]}
    return found


def _totals(rows: list[Table]) -> Table:
    total = Counter[str]()
    for row in rows:
        for name in ("refused", "late", "dropped", "bytes_up", "bytes_down", "seconds"):
            total[name] += row.get(name) or 0
        total["clipped"] += len(found) if isinstance(found := row.get("clipped"), list) else 0
        total["asked"] += len(row.get("clients", []))
        total["replies"] += sum(tier.get("clients", 0) for tier in row.get("by_tier", {}).values())
    seconds = [row["seconds"] for row in rows if row.get("seconds") is not None]
    return {
        "rounds": len(rows),
        **{
            name: total[name]
            for name in (
                "asked",
                "replies",
                "refused",
                "clipped",
                "late",
                "dropped",
                "bytes_up",
                "bytes_down",
                "seconds",
            )
        },
        "round_seconds": seconds[-1] if seconds else None,
        "typical_seconds": sorted(seconds[-20:])[(len(seconds[-20:]) - 1) // 2]
        if seconds
        else None,
    }


def _refusals(folder: Path, status: Table) -> list[Table]:
    """The last refusals: of the run itself, and of the proxy in front of it, which only the log
    tells."""
    names = {row["client"]: row["name"] for row in status.get("clients", [])}
    found = [{**row, "name": names.get(row["client"])} for row in status.get("refusals", [])]
    told = [
        row
        for row in logs.read(folder / logs.SERVER_LOG, last=2000)
        if row.get("event") == "refused" and "address" in row
    ]
    found += [
        {"time": _epoch(r["time"]), "name": r.get("key") or r["address"], "reason": r.get("reason")}
        for r in told
    ]
    return sorted(found, key=lambda row: row["time"])[-REFUSALS:]


def _epoch(text: str) -> float:
    from datetime import datetime

    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def _tiers(folder: Path) -> dict[str, int]:
    return {
        str(t["name"]): int(t.get("count") or 0)
        for t in object_in(folder / FEDERATION).get("tiers", [])
        if t.get("name")
    }


def _name(value: Any) -> str:
    return str(value.get("name", "")) if isinstance(value, Mapping) else str(value or "")

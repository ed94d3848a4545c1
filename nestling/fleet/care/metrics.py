"""The counts of a fleet in the text format that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nestling.report.words import number

STATES = ("ok", "waiting", "stalled")
Sample = tuple[dict[str, str], Any]


def exposition(table: Mapping[str, Any]) -> str:
    """All that is known of a run (see `health.run_status`). What a restart of the run begins anew
    (letters) is a counter to Prometheus all the same: it expects that."""
    totals, doing, health = table["totals"], table["doing"], table["health"]
    missing = doing.get("missing", [])
    blocks = [
        _block(
            "health",
            "gauge",
            "1 for the state the fleet is in",
            [({"state": s}, int(s == health["state"])) for s in STATES],
        ),
        _block(
            "warnings",
            "gauge",
            "what a person should see to: a cloned key, a certificate that ends soon",
            [({}, len(health["warnings"]))],
        ),
        _block("rounds_total", "counter", "rounds finished", [({}, totals["rounds"])]),
        _block(
            "rounds_planned", "gauge", "rounds that the experiment has", [({}, table["rounds"])]
        ),
        _block("replies_total", "counter", "replies that came in time", [({}, totals["replies"])]),
        _block("refused_total", "counter", "replies refused", [({}, totals["refused"])]),
        _block(
            "clipped_total",
            "counter",
            "replies that count for less than they say",
            [({}, totals["clipped"])],
        ),
        _block(
            "over_quota_total",
            "counter",
            "minutes in which a device sent more bytes than it may",
            [({"device": d}, row["times"]) for d, row in sorted(health.get("greedy", {}).items())],
        ),
        _block(
            "late_total",
            "counter",
            "replies after the deadline of the experiment's clock",
            [({}, totals["late"])],
        ),
        _block(
            "dropped_total",
            "counter",
            "clients that were asked and gave no reply",
            [({}, totals["dropped"])],
        ),
        _block(
            "bytes_total",
            "counter",
            "bytes of messages",
            [({"direction": d}, totals[f"bytes_{d}"]) for d in ("up", "down")],
        ),
        _block(
            "letters_total",
            "counter",
            "orders and answers since the run's process began, by what became of them",
            [({"kind": str(kind)}, count) for kind, count in sorted(table["letters"].items())],
        ),
        _summary("round_seconds", "seconds a round", totals["seconds"], totals["rounds"]),
        _block(
            "last_round_seconds",
            "gauge",
            "seconds of the last round",
            [({}, totals["round_seconds"])],
        ),
        _block(
            "round_missing", "gauge", "clients that a round waits for now", [({}, len(missing))]
        ),
        _block(
            "round_running_seconds",
            "gauge",
            "seconds that the round has taken so far",
            [({}, doing.get("seconds", 0))],
        ),
        _block(
            "clients",
            "gauge",
            "clients by tier: here, away, or expected by the experiment",
            [
                ({"tier": t, "state": s}, row[s])
                for t, row in table["tiers"].items()
                for s in ("here", "away", "expected")
            ],
        ),
        _block(
            "score",
            "gauge",
            f"{table['score']} when last tested, 1 is perfect",
            [
                ({"kind": kind.removesuffix("_score")}, row["last"])
                for kind, row in table["scores"].items()
            ],
        ),
        _block(
            "disk_bytes",
            "gauge",
            "bytes free on the server's disk, and the floor below which no round begins",
            [({"kind": kind}, size) for kind, size in health.get("disk", {}).items()],
        ),
        _block(
            "program_up",
            "gauge",
            "whether a process of the server runs",
            [
                ({"program": name}, int(bool(row["running"])))
                for name, row in table.get("programs", {}).items()
            ],
        ),
    ]
    return "".join(blocks)


def _block(name: str, kind: str, help: str, samples: Iterable[Sample]) -> str:
    """One family; nothing where nothing is known."""
    lines = [
        f"nestling_{name}{_labels(labels)} {_value(value)}\n"
        for labels, value in samples
        if number(value) is not None
    ]
    return (
        f"# HELP nestling_{name} {help}\n# TYPE nestling_{name} {kind}\n{''.join(lines)}"
        if lines
        else ""
    )


def _summary(name: str, help: str, total: float, count: int) -> str:
    return (
        f"# HELP nestling_{name} {help}\n# TYPE nestling_{name} summary\n"
        f"nestling_{name}_sum {_value(total)}\nnestling_{name}_count {_value(count)}\n"
    )


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    inner = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inner}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _value(value: object) -> str:
    found = number(value)
    assert found is not None  # noqa: S101 (`_block` leaves the others out, sums are numbers)
    return str(int(found)) if found == int(found) else repr(found)

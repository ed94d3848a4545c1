"""Run folders with made-up but plausible numbers, in the very form that a run writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestling.seeds import stream

TIERS = [
    {
        "name": "f446",
        "device": "stm32f446",
        "title": "STM32F446RE",
        "kind": "microcontroller",
        "core": "Cortex-M4F 180 MHz",
        "count": 8,
        "model": "tinycnn",
        "ratio": 0.125,
        "params": 1234,
        "macs": 56_000,
        "need": {"ram": 61_440, "flash": 40_960, "seconds": 1.2, "energy": 0.31},
        "limits": {"ram": 131_072, "flash": 524_288, "seconds": 0},
        "binding": "ram",
        "reasons": [
            "RAM: needs 60 KB of 128 KB",
            "of that RAM: weights 4.8 KB, gradients 4.8 KB, optimiser 0 B, activations 46 KB, "
            "runtime 4.4 KB",
            "flash: needs 40 KB of 512 KB",
            "time: 1.2 s a round, no limit set",
            "the next larger piece (0.25) is too much: RAM: needs 141 KB of 128 KB",
        ],
        "sources": {
            "ram": "datasheet",
            "flash": "datasheet",
            "speed": "measured",
            "power": "estimate",
        },
    },
    {
        "name": "f746",
        "device": "stm32f746",
        "title": "STM32F746NG",
        "kind": "microcontroller",
        "core": "Cortex-M7 216 MHz",
        "count": 6,
        "model": "tinycnn",
        "ratio": 0.25,
        "params": 4_210,
        "macs": 190_000,
        "need": {"ram": 301_000, "flash": 70_000, "seconds": 1.9, "energy": 0.8},
        "limits": {"ram": 327_680, "flash": 1_048_576, "seconds": 60},
        "binding": "ram",
        "reasons": ["294 KB of RAM of 320 KB"],
        "sources": {"ram": "datasheet", "speed": "estimate", "power": "estimate"},
    },
    {
        "name": "pi4",
        "device": "pi4",
        "title": "Raspberry Pi 4",
        "kind": "single-board computer",
        "core": "Cortex-A72 1.5 GHz",
        "count": 4,
        "model": "tinycnn",
        "ratio": 0.5,
        "params": 15_800,
        "macs": 700_000,
        "need": {"ram": 48_000_000, "flash": None, "seconds": 55.0, "energy": 210.0},
        "limits": {"ram": 4 * 2**30, "flash": None, "seconds": 60},
        "binding": "time",
        "reasons": ["55 s of 60 s allowed for a round"],
        "sources": {"ram": "datasheet", "speed": "measured", "power": "measured"},
    },
    {
        "name": "server",
        "device": None,
        "title": None,
        "kind": None,
        "core": None,
        "count": 2,
        "model": "tinycnn",
        "ratio": 1.0,
        "params": 60_000,
        "macs": 2_600_000,
        "need": None,
        "limits": None,
        "binding": None,
        "reasons": [],
        "sources": None,
    },
]

CONFIG = """\
rounds = {rounds}
seed = {seed}
rate = {rate}

[data]
name = "mnist12k"

[model]
name = "tinycnn"
norm = "group"

[method]
name = "{method}"
"""


def write_run(
    folder: Path,
    *,
    method: str = "heterofl",
    title: str = "HeteroFL",
    seed: int = 0,
    rounds: int = 20,
    done: int | None = None,
    gain: float = 0.0,
    personal: bool = True,
    global_model: bool = True,
    rate: float = 0.05,
    clients: int = 20,
    classes: int = 10,
    group: str = "A",
    norm: str = "group",
) -> Path:
    """A run folder after `done` of `rounds` rounds; an unfinished one has no summary."""
    done = rounds if done is None else done
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiment.toml").write_text(
        CONFIG.format(rounds=rounds, seed=seed, method=method, rate=rate)
    )
    records = _records(method, seed, done, gain, personal, global_model)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "federation.json").write_text(json.dumps(_federation(seed, clients, classes)))
    if done == rounds:
        summary = {
            **_summary(records, method, title, seed, rounds, global_model),
            "group": group,
            "norm": norm,
        }
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def write_analysis(folder: Path, *, clients: int = 5, rows: int = 20, classes: int = 10) -> Path:
    """An analysis in a run folder: the first client has no convolution."""
    noise = stream(0, "made-up analysis")
    tiers = sorted(at % len(TIERS) for at in range(clients))
    draw = noise.uniform(0, 1, (3, clients, clients)).round(3)
    matrices = [
        [
            [1.0 if a == b else float(m[min(a, b), max(a, b)]) for b in range(clients)]
            for a in range(clients)
        ]
        for m in draw
    ]
    gaps = [
        [None if 0 in (a, b) else value for b, value in enumerate(row)]
        for a, row in enumerate(matrices[0])
    ]
    whole = list(range(clients))
    found = {
        "round": 20,
        "kinds": [f"c{c}" for c in range(classes)],
        "rows": [100 + row for row in range(rows)],
        "labels": [row * classes // rows for row in range(rows)],
        "clients": [
            {"id": 10 + at, "tier": TIERS[tier]["name"], "params": 1000 + at}
            for at, tier in enumerate(tiers)
        ],
        "cka": {"first": gaps, "features": matrices[1]},
        "agreement": {
            "equal": matrices[0],
            "kl": matrices[1],
            "js": matrices[2],
            "right": [0.5] * clients,
        },
        "maps": [
            {
                "stage": stage,
                "how": "t-SNE",
                "clients": who,
                "rows": list(range(0, rows, 2)),
                "at": noise.normal(0, 30, (len(who), len(range(0, rows, 2)), 2)).round(3).tolist(),
            }
            for stage, who in (("features", whole), ("logits", whole), ("first", whole[1:]))
        ],
        "notes": ["Client 99 is left out."],
    }
    (folder / "analysis.json").write_text(json.dumps(found))
    return folder


def change(path: Path, **fields: Any) -> None:
    """Rewrite a JSON file with some top-level fields changed."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _records(
    method: str, seed: int, done: int, gain: float, personal: bool, global_model: bool
) -> list[dict[str, Any]]:
    noise = stream(seed, "made-up", method)
    records = []
    for at in range(1, done + 1):
        evaluated = at % 2 == 0 or at in (1, done)

        def accuracy(
            top: float, speed: float, on: bool, at: int = at, evaluated: bool = evaluated
        ) -> float | None:
            level = min(0.999, top + gain) - 0.85 * math.exp(-at / speed) + noise.normal(0, 0.006)
            return round(min(1.0, level), 4) if on and evaluated else None

        by_tier = {
            tier["name"]: {
                "global_score": accuracy(0.86 + 0.035 * index, 3 + index, global_model),
                "personal_score": accuracy(0.90 + 0.02 * index, 2 + 0.5 * index, personal),
                "loss": round(
                    2.3 * math.exp(-at / (5 + index)) + 0.15 + abs(noise.normal(0, 0.02)), 4
                )
                if (at + index) % 3
                else None,
                "clients": 2,
            }
            for index, tier in enumerate(TIERS)
        }
        records.append(
            {
                "round": at,
                "clients": [int(c) for c in noise.integers(0, 20, 6)],
                "loss": round(2.3 * math.exp(-at / 6) + 0.2, 4),
                "global_score": accuracy(0.975, 4, global_model),
                "personal_score": accuracy(0.955, 3, personal),
                "by_tier": by_tier,
                "bytes_up": 480_000,
                "bytes_down": 510_000,
                "bytes_up_total": 480_000 * at,
                "bytes_down_total": 510_000 * at,
                "refused": int(at == 3),
                "late": int(at % 7 == 0),
                "dropped": 0,
                "clock_seconds": 61.5 * at,
                "energy_joules": 880.0 * at,
                "seconds": 0.8,
            }
        )
    return records


def _trace(values: Mapping[int, float | None]) -> dict[str, Any]:
    known = {at: value for at, value in values.items() if value is not None}
    if not known:
        return {"last": None, "best": None, "best_round": None}
    best = max(known, key=lambda at: known[at])
    return {"last": known[max(known)], "best": known[best], "best_round": best}


def _summary(
    records: list[dict[str, Any]],
    method: str,
    title: str,
    seed: int,
    rounds: int,
    global_model: bool,
) -> dict[str, Any]:
    kinds = ("global_score", "personal_score")
    return {
        "method": method,
        "title": title,
        "seed": seed,
        "rounds": rounds,
        "rounds_done": rounds,
        "data": "mnist12k",
        "model": "tinycnn",
        "global_model": global_model,
        **{kind: _trace({r["round"]: r[kind] for r in records}) for kind in kinds},
        "by_tier": {
            tier["name"]: {
                kind: _trace({r["round"]: r["by_tier"][tier["name"]][kind] for r in records})
                for kind in kinds
            }
            for tier in TIERS
        },
        "bytes_up": sum(r["bytes_up"] for r in records),
        "bytes_down": sum(r["bytes_down"] for r in records),
        "seconds": 0.8 * rounds,
        "clock_seconds": 61.5 * rounds,
        "energy_joules": 880.0 * rounds,
        "refused": 1,
        "late": rounds // 7,
        "dropped": 0,
        "commit": "1f0c2ab",
        "versions": {"nestling": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
    }


def _federation(seed: int, clients: int, classes: int) -> dict[str, Any]:
    noise = stream(seed, "made-up split")
    names = [tier["name"] for tier in TIERS for _ in range(int(str(tier["count"])))]
    shares = noise.dirichlet([0.5] * classes, size=clients)
    return {
        "model": {
            "name": "tinycnn",
            "params": 60_000,
            "norm": "group",
            "shape": [1, 28, 28],
            "classes": classes,
        },
        "tiers": TIERS,
        "split": {
            "kinds": [str(c) for c in range(classes)],
            "kind": "dirichlet",
            "alpha": 0.5,
            "clients_total": clients,
            "public": 100,
            "clients": [
                {
                    "id": c,
                    "tier": names[c % len(names)],
                    "counts": [int(600 * share) for share in shares[c]],
                }
                for c in range(min(clients, 100))
            ],
        },
    }

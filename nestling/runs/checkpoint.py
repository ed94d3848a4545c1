"""Checkpoints: one file, written whole, that says where a run stands."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from nestling.errors import InputError
from nestling.files import write_atomic
from nestling.message import Message
from nestling.runs.federation import Totals
from nestling.views import State

NAME = "checkpoint.bin"
_DIGEST = 32


def save(folder: Path, state: Mapping[str, State], totals: Totals) -> None:
    """Writes the method's state and the run's totals; the digest in front tells a damaged file from
    a good one."""
    data = Message(state, {"totals": asdict(totals)}).to_bytes()
    write_atomic(folder / NAME, hashlib.sha256(data).digest() + data)


def load(folder: Path) -> tuple[dict[str, State], Totals] | None:
    """What `save` wrote, or None where a run ended before its first checkpoint."""
    path = folder / NAME
    if not path.exists():
        return None
    raw = path.read_bytes()
    if hashlib.sha256(raw[_DIGEST:]).digest() != raw[:_DIGEST]:
        raise InputError(
            f"the checkpoint {path} is damaged",
            field="--resume",
            fix="restore the file, or start the run again",
        )
    message = Message.from_bytes(raw[_DIGEST:])
    return {name: dict(part) for name, part in message.parts.items()}, Totals(
        **message.facts["totals"]
    )


def exists(folder: Path) -> bool:
    """Whether the run in a folder has a checkpoint to go on from."""
    return (folder / NAME).exists()

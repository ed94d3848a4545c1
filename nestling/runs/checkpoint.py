"""Checkpoints: one file, written whole, that says where a run stands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nestling.files import read_sealed, sealed, write_atomic
from nestling.message import Message
from nestling.runs.federation import Totals
from nestling.schema import from_table
from nestling.views import State

NAME = "checkpoint.bin"


def save(folder: Path, state: Mapping[str, State], totals: Totals, name: str = NAME) -> None:
    """Writes the method's state and the run's totals."""
    write_atomic(folder / name, sealed(Message(state, {"totals": vars(totals)}).to_bytes()))


def load(
    folder: Path, field: str = "--resume", name: str = NAME
) -> tuple[dict[str, State], Totals] | None:
    """What `save` wrote, or None where a run ended before its first checkpoint. `field` is what
    named the folder."""
    path = folder / name
    if not path.exists():
        return None
    message = Message.from_bytes(read_sealed(path, field))
    totals = from_table(Totals, message.facts.get("totals", ()), f"{path}: totals")
    return {kind: dict(part) for kind, part in message.parts.items()}, totals


def exists(folder: Path) -> bool:
    """Whether the run in a folder has a checkpoint to go on from."""
    return (folder / NAME).exists()

"""Rounds in Weights & Biases: in files in the run folder, which `wandb sync` sends; at once only
where WANDB_MODE asks for it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestling.errors import unknown

MODES = ("offline", "online", "disabled", "shared")


class WandbLog:
    """A run of Weights & Biases."""

    def __init__(self, run: Any) -> None:
        """Takes the run that was begun there."""
        self._run = run

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """The values of one round."""
        self._run.log(dict(values), step=step)

    def close(self, finished: bool) -> None:
        """Ends the run there."""
        self._run.finish(exit_code=0 if finished else 1)


def begin(folder: Path, settings: Mapping[str, str]) -> WandbLog:
    """Begins a run named like the folder, in the project "nestling" or the one that WANDB_PROJECT
    names; a folder that has one goes on with it."""
    import wandb

    # Nothing leaves this machine unless it is asked for.
    mode: Any = os.environ.get("WANDB_MODE", "offline")
    if mode not in MODES:
        raise unknown("mode", mode, MODES, field="WANDB_MODE")
    known = folder / "wandb.id"
    if not known.exists():
        known.write_text(f"{uuid.uuid4().hex[:12]}\n")
    run = wandb.init(
        mode=mode,
        dir=str(folder),
        project=os.environ.get("WANDB_PROJECT", "nestling"),
        name=folder.name,
        id=known.read_text().strip(),
        resume="allow",
        config=dict(settings),
        # What a run prints is its own affair.
        settings=wandb.Settings(console="off", silent=True),
    )
    return WandbLog(run)

"""The global model as a file of the run folder, which people carry elsewhere: the summary says its
digest, and whoever opens the run is told where the file is another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from nestling.errors import InputError
from nestling.runfiles import MODEL, SUMMARY, how_to_go_on
from nestling.runs.folder import RunFolder

SHA256 = "sha256"
"""Under this name a summary has the digests of files, by the files' names."""


def write(home: RunFolder, state: Mapping[str, Tensor]) -> dict[str, str]:
    """Writes a model's weights; gives the digest of the file for the summary."""
    data = save({name: t.detach().cpu().contiguous().clone() for name, t in state.items()})
    home.write(MODEL, data)
    return {MODEL: hashlib.sha256(data).hexdigest()}


def check(folder: Path, summary: Mapping[str, Any], round: int) -> None:
    """Refuses a model's file that is not the one that the summary tells of. A summary of another
    round than the run stands at is that of an end which the run has gone on from: it says nothing
    of the file."""
    told = summary.get(SHA256)
    wanted = told.get(MODEL) if isinstance(told, Mapping) else None
    path = folder / MODEL
    if wanted is None or summary.get("rounds_done") != round or not path.exists():
        return
    if hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
        raise InputError(
            f"{path} is damaged: it is not what {SUMMARY} says was written",
            field="RUN",
            fix=f"restore the file, or have it written again: {how_to_go_on(folder)}",
        )

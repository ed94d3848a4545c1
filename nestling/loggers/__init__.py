"""Where rounds may be logged beside the run folder: MLflow and Weights & Biases, one file each.
Both get what TensorBoard gets, and neither is needed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from nestling.errors import InputError, unknown

LOGGERS = {"mlflow": "nestling.loggers.mlflow_log", "wandb": "nestling.loggers.wandb_log"}
"""Name, which is that of the package and of the extra too → where it lives."""


class Logger(Protocol):
    """One run in a logger's store."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """The values of one round."""

    def close(self, finished: bool) -> None:
        """Ends the run there; `finished` says whether it came to its end here."""


class OpenLogger(Protocol):
    """What a logger's file has under the name `begin`."""

    def __call__(self, folder: Path, settings: Mapping[str, str]) -> Logger:
        """Begins to log the run in a folder, or goes on where the folder was logged before."""


def logger_of(name: str) -> OpenLogger:
    """How to open a logger; an `InputError` where there is none of this name, or its package is
    not installed."""
    if name not in LOGGERS:
        raise unknown("logger", name, LOGGERS, field="--log")
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"this needs {name}, which is not installed",
            field="--log",
            fix=f"pip install 'nestling[{name}]'",
        ) from error
    found: OpenLogger = importlib.import_module(LOGGERS[name]).begin
    return found


def sends(name: str) -> bool:
    """Whether a logger, as its variables in the environment have it, sends rounds elsewhere at
    once."""
    if name == "mlflow":
        return os.environ.get("MLFLOW_TRACKING_URI", "").startswith("http")
    return os.environ.get("WANDB_MODE", "offline") not in ("offline", "disabled")

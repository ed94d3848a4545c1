"""Rounds in MLflow: on the server that MLFLOW_TRACKING_URI names, else in the run folder."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LONGEST = 500  # letters of a parameter's value, which every store takes
_AT_ONCE = 100  # parameters of one call, likewise


class MlflowLog:
    """A run in MLflow's store."""

    def __init__(self, client: Any, run: str) -> None:
        """Takes MLflow's client and the run's number there."""
        self._client, self._run = client, run

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """The values of one round."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [Metric(_allowed(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=rows)

    def close(self, finished: bool) -> None:
        """Ends the run there."""
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")


def begin(folder: Path, settings: Mapping[str, str]) -> MlflowLog:
    """Begins a run named like the folder, in the experiment "nestling" or the one that
    MLFLOW_EXPERIMENT_NAME names; a folder that has one goes on with it."""
    from mlflow.entities import Param
    from mlflow.tracking import MlflowClient

    where = os.environ.get("MLFLOW_TRACKING_URI")
    if not where:
        where = (folder.absolute() / "mlflow").as_uri()
        # Newer versions refuse plain files unless they are asked for, as they are here.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=where)
    known = folder / "mlflow.id"
    if known.exists():
        run = known.read_text().strip()
        client.update_run(run, status="RUNNING")
        return MlflowLog(client, run)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "nestling")
    found = client.get_experiment_by_name(name)
    home = found.experiment_id if found else client.create_experiment(name)
    run = client.create_run(home, run_name=folder.name).info.run_id
    params = [Param(_allowed(key), value[:_LONGEST]) for key, value in settings.items()]
    for start in range(0, len(params), _AT_ONCE):
        client.log_batch(run, params=params[start : start + _AT_ONCE])
    known.write_text(f"{run}\n")
    return MlflowLog(client, run)


def _allowed(name: str) -> str:
    """A name without the signs that MLflow refuses."""
    return re.sub(r"[^\w\-. /]", "_", name)

"""The run folder: plain files that are whole at every moment.

experiment.toml (the complete description), federation.json (what fits where, the split, how the run
began), metrics.jsonl (one line per round), boards.jsonl (where there are boards: a line for every
job that one did), checkpoint.bin, coverage.json (where weights are shared: how many clients trained
each channel), clients/ (what clients keep), events (TensorBoard reads along), and at the end
summary.json, global.safetensors and report.html; `nestling analyse` adds analysis.json. A fleet of
real devices adds roster.json, fleet.json and its logs.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nestling.errors import InputError
from nestling.events import EventFile
from nestling.files import append_whole, check_place, write_atomic, writing
from nestling.runfiles import BOARDS, EXPERIMENT, METRICS, how_to_go_on, lines_of, number, parsed


class RunFolder:
    """A run's files. Made by `create` or `reopen`."""

    def __init__(self, path: Path) -> None:
        """Takes a path; the folder is locked by `take`, and its logs are opened by `start`."""
        self.path = path
        self._lock: int | None = None
        self._events: EventFile | None = None

    def take(self, field: str = "--resume") -> RunFolder:
        """Takes the folder for this process; a second one is refused."""
        # the folder itself, since its files are replaced as they change
        lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise InputError(
                f"another process is running in {self.path}",
                field=field,
                fix="wait for it, or stop it",
            ) from None
        self._lock = lock
        return self

    def start(self, round: int) -> None:
        """Cuts the log back to the round the run stands at, and opens it."""
        for name in (METRICS, BOARDS):
            lines = [(number(line.get("round")), line) for line in lines_of(self.path / name)]
            kept = [line for at, line in lines if at is not None and at <= round]
            if kept or name == METRICS:
                write_atomic(self.path / name, "".join(json.dumps(line) + "\n" for line in kept))
        self._events = EventFile(self.path / "tensorboard", purge_from=round + 1)

    def metrics(self) -> list[dict[str, Any]]:
        """The rounds logged so far; a line cut short by a crash is left out."""
        return lines_of(self.path / METRICS)

    def boards(self) -> list[dict[str, Any]]:
        """What boards did so far, likewise."""
        return lines_of(self.path / BOARDS)

    def log(self, metrics: dict[str, Any]) -> None:
        """Adds a round."""
        append_whole(self.path / METRICS, json.dumps(metrics) + "\n")
        assert self._events is not None
        self._events.scalars(dict(scalars_of(metrics)), step=metrics["round"])

    def log_boards(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds what boards did; a run without boards has no such file."""
        if rows:
            lines = (json.dumps(dict(row)) + "\n" for row in rows)
            append_whole(self.path / BOARDS, "".join(lines))

    def write(self, name: str, data: str | bytes) -> None:
        """A whole file, or none."""
        write_atomic(self.path / name, data)

    def read_json(self, name: str) -> Any:
        """A JSON file of the folder, or None; a damaged one is refused."""
        path = self.path / name
        try:
            return parsed(path.read_text()) if path.exists() else None
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{path} is damaged: {error}", field="RUN", fix="restore the file, or remove it"
            ) from error

    def close(self) -> None:
        """Lets go of the folder."""
        if self._events is not None:
            self._events.close()
        if self._lock is not None:
            os.close(self._lock)
        self._events = self._lock = None

    def remove(self) -> None:
        """Takes the whole folder away: nothing worth keeping was written."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)


def check_new(path: Path) -> None:
    """Refuses a path where a run folder cannot be made."""
    with writing(_called(path)):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            run = (
                f", or go on with it: {how_to_go_on(path)}" if (path / EXPERIMENT).exists() else ""
            )
            raise InputError(
                f"{path} exists already", field="--out", fix=f"name another folder{run}"
            )
    check_place(path)


def _called(path: Path) -> str:
    return f"the run folder {path}"


def create(path: Path, files: dict[str, str]) -> RunFolder:
    """A new run folder with its first files; it appears under its name only when they are all
    there."""
    check_new(path)
    with writing(_called(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            for name, text in files.items():
                write_atomic(temporary / name, text)
            os.chmod(temporary, 0o755)
            if path.exists():
                path.rmdir()
            temporary.rename(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return RunFolder(path)


def reopen(path: Path, field: str = "--resume") -> RunFolder:
    """The folder of an earlier run."""
    if not (path / EXPERIMENT).is_file():
        raise InputError(
            f"{path} is not a run folder", field=field, fix=f"name a folder that holds {EXPERIMENT}"
        )
    return RunFolder(path)


def scalars_of(metrics: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """What a round says in single numbers, by name, as TensorBoard and other loggers take it."""
    for name, value in metrics.items():
        if isinstance(value, (int, float)) and name != "round":
            yield name, float(value)
        elif name == "metrics":
            yield from ((k, float(v)) for k, v in value.items() if v is not None)
        elif name == "by_tier":
            yield from (
                (f"{tier}/{k}", float(v))
                for tier, row in value.items()
                for k, v in row.items()
                if v is not None
            )

"""A run that loggers hear of, round by round, as they happen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from nestling.errors import InputError
from nestling.experiment import Experiment
from nestling.loggers import Logger, OpenLogger, logger_of
from nestling.runs.federation import Metrics
from nestling.runs.folder import scalars_of
from nestling.runs.run import Watcher


@contextmanager
def logged(watcher: Watcher, names: Iterable[str], folder: Path) -> Iterator[Watcher]:
    """A watcher that also tells the loggers of these names (`nestling.loggers`) of the run in
    `folder`. Names that are unknown, or whose package is missing, are refused before it begins; a
    logger that fails later is left out, and the run goes on."""
    openers = {name: logger_of(name) for name in names}
    loggers: dict[str, Logger] = {}
    rounds = {"of": 0, "done": 0}

    def started(experiment: Experiment, description: dict[str, Any], done: int) -> None:
        watcher.started(experiment, description, done)
        rounds.update(of=experiment.rounds, done=done)
        settings = dict(_flat(experiment.to_table()))
        for name, begin in openers.items():
            loggers[name] = _begun(name, begin, folder, settings)

    def round_(metrics: Metrics) -> None:
        rounds["done"] = metrics["round"]
        tell(lambda logger: logger.scalars(dict(scalars_of(metrics)), metrics["round"]))
        watcher.round(metrics)

    def tell(what: Callable[[Logger], None]) -> None:
        for name, logger in list(loggers.items()):
            try:
                what(logger)
            except Exception as error:  # noqa: PERF203 (each logger is tried by itself)
                del loggers[name]
                watcher.note(f"NOT LOGGED to {name} any more: {error}")

    try:
        yield replace(watcher, started=started, round=round_)
    finally:
        tell(lambda logger: logger.close(finished=rounds["done"] == rounds["of"]))


def _begun(name: str, begin: OpenLogger, folder: Path, settings: Mapping[str, str]) -> Logger:
    try:
        return begin(folder, settings)
    except Exception as error:
        raise InputError(
            f"{name} cannot be logged to: {error}",
            field="--log",
            fix="mend what it says, or leave it out",
        ) from error


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", str(value)

"""One run of many, in a folder of its own: begun, gone on with, or left alone once it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nestling.errors import InputError
from nestling.experiment import Experiment, FleetConfig, fleet_of
from nestling.files import write_atomic, writing
from nestling.named_code import only
from nestling.runfiles import NO_MATTER, SUMMARY
from nestling.runs import run as running
from nestling.runs.fingerprint import without
from nestling.runs.folder import RunFolder
from nestling.runs.run import Watcher

FREE = ("rounds", "engine")
"""What may differ when a run goes on."""


def play_cell(
    experiment: Experiment,
    folder: Path,
    watcher: Watcher,
    *,
    overrides: tuple[str, ...] = (),
    field: str = "--runs",
) -> None:
    """Plays the run of a folder as far as it is to go. What was asked for stands beside the folder
    from the start, so that a folder of another experiment is refused. `overrides` change how a run
    that goes on is played; `field` is what named the place."""
    asked = folder.with_name(f"{folder.name}.toml")
    if not folder.exists():
        with writing(asked, field):
            folder.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(asked, _as_asked(experiment).to_toml())
        running.run(experiment, out=folder, watcher=watcher)
        return
    check_cell(experiment, folder, field)
    if rounds_done(folder) < experiment.rounds:
        running.resume(
            folder,
            watcher=watcher,
            overrides=overrides,
            trust=experiment.named_code(),
            model=experiment.own_model,
            method=experiment.own_method,
            data=experiment.data if experiment.data.own is not None else None,
        )


def check_cell(experiment: Experiment, folder: Path, field: str = "--runs") -> None:
    """Refuses a folder that holds the run of another experiment."""
    asked = folder.with_name(f"{folder.name}.toml")
    if not folder.exists() or not asked.exists():
        return
    with only(experiment.named_code()):
        before = Experiment.read(asked)
    if not _same(before, experiment):
        raise InputError(
            f"the run in {folder} is of another experiment",
            field=field,
            fix=f"give {field} another folder",
        )


def rounds_done(folder: Path) -> int:
    """How many rounds a run has behind it, from its summary; none where it has not come to one."""
    done = (RunFolder(folder).read_json(SUMMARY) or {}).get("rounds_done", 0)
    return int(done)


def is_free(override: str) -> bool:
    """Whether it changes how a run is played and not what it is."""
    return override.split("=")[0].strip().split(".")[0] in FREE


def _as_asked(experiment: Experiment) -> Experiment:
    """The experiment with its fleet's file read in: what it was asked for, wherever the file lies
    by then, and whatever it says by then."""
    return experiment.with_changes(fleet=fleet_of(experiment.fleet))


def _same(before: Experiment, now: Experiment) -> bool:
    """Whether what was asked for is what is asked for now."""
    if before.fleet.path:
        # as earlier versions wrote it: by a path, which nothing is read from, and a fleet that the
        # run itself goes on with
        before = before.with_changes(fleet=FleetConfig())
        now = now.with_changes(fleet=FleetConfig())
    return _fixed(before) == _fixed(_as_asked(now))


def _fixed(experiment: Experiment) -> dict[str, Any]:
    """What makes a run what it is; that a file is the same one, its fingerprint tells."""
    table = without(experiment.to_table(), (*NO_MATTER, "rounds"))
    table["seed"] = experiment.seed
    table["fleet"]["catalogue"] = Path(experiment.fleet.catalogue).name
    return table

"""Where a run's data file is: from any folder, and after the run folder was moved.

A run folder names its file in two ways: by the whole path, and by the way there from the run folder
itself (`beside`), so that it opens from anywhere, and after it was moved together with its data. A
copy of the file inside the run folder counts too. Whether what is found is what the run began with,
its fingerprint tells.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from nestling.errors import InputError
from nestling.experiment import Experiment


def with_whole_path(experiment: Experiment) -> Experiment:
    """The experiment as its run folder is to hold it: with the whole paths of its data file and of
    its own catalogue of devices."""
    data, fleet = experiment.data, experiment.fleet
    if data.path:
        data = replace(data, path=_whole(data.path))
    if fleet.catalogue:
        fleet = replace(fleet, catalogue=_whole(fleet.catalogue))
    return experiment.with_changes(data=data, fleet=fleet)


def _whole(named: str) -> str:
    path = Path(named).expanduser()
    return str(path.absolute()) if named and path.exists() else named


def way_there(experiment: Experiment, folder: Path) -> str:
    """The way from a run folder to the data file; empty where there is none."""
    path = Path(experiment.data.path).expanduser()
    if not experiment.data.path or not path.exists():
        return ""
    return os.path.relpath(path.absolute(), folder.absolute())


def found_again(experiment: Experiment, folder: Path, beside: object) -> Experiment:
    """The experiment of a run folder with its data file where that is now."""
    named = experiment.data.path
    if not named or Path(named).expanduser().exists():
        return experiment
    places = [folder / beside] if isinstance(beside, str) and beside else []
    places += [folder / Path(named).name, folder.absolute().parent / Path(named).name]
    here = next((place for place in places if place.exists()), None)
    if here is None:
        raise InputError(
            f"the data file of the run in {folder} is not there: looked for "
            f"{', '.join(map(str, [named, *places]))}",
            field="data.path",
            fix=f"put it at {folder / Path(named).name}, or go on with --set data.path=FILE",
        )
    return experiment.with_changes(data=replace(experiment.data, path=str(here)))

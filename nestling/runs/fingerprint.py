"""Fingerprints: what a run was made of, in short digests that tell whether two runs had the same.

    data      rows, labels and test rows as they were read, before the seed divides them
    split     whose rows are whose (follows from data, settings and seed)
    network   code: classes, shapes and attributes; weights: what they were before round 1
    method    code and settings of a method that is neither in the table of methods nor ours
    settings  the whole experiment but its seed, and where it is carried out
    form      how the code is spelled: digests of two forms cannot be compared

They guard against mistakes, not against forgers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestling.data import Dataset, Split
from nestling.errors import InputError
from nestling.experiment import Experiment
from nestling.files import read_toml
from nestling.methods import Method
from nestling.runfiles import NO_MATTER
from nestling.runs.spelled import Speller
from nestling.schema import to_table
from nestling.version import __version__
from nestling.views import Reference

DIGITS = 16
LOOKED_AT = 512
"""Clients whose rows are part of a split's fingerprint: enough to tell two splits apart, and a
million clients cost no more."""

FORM = 2
"""Folders that say no form have the first: it looked neither into objects nor at private
attributes."""

Fingerprint = dict[str, Any]


def of_data(dataset: Dataset) -> dict[str, str]:
    """A data set as it was read: no seed has touched it."""
    natural = [] if dataset.client is None else [dataset.client]
    return {
        "rows": _digest([dataset.x]),
        "labels": _digest([dataset.y, *natural, np.array(dataset.classes)]),
        "test": _digest([dataset.x_test, dataset.y_test]),
    }


def of_split(split: Split) -> str:
    """Which rows the clients train on, and which they hold out."""
    rows = []
    for client in range(min(split.clients, LOOKED_AT)):
        rows += [split.indices(client), split.holdout(client)]
    return _digest([np.array(split.clients), *rows])


def of_networks(references: Iterable[Reference]) -> dict[str, str]:
    """All networks of a run, as they were before the first round."""
    code: list[Any] = []
    weights: list[Tensor | np.ndarray] = []
    kept: list[Tensor | np.ndarray] = []
    for reference in references:
        structure, beside = _structure(reference.module)
        code.append([reference.name, structure])
        weights += reference.module.state_dict().values()
        kept += beside
    return {"code": _digest([_text(code)]), "weights": _digest([*weights, *kept])}


def of_run(experiment: Experiment, made: Mapping[str, Any]) -> Fingerprint:
    """The fingerprint of a run; `made` is what was found while its world was made."""
    given = (("method", experiment.own_method), ("model", experiment.own_model))
    return {
        **made,
        **({"method": of_method(experiment.make_method())} if _own_method(experiment) else {}),
        "settings": _settings(experiment.to_table()),
        "objects": [name for name, own in given if own is not None],
        "form": FORM,
        "nestling": __version__,
    }


def of_method(method: Method) -> dict[str, str]:
    """A method of one's own: its code and its settings."""
    speller = Speller()
    speller.take(type(method))
    return {
        "code": _digest([_text([type(method).__qualname__, speller.code()]), *speller.tensors]),
        "settings": _digest([_text(to_table(method))]),
    }


def without(table: Mapping[str, Any], names: Iterable[str], above: str = "") -> dict[str, Any]:
    """Nested tables without the entries of these dotted names."""
    names = tuple(names)
    return {
        key: without(value, names, f"{above}{key}.") if isinstance(value, Mapping) else value
        for key, value in table.items()
        if f"{above}{key}" not in names
    }


def check_given(before: Fingerprint, experiment: Experiment, folder: object) -> None:
    """Refuses to go on without a network that was given as an object, which no file holds, or
    with another method than the one that was."""
    objects = before.get("objects", ())
    for name, given in (("model", experiment.own_model), ("method", experiment.own_method)):
        if before and given is not None and name not in objects:
            raise InputError(
                f"the run in {folder} was given no object, and goes on with what it names",
                field=name,
                fix="leave it out",
            )
    if "model" in objects and experiment.own_model is None:
        raise InputError(
            f"the network of the run in {folder} was given as an object, "
            f"{experiment.model.name}, and no file holds it",
            field="model",
            fix=_how("model", folder),
        )
    _check_method(before, experiment, folder)


def check_method_given(before: Fingerprint, error: InputError, folder: object) -> None:
    """Says how to give a method again that was given as an object, where its class cannot be had
    (`error`)."""
    if "method" in before.get("objects", ()):
        # where only trust is missing, the class that the folder names would do as well
        also = f"; {error.fix}" if error.__cause__ is None else ""
        raise InputError(
            f"the method of the run in {folder} was given as an object, and no file holds it",
            field="method",
            fix=_how("method", folder) + also,
        ) from error


def check_same(
    before: Fingerprint, experiment: Experiment, now: Mapping[str, Any], folder: object
) -> None:
    """Refuses to go on with other data than a run began with, or with another network in the
    place of one of the user's own. Folders of earlier versions have no fingerprint, or one that
    says less, and are believed as far as they cannot know."""
    _check_data(before.get("data"), now["data"], folder)
    given = "model" in before.get("objects", ())
    if given or _named_networks(experiment):
        same_form = before.get("form") == FORM
        _check_network(before.get("network"), now["network"], folder, given, same_form)


def believed(before: Fingerprint, experiment: Experiment) -> list[str]:
    """What must be said of a folder whose fingerprint was made by an earlier version."""
    own = _own_method(experiment) or _named_networks(experiment) or experiment.own_model is not None
    if not before or before.get("form") == FORM or not own:
        return []
    return [
        "this run was begun by an earlier version, whose fingerprints say less of code: whether "
        "that of its method and networks is what it began with is not known"
    ]


def edited(before: Fingerprint, path: Path) -> list[str]:
    """A note where the experiment of a run folder has other settings than were written there: it is
    gone on with as it is, since people may edit it."""
    if before.get("settings") in (None, _settings(read_toml(path))):
        return []
    return [
        f"{path} is not as it was written: the run goes on with the settings that stand there now, "
        "and its rounds so far may have been played with others"
    ]


def stored(federation: object) -> Fingerprint:
    """The fingerprint in what a folder says of its federation; empty where it has none."""
    found = federation.get("fingerprint") if isinstance(federation, Mapping) else None
    if not isinstance(found, Mapping):
        return {}
    objects = found.get("objects")
    return {**found, "objects": objects if isinstance(objects, list) else []}


def _check_data(before: object, now: Mapping[str, str], folder: object) -> None:
    if not isinstance(before, Mapping):
        return
    other = [name for name in ("rows", "labels", "test") if before.get(name) != now.get(name)]
    if other:
        words = {"rows": "rows", "labels": "labels", "test": "test rows"}
        raise InputError(
            f"the data are not those that the run in {folder} began with: other "
            f"{' and '.join(words[name] for name in other)}",
            field="data",
            fix="put the data back, or start a run of its own",
        )


def _check_method(before: Fingerprint, experiment: Experiment, folder: object) -> None:
    """A method that was not given again is made from what the folder says."""
    then = before.get("method")
    if not isinstance(then, Mapping) or before.get("form") != FORM:
        return
    now = of_method(experiment.make_method())
    if "method" not in before.get("objects", ()):
        if then.get("code") != now["code"]:
            raise _edited("method", experiment.method.name, "method.name", folder)
    elif dict(then) != now:
        raise _another("method", "method", "its code or its settings differ", folder)


def _check_network(
    before: object, now: Mapping[str, str], folder: object, given: bool, same_form: bool
) -> None:
    if not isinstance(before, Mapping):
        return
    if same_form and before.get("code") != now["code"]:
        if not given:
            raise _edited("network", "its code, shapes or attributes", "model.name", folder)
        raise _another("network", "model", "its code, shapes or attributes differ", folder)
    # of a network that is named, they follow from the seed
    if given and before.get("weights") != now["weights"]:
        why = "its weights are not those the run began with: seed torch before it is made, or load"
        raise _another("network", "model", f"{why} them", folder)


def _own_method(experiment: Experiment) -> bool:
    return experiment.own_method is not None or ":" in experiment.method.name


def _named_networks(experiment: Experiment) -> bool:
    """Whether some network is code of the user's own that the experiment names."""
    names = [experiment.model.name, *(tier.model for tier in experiment.fleet.tiers)]
    return any(":" in name for name in names)


def _another(what: str, name: str, why: str, folder: object) -> InputError:
    return InputError(
        f"the run in {folder} was begun with another {what}: {why}",
        field=name,
        fix=_how(name, folder),
    )


def _how(name: str, folder: object) -> str:
    return (
        f"give the same object, in Python: nestling.resume({str(folder)!r}, {name}=...), or "
        "nestling.load likewise to look at it"
    )


def _edited(what: str, which: str, field: str, folder: object) -> InputError:
    return InputError(
        f"the run in {folder} was begun with another {what}: {which} changed since",
        field=field,
        fix="put the code back as it was, or start a run of its own",
    )


def _structure(module: nn.Module) -> tuple[list[Any], list[Tensor | np.ndarray]]:
    """What a network is beside its weights: parts and their attributes, code, shapes; and what its
    attributes hold of tensors."""
    speller = Speller(module)
    parts = []
    for name, part in module.named_modules():
        speller.take(type(part))
        parts.append([name, type(part).__qualname__, speller.attributes(part)])
    shapes = [[name, list(t.shape), str(t.dtype)] for name, t in module.state_dict().items()]
    return [parts, speller.code(), shapes], speller.tensors


def _settings(table: Mapping[str, Any]) -> str:
    return _digest([_text(without(table, NO_MATTER))])


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def _digest(parts: Iterable[bytes | np.ndarray | Tensor]) -> str:
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, bytes):
            found.update(part)
            continue
        found.update(f"{part.dtype}{tuple(part.shape)}".encode())
        if isinstance(part, Tensor):
            # as bytes, since numpy does not know all of torch's types
            part = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if part.size:
            found.update(np.ascontiguousarray(part).data)
    return found.hexdigest()[:DIGITS]

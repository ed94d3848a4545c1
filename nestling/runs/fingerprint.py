"""Fingerprints: what a run was made of, in short digests that tell whether two runs had the same.

    data      rows, labels and test rows as they were read, before the seed divides them
    split     whose rows are whose (follows from data, settings and seed)
    network   code: classes, shapes and plain attributes; weights: what they were before round 1
    method    code and settings of a method that was given as an object
    settings  the whole experiment but its seed, and where it is carried out

They guard against mistakes, not against forgers.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestling.data import Dataset, Split
from nestling.errors import InputError
from nestling.experiment import Experiment
from nestling.methods import Method
from nestling.runfiles import NO_MATTER
from nestling.schema import to_table
from nestling.version import __version__
from nestling.views import Reference

DIGITS = 16
LOOKED_AT = 512
"""Clients whose rows are part of a split's fingerprint: enough to tell two splits apart, and a
million clients cost no more."""

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
    modules = [(reference.name, reference.module) for reference in references]
    weights = [tensor for _, module in modules for tensor in module.state_dict().values()]
    code = [[name, _structure(module)] for name, module in modules]
    return {"code": _digest([_text(code)]), "weights": _digest(weights)}


def of_run(experiment: Experiment, made: Mapping[str, Any]) -> Fingerprint:
    """The fingerprint of a run; `made` is what was found while its world was made."""
    own = experiment.own_method
    method = {"method": of_method(own)} if own is not None else {}
    return {
        **made,
        **method,
        "settings": _digest([_text(without(experiment.to_table(), NO_MATTER))]),
        "objects": [
            name
            for name, given in (("method", own), ("model", experiment.own_model))
            if given is not None
        ],
        "nestling": __version__,
    }


def of_method(method: Method) -> str:
    """A method that was given as an object: its code and its settings."""
    return _digest([_text([_source(type(method)), to_table(method)])])


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
    # a method that was not given again is made from what the folder says
    if "method" in objects and before.get("method") != of_method(experiment.make_method()):
        raise _another("method", "method", "its code or its settings differ", folder)


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


def check_same(before: Fingerprint, now: Mapping[str, Any], folder: object) -> None:
    """Refuses to go on with other data than a run began with, or with another network in the
    place of one that was given as an object. Folders of earlier versions have no fingerprint, and
    are believed."""
    _check_data(before.get("data"), now["data"], folder)
    if "model" in before.get("objects", ()):
        _check_network(before.get("network"), now["network"], folder)


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


def _check_network(before: object, now: Mapping[str, str], folder: object) -> None:
    if not isinstance(before, Mapping):
        return
    if before.get("code") != now["code"]:
        raise _another("network", "model", "its code, shapes or attributes differ", folder)
    if before.get("weights") != now["weights"]:
        why = "its weights are not those the run began with: seed torch before it is made, or load"
        raise _another("network", "model", f"{why} them", folder)


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


def _structure(module: nn.Module) -> list[Any]:
    """What a network is beside its weights: classes and their code, plain attributes, shapes."""
    classes = dict.fromkeys(type(part) for part in module.modules())
    return [
        [
            [name, type(part).__qualname__, _attributes(part)]
            for name, part in module.named_modules()
        ],
        [_source(kind) for kind in classes],
        [[name, list(t.shape), str(t.dtype)] for name, t in module.state_dict().items()],
    ]


def _attributes(part: nn.Module) -> dict[str, Any]:
    return {
        name: _plain(value)
        for name, value in vars(part).items()
        if not name.startswith("_") and name != "training"
    }


def _plain(value: Any) -> Any:
    """A value as JSON can hold it; of what is no plain value, its kind."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return _digest([value])
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(inner) for inner in value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _source(kind: type) -> str:
    """The code of a class that is neither torch's nor ours: a newer version of these is no other
    object."""
    if kind.__module__.partition(".")[0] in ("torch", "nestling"):
        return kind.__qualname__
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # typed into an interpreter
        return kind.__qualname__


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

"""A user's own metric: a function of the true and the found classes, as scikit-learn's are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nestling.errors import InputError
from nestling.named_code import named_module
from nestling.tasks.task import finite

FIELD = "evaluate.metrics"
_FORM = (
    'write "package.module:function", where function(y, found) takes two arrays of classes (and '
    "logits=, if it asks for them) and returns a number"
)


@dataclass(frozen=True)
class OwnMetric:
    """A function under its name; `logits` says whether it asks for the outputs too."""

    name: str
    function: Callable[..., Any]
    logits: bool

    def value(self, y: np.ndarray, found: np.ndarray, logits: np.ndarray | None) -> float | None:
        """What it says of a test; None where that is no finite number."""
        try:
            more = {"logits": logits} if self.logits else {}
            return finite(float(self.function(y, found, **more)))
        except Exception as error:
            raise InputError(
                f"{self.name} raised {type(error).__name__}: {error}", field=FIELD, fix=_FORM
            ) from error


def name_of(metric: str | Callable[..., Any]) -> str:
    """What stands for a metric in a file."""
    if isinstance(metric, str):
        return metric
    if not callable(metric):
        raise InputError(f"{metric!r} is no function", field=FIELD, fix=_FORM)
    return f"{getattr(metric, '__module__', '')}:{getattr(metric, '__qualname__', '')}"


def own_metrics(
    names: Sequence[str], known: Mapping[str, Callable[..., Any]]
) -> tuple[OwnMetric, ...]:
    """The metrics of some names; what is not `known` is imported."""
    found: dict[str, OwnMetric] = {}
    for name in names:
        function = known.get(name) or _load(name)
        short = name.rpartition(":")[2].rpartition(".")[2]
        if short in found:
            raise InputError(f"two metrics are called {short!r}", field=FIELD, fix="rename one")
        try:
            asks = "logits" in inspect.signature(function).parameters
        except (TypeError, ValueError):
            asks = False  # no signature to read, as for a few built-ins
        found[short] = OwnMetric(short, function, asks)
    return tuple(found.values())


def _load(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise InputError(f"{name!r} does not name a function", field=FIELD, fix=_FORM)
    try:
        function = getattr(named_module(name, FIELD), attribute, None)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"cannot import {module!r}: {type(error).__name__}: {error}", field=FIELD, fix=_FORM
        ) from error
    if not callable(function):
        raise InputError(f"{name} is no function that can be imported", field=FIELD, fix=_FORM)
    return function

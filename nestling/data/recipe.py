"""How rows become a data set: what a door hands over, what the user asked for, and what was made of
it, said in one line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nestling.errors import InputError, unknown
from nestling.tasks import TASKS, Classification

MISSING = ("refuse", "mean", "zero")
SCALES = ("auto", "standard", "unit", "none")
LAYOUTS = ("auto", "f", "tokens", "lc", "cl", "hw", "hwc", "chw")
TRANSFORMS = ("none", "log-mel")
AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class Recipe:
    """What the user asks of rows that are read (`[data]` in an experiment's file).

    layout:    what the dimensions of a sample are; auto goes by type and shape, and refuses what
               could be either of two.
    scale:     auto, standard (by the training rows), unit (0 to 1) or none.
    missing:   what happens to NaN: refuse, mean or zero.
    client:    whose a row is: auto (`client`, where there is one), none, or the name of the array
               or column; of folders, "folder" or "prefix".
    label, test: the columns of the classes and of the held-out rows; features: those of the
               samples.
    transform: none or log-mel.
    task:      what is learned of the rows.
    normal:    the classes that are normal, where the others are anomalies.
    horizon:   how many last steps of a sequence are foretold (0: an eighth of them).
    options:   further settings of a door, a transform, or of the user's own callable.
    seed:      chooses the held-out rows where nothing else does.
    """

    layout: str = AUTO
    scale: str = AUTO
    missing: str = "refuse"
    client: str = AUTO
    label: str = ""
    features: tuple[str, ...] = ()
    test: str = ""
    transform: str = NONE
    task: str = Classification.name
    normal: tuple[str, ...] = ()
    horizon: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def check(self) -> None:
        """Raises `InputError` for a word that none of the fields knows."""
        for name, allowed in (
            ("missing", MISSING),
            ("scale", SCALES),
            ("layout", LAYOUTS),
            ("transform", TRANSFORMS),
            ("task", TASKS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                what = "rule for missing values" if name == "missing" else name
                raise unknown(what, value, allowed, field=f"data.{name}")

    def check_only(self, *used: str, reader: str) -> None:
        """Refuses what is set here and what a reader has no use for: it would be ignored."""
        plain = Recipe(seed=self.seed)
        for name in self.__dataclass_fields__:
            if name not in used and getattr(self, name) != getattr(plain, name):
                raise InputError(
                    f"{reader} has no use for it", field=f"data.{name}", fix="leave it out"
                )

    def take_options(self, **defaults: Any) -> dict[str, Any]:
        """The options a reader knows, with its defaults; others, and those of another type, are
        refused by name."""
        for key, value in self.options.items():
            if key not in defaults:
                raise unknown("option", key, defaults, field=f"data.options.{key}")
            wanted = defaults[key]
            numbers = isinstance(wanted, (int, float)) and isinstance(value, (int, float))
            if isinstance(value, bool) or not (numbers or isinstance(value, type(wanted))):
                raise InputError(
                    f"expected something like {wanted!r}, got {value!r}",
                    field=f"data.options.{key}",
                )
            if numbers and not (math.isfinite(value) and value >= 0):
                raise InputError(
                    f"{value} is out of range",
                    field=f"data.options.{key}",
                    fix="give a finite number that is not negative",
                )
        return {**defaults, **self.options}


@dataclass(frozen=True)
class RawRows:
    """What a door hands over: rows as they were found.

    y is None where rows bring no targets. `length` says how many steps of a row are real, the
    first ones, where x is filled up behind them.
    class_names name the classes where y holds their numbers. A door that knows the layout says it;
    `more` is what it did beyond that, for the line. `where` and `field` say what is to be mended
    where rows are bad.
    """

    x: np.ndarray
    y: np.ndarray | None
    client: np.ndarray | None = None
    test: np.ndarray | None = None
    class_names: tuple[str, ...] = ()
    layout: str = AUTO
    more: str = ""
    where: str = "what was given"
    field: str = "data"
    rate: float = 0.0  # samples a second, of sounds
    length: np.ndarray | None = None

    def bad(self, message: str, fix: str) -> InputError:
        """What is raised where rows cannot be used."""
        return InputError(f"{self.where}: {message}", field=self.field, fix=fix)

    def told(self, more: str) -> RawRows:
        """The same rows, with something more to be said of them."""
        return replace(self, more=f"{self.more}, {more}" if self.more else more)


@dataclass(frozen=True)
class Reading:
    """What was read, and what was done to it."""

    name: str
    rows: int
    test_rows: int
    test: str  # how the test rows were found
    found: tuple[int, ...]  # the shape of one sample as it was found
    layout: str
    shape: tuple[int, ...]
    low: float
    high: float
    scale: str  # what was done to the values, in words
    classes: int
    clients: int
    more: str = ""
    task: str = Classification.name
    outputs: int = 0  # of a network, where the task has no classes

    def line(self, kind: str) -> str:
        """All of it in one line; `kind` is how the split divides rows."""
        parts = [
            f"{self.rows:,} rows and {self.test_rows:,} to test with ({self.test})",
            self.form(),
            f"values {_short(self.low)} to {_short(self.high)}, {self.scale}",
            self.more,
            self.learned(),
            self.whose(kind),
        ]
        return f"data {self.name}: {'; '.join(filter(None, parts))}"

    def form(self) -> str:
        """How a sample was read, and what it is now."""
        words = f"a sample of {_by(self.found)} read as {_WORDS[self.layout]}"
        return words if self.found == self.shape else f"{words}, now {_by(self.shape)}"

    def learned(self) -> str:
        """What is to be learned of the rows."""
        if self.task == Classification.name:
            return f"{self.classes} classes"
        return f"{self.task}, {self.outputs} outputs"

    def whose(self, kind: str) -> str:
        """Whether the rows' clients are used."""
        if not self.clients:
            return "no clients of its own"
        if kind == "natural":
            return f"{self.clients} clients of its own"
        return (
            f'{self.clients} clients of its own, NOT USED: split.kind is "{kind}" ("natural" uses '
            "them)"
        )

    def table(self, kind: str) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "line": self.line(kind),
            "rows": self.rows,
            "test_rows": self.test_rows,
            "layout": self.layout,
            "shape": list(self.shape),
            "low": self.low,
            "high": self.high,
            "scale": self.scale,
            "classes": self.classes,
            "clients": self.clients,
            "task": self.task,
        }


_WORDS = {
    "f": "features",
    "tokens": "token ids",
    "lc": "a sequence (steps, channels), channels moved first",
    "cl": "a sequence (channels, steps)",
    "hw": "a grey picture",
    "hwc": "a picture (height, width, channels), channels moved first",
    "chw": "a picture (channels, height, width)",
}


def _by(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _short(value: float) -> str:
    return f"{value:.4g}"

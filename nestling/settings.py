"""What a setting may be, said in its type: `lam: NotNegative = 1.0`, `weighting: Literal["samples",
"uniform"] = "samples"`.

One place checks it, and errors and the methods' pages say it in the same words.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

from nestling.errors import InputError, unknown


@dataclass(frozen=True)
class Bounds:
    """Between which numbers a setting lies: from `low` to `high`, without an end that is open."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False
    open_high: bool = False

    def hold(self, value: float) -> bool:
        """Whether a number lies between them."""
        above = self.low is None or (value > self.low if self.open_low else value >= self.low)
        below = self.high is None or (value < self.high if self.open_high else value <= self.high)
        return above and below

    def __str__(self) -> str:
        """As errors say it: "at least 1", "below 2", "in [0, 1)"."""
        if self.high is None:
            return f"above {self.low:g}" if self.open_low else f"at least {self.low:g}"
        if self.low is None:
            return f"below {self.high:g}" if self.open_high else f"at most {self.high:g}"
        return (
            f"in {'(' if self.open_low else '['}{self.low:g}, "
            f"{self.high:g}{')' if self.open_high else ']'}"
        )


NotNegative = Annotated[float, Bounds(0)]
Positive = Annotated[float, Bounds(0, open_low=True)]
UnitShare = Annotated[float, Bounds(0, 1)]
NonZeroShare = Annotated[float, Bounds(0, 1, open_low=True)]
ShareBelowOne = Annotated[float, Bounds(0, 1, open_high=True)]
BetweenZeroAndOne = Annotated[float, Bounds(0, 1, open_low=True, open_high=True)]
Whole = Annotated[int, Bounds(0)]
Count = Annotated[int, Bounds(1)]
Compat = Literal["paper", "code"]
"""Whether a method is as its paper has it or as the released code, where they differ."""


def check_settings(settings: Any, section: str) -> None:
    """Refuses a dataclass one of whose fields is not what its type allows, with an error that names
    `section` and the field."""
    cls: type = type(settings)
    for name, hint in _hints(cls).items():
        _check(hint, getattr(settings, name), f"{section}.{name}")


def allowed(cls: type, name: str) -> str:
    """What the type of a field allows, in words; nothing where it is only a type."""
    hint = _hints(cls).get(name)
    return "" if hint is None else _words(hint)


@lru_cache(maxsize=256)
def _hints(cls: type) -> dict[str, Any]:
    """The types of the fields that are settings and allow less than their type."""
    hints = typing.get_type_hints(cls, include_extras=True)
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    return {name: hints[name] for name in names if _words(hints[name])}


def _words(hint: Any) -> str:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return ", ".join(map(str, arguments))
    if typing.get_origin(hint) is Annotated:
        return " and ".join(str(bounds) for bounds in arguments[1:] if isinstance(bounds, Bounds))
    inside = _words(arguments[0]) if typing.get_origin(hint) is tuple else ""
    return f"each {inside.removeprefix('each ')}" if inside else ""


def _check(hint: Any, value: Any, field: str) -> None:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal and value not in arguments:
        raise unknown(field.rpartition(".")[2], value, map(str, arguments), field=field)
    if origin is Annotated and not all(
        b.hold(value) for b in arguments[1:] if isinstance(b, Bounds)
    ):
        raise InputError(f"must be {_words(hint)}, not {value!r}", field=field)
    if origin is tuple:
        for each in value:
            _check(arguments[0], each, field)

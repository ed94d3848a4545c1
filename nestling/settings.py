"""What a setting may be, said in its type: `lam: NotNegative = 1.0`, `weighting: Literal["samples",
"uniform"] = "samples"`; and what it means, said in its class's docstring: `lam: how much of …`.

One place checks it, and errors, `nestling config` and the pages say it in the same words.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

from nestling.errors import InputError, unknown
from nestling.schema import convert


@dataclass(frozen=True)
class Bounds:
    """Between which numbers a setting lies: from `low` to `high`, without an end that is open.
    Where `zero` says what 0 means, 0 is allowed too."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False
    open_high: bool = False
    zero: str = ""

    def hold(self, value: float) -> bool:
        """Whether a number lies between them."""
        above = self.low is None or (value > self.low if self.open_low else value >= self.low)
        below = self.high is None or (value < self.high if self.open_high else value <= self.high)
        return (above and below) or bool(self.zero and value == 0)

    def __str__(self) -> str:
        """As errors say it: "at least 1", "below 2", "in [0, 1)", "above 1 (0: no gate)"."""
        return self._span() + (f" (0: {self.zero})" if self.zero else "")

    def _span(self) -> str:
        if self.high is None:
            return f"above {self.low:g}" if self.open_low else f"at least {self.low:g}"
        if self.low is None:
            return f"below {self.high:g}" if self.open_high else f"at most {self.high:g}"
        return (
            f"in {'(' if self.open_low else '['}{self.low:g}, "
            f"{self.high:g}{')' if self.open_high else ']'}"
        )


@dataclass(frozen=True)
class OneOf:
    """The names that a setting may be, for lists that stand elsewhere; `word` is what errors call
    it. With `more`, what else it may be in words, whoever takes the name looks at it."""

    names: Collection[str]
    word: str = ""
    more: str = ""

    def __str__(self) -> str:
        """The names, as pages list them."""
        return ", ".join([*self.names, *([self.more] if self.more else [])])


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
    `section` and the field. A field holds afterwards what a file would have given it."""
    take_types(settings, section)
    cls: type = type(settings)
    for name, hint in _hints(cls).items():
        own: dataclasses.Field[Any] = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
        _check(hint, getattr(settings, name), f"{section}.{name}" if section else name, own)


def take_types(settings: Any, section: str) -> None:
    """Gives the fields of a dataclass the types that they are declared with, where what they hold
    means the same (a list for a tuple, 1 for 1.0), and refuses the others by name."""
    cls: type = type(settings)
    for name, hint in _types(cls).items():
        given = getattr(settings, name)
        if type(given) is hint:
            continue  # a number that is not finite is for its bounds to refuse
        found = convert(hint, given, f"{section}.{name}" if section else name)
        if found is not given:
            object.__setattr__(settings, name, found)  # also where it is frozen


def allowed(cls: type, name: str) -> str:
    """What the type of a field allows, in words; nothing where it is only a type."""
    hint = _hints(cls).get(name)
    return "" if hint is None else allowed_words(hint)


def allowed_words(hint: Any) -> str:
    """What a type allows, in words; nothing where it is only a type."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return ", ".join(map(str, arguments))
    if typing.get_origin(hint) is Annotated:
        return " and ".join(str(rule) for rule in arguments[1:] if isinstance(rule, Bounds | OneOf))
    inside = allowed_words(arguments[0]) if typing.get_origin(hint) is tuple else ""
    return f"each {inside.removeprefix('each ')}" if inside else ""


def bounds_of(cls: type) -> dict[str, tuple[bool, Bounds]]:
    """The fields that are bounded numbers, or lists of such: whether they are whole, and between
    what they lie."""
    found: dict[str, tuple[bool, Bounds]] = {}
    for name, hint in _hints(cls).items():
        inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
        kind, *rules = typing.get_args(inner)
        for rule in rules:
            if isinstance(rule, Bounds):
                found[name] = (kind is int, rule)
    return found


def type_words(hint: Any) -> str:
    """A setting's type as a user of TOML would say it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return type_words(arguments[0])
    if origin is Literal:
        return type_words(type(arguments[0]))
    if origin is tuple:
        return f"list of {type_words(arguments[0])}s"
    if origin in (dict, Mapping) or dataclasses.is_dataclass(hint):
        return "table"
    plain = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    return plain.get(hint, "any")


def default_words(field: dataclasses.Field[Any]) -> str:
    """A field's default as TOML has it; nothing where there is none, or none that TOML has."""
    factory = field.default_factory
    value = field.default if factory is dataclasses.MISSING else factory()
    try:
        return json.dumps(value)
    except TypeError:
        return ""


def told_of(cls: type, starts: tuple[str, ...] = ()) -> tuple[str, dict[str, str]]:
    """What a docstring tells: its text, with a paragraph for each of the words that `starts` names,
    and what it says of each setting (`name: …` or `name, other: …`, further lines indented)."""
    return told_in(cls.__doc__ or "", {f.name for f in dataclasses.fields(cls)}, starts)


def told_in(
    docstring: str, settings: Collection[str], starts: tuple[str, ...] = ()
) -> tuple[str, dict[str, str]]:
    """`told_of` for any docstring, of a class or of a function that has these settings."""
    blocks: list[list[str]] = [[]]
    meanings: dict[str, str] = {}
    last: list[str] = []
    for line in inspect.cleandoc(docstring).splitlines():
        names = re.match(r"([a-z_0-9, ]+):\s", line)
        found = [n.strip() for n in names[1].split(",")] if names else []
        if names and set(found) <= set(settings):
            last = found
            meanings |= dict.fromkeys(found, line[names.end() :].strip())
        elif last and line.startswith(" "):
            meanings |= {name: f"{meanings[name]} {line.strip()}" for name in last}
        elif not line:
            blocks.append([])
            last = []
        else:
            if starts and line.startswith(starts) and blocks[-1]:
                blocks.append([])
            blocks[-1].append(line.strip())
    return "\n\n".join(" ".join(block) for block in blocks if block), meanings


@lru_cache(maxsize=256)
def _hints(cls: type) -> dict[str, Any]:
    """The types of the fields that are settings and allow less than their type."""
    hints = typing.get_type_hints(cls, include_extras=True)
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    return {name: hints[name] for name in names if allowed_words(hints[name])}


@lru_cache(maxsize=256)
def _types(cls: type) -> dict[str, Any]:
    """The types of the fields that are settings and could stand in a file; a method of the user's
    own may have others."""
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    return {name: hints[name] for name in names if _fits_a_file(hints[name])}


def _fits_a_file(hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (tuple, typing.Union, types.UnionType):
        return all(_fits_a_file(one) for one in arguments if one not in (..., type(None)))
    known = hint in (bool, int, float, str, dict) or origin in (dict, Mapping, Literal)
    return known or dataclasses.is_dataclass(hint)


def _check(hint: Any, value: Any, field: str, own: dataclasses.Field[Any]) -> None:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal and value not in arguments:
        raise unknown(field.rpartition(".")[2], value, map(str, arguments), field=field)
    if origin is Annotated and not all(
        b.hold(value) for b in arguments[1:] if isinstance(b, Bounds)
    ):
        default = default_words(own)
        fix = f"the default is {default}" if default else None
        raise InputError(f"must be {allowed_words(hint)}, not {value!r}", field=field, fix=fix)
    for rule in arguments[1:] if origin is Annotated else ():
        if isinstance(rule, OneOf) and not rule.more and value not in rule.names:
            raise unknown(rule.word or field.rpartition(".")[2], value, rule.names, field=field)
    if origin is tuple:
        for each in value:
            _check(arguments[0], each, field, own)

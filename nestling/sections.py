"""Every setting of an experiment, section by section, with type, range, default and meaning.

Nothing is listed here: the fields, their types and the docstrings of the dataclasses behind
`Experiment` say it all, and the signatures and docstrings of the networks' builders;
`nestling config` and docs/settings.md show it.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from nestling.errors import InputError, unknown
from nestling.experiment import Experiment, Named
from nestling.methods import method_class
from nestling.models import MODELS
from nestling.models.options import function_of, option_defaults, option_hints, told_of_options
from nestling.settings import Bounds, allowed, allowed_words, default_words, told_of, type_words

TOP = "run"
"""The section of what stands above all tables."""


@dataclass(frozen=True)
class SettingRow:
    """One setting: where it stands in a file, what it may be, what it is by default, and what it
    means."""

    key: str
    type: str
    allowed: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Section:
    """The settings of one table, and what is to be said of them all."""

    name: str
    text: str
    rows: tuple[SettingRow, ...]


@dataclass(frozen=True)
class SweepTable:
    """What `nestling sweep` reads in an experiment's file beside the experiment: which methods,
    seeds and settings it is played with. `nestling run` refuses a file that has this table; options
    of the command count instead of what stands here. docs/comparing.md has all of it.

    methods: by name; none: the experiment's own.
    seeds: how many, from the experiment's own on, or a list of them.
    target: a score; the table then says what it took to reach it (0: none).
    vary: fields of the experiment and the values that each is to have, e.g. "split.alpha" = [0.1,
        1.0].
    """

    methods: tuple[str, ...] = ()
    seeds: int | tuple[int, ...] = 3
    target: Annotated[float, Bounds(0, 1)] = 0.0
    vary: Mapping[str, Any] = field(default_factory=dict)


SWEEP = "sweep"
"""The section of what a sweep reads."""


def sections() -> dict[str, Section]:
    """Every section of an experiment's file, by name."""
    found = [*_sections(Experiment, ""), _section(SweepTable, SWEEP, SWEEP)]
    return {section.name: section for section in found}


def section_of(name: str) -> Section:
    """A section by its name, the last word of it ("tiers"), "method.NAME" for a method's own
    settings, or "model.NAME" for a network's."""
    known = sections()
    kind, _, own = name.partition(".")
    if kind == "method" and own:
        return _section(method_class(own), "method", name)
    if kind == "model" and own:
        return network_section(own)
    for path, section in known.items():
        if name in (path, path.rpartition(".")[2]):
            return section
    raise unknown("section", name, [*known, "method.NAME", "model.NAME"], field="SECTION")


def network_section(name: str) -> Section:
    """The options of a network, which stand beside its name."""
    if ":" in name:
        fix = "they are the arguments of the callable, beside shape and classes"
        raise InputError("options of one's own network are not listed", field="SECTION", fix=fix)
    if name not in MODELS:
        raise unknown("model", name, MODELS, field="model.name")
    build = MODELS[name].build
    text, meanings = told_of_options(build)
    hints, defaults = option_hints(build), option_defaults(build)
    rows = (
        SettingRow(
            f"model.{option}",
            type_words(hint),
            allowed_words(hint),
            json.dumps(defaults[option]),
            meanings.get(option, ""),
        )
        for option, hint in hints.items()
    )
    return Section(f"model.{name}", text, tuple(rows))


def network_families() -> list[tuple[str, ...]]:
    """The networks by name, those together that are one function with other defaults."""
    found: dict[Any, list[str]] = {}
    for name, info in MODELS.items():
        found.setdefault(function_of(info.build), []).append(name)
    return [tuple(names) for names in found.values()]


def _sections(cls: type, path: str) -> Iterator[Section]:
    """The section of a class, and those of the classes in its fields."""
    yield _section(cls, path, path or TOP)
    hints = typing.get_type_hints(cls)
    for one in _settings(cls):
        inside = _class_in(hints[one.name])
        if inside is Named:
            yield _named(cls, one)
        elif inside is not None:
            yield from _sections(inside, _join(path, one.name))


def _section(cls: type, path: str, name: str) -> Section:
    text, meanings = told_of(cls)
    hints = typing.get_type_hints(cls, include_extras=True)
    plain = (f for f in _settings(cls) if not dataclasses.is_dataclass(_bare(hints[f.name])))
    rows = (
        SettingRow(
            _join(path, one.name),
            type_words(hints[one.name]),
            allowed(cls, one.name),
            default_words(one),
            meanings.get(one.name, ""),
        )
        for one in plain
    )
    return Section(name, text, tuple(rows))


def _named(cls: type, named: dataclasses.Field[Any]) -> Section:
    """The section of a name with options, of which what they mean stands where the name is asked
    for."""
    text, meanings = told_of(Named)
    factory = typing.cast(Any, named.default_factory)
    meaning = told_of(cls)[1].get(named.name, "")
    names = allowed(cls, named.name)
    default = json.dumps(factory().name)
    rows = (
        SettingRow(f"{named.name}.name", "text", names, default, meaning),
        SettingRow(f"{named.name}.*", "any", "", "", meanings["options"]),
    )
    return Section(named.name, text, rows)


def _settings(cls: type) -> list[dataclasses.Field[Any]]:
    return [one for one in dataclasses.fields(cls) if one.init]


def _class_in(hint: Any) -> type | None:
    """The dataclass that a field holds, one or a list of them."""
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

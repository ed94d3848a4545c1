"""Every setting of an experiment, section by section, with type, range, default and meaning.

Nothing is listed here: the fields, their types and the docstrings of the dataclasses behind
`Experiment` say it all, and `nestling config` and docs/settings.md show it.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nestling.errors import unknown
from nestling.experiment import Experiment, Named
from nestling.methods import method_class
from nestling.settings import allowed, default_words, told_of, type_words

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


def sections() -> dict[str, Section]:
    """Every section of an experiment, by name."""
    return {section.name: section for section in _sections(Experiment, "")}


def section_of(name: str) -> Section:
    """A section by its name, the last word of it ("tiers"), or "method.NAME" for a method's own
    settings."""
    known = sections()
    kind, _, method = name.partition(".")
    if kind == "method" and method:
        return _section(method_class(method), "method", name)
    for path, section in known.items():
        if name in (path, path.rpartition(".")[2]):
            return section
    raise unknown("section", name, [*known, "method.NAME"], field="SECTION")


def _sections(cls: type, path: str) -> Iterator[Section]:
    """The section of a class, and those of the classes in its fields."""
    yield _section(cls, path, path or TOP)
    hints = typing.get_type_hints(cls)
    for field in _settings(cls):
        inside = _class_in(hints[field.name])
        if inside is Named:
            yield _named(cls, field)
        elif inside is not None:
            yield from _sections(inside, _join(path, field.name))


def _section(cls: type, path: str, name: str) -> Section:
    text, meanings = told_of(cls)
    hints = typing.get_type_hints(cls, include_extras=True)
    plain = (f for f in _settings(cls) if not dataclasses.is_dataclass(_bare(hints[f.name])))
    rows = (
        SettingRow(
            _join(path, field.name),
            type_words(hints[field.name]),
            allowed(cls, field.name),
            default_words(field),
            meanings.get(field.name, ""),
        )
        for field in plain
    )
    return Section(name, text, tuple(rows))


def _named(cls: type, field: dataclasses.Field[Any]) -> Section:
    """The section of a name with options, of which what they mean stands where the name is asked
    for."""
    text, meanings = told_of(Named)
    factory = typing.cast(Any, field.default_factory)
    meaning = told_of(cls)[1].get(field.name, "")
    names = allowed(cls, field.name)
    default = json.dumps(factory().name)
    rows = (
        SettingRow(f"{field.name}.name", "text", names, default, meaning),
        SettingRow(f"{field.name}.*", "any", "", "", meanings["options"]),
    )
    return Section(field.name, text, rows)


def _settings(cls: type) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if field.init]


def _class_in(hint: Any) -> type | None:
    """The dataclass that a field holds, one or a list of them."""
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
    return inner if isinstance(inner, type) and dataclasses.is_dataclass(inner) else None


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

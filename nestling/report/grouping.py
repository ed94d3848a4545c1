"""Which runs are seeds of one setting: those that differ in nothing but the seed and in what does
not matter to a result. Other data are another setting, whatever their file is called."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nestling.report.folder import Run, mapping
from nestling.report.words import DASH
from nestling.runfiles import NO_MATTER, score_word

DATA, NETWORK, CODE = "data", "network", "code"
_PRINTS = (DATA, NETWORK, CODE)
"""What a fingerprint adds to a run's settings."""
_LONGEST = 48
_MOST_TOLD = 2


@dataclass(frozen=True)
class ComparedRun:
    """A run with its summary."""

    run: Run
    summary: Mapping[str, Any]

    @property
    def seed(self) -> int | None:
        """Its seed, where it is known."""
        found = self.summary.get("seed")
        return int(found) if isinstance(found, int) else None

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """What it was made of; empty in folders of earlier versions."""
        return mapping(self.run.federation, "fingerprint")

    @property
    def title(self) -> str:
        """Its method, as people call it."""
        known = self.summary.get("title") or self.summary.get("method") or self.run.name
        return str(known)


@dataclass(frozen=True)
class Setting:
    """One method with one configuration, and a run of it for each seed."""

    label: str
    entries: list[ComparedRun]

    @property
    def shape(self) -> dict[str, str]:
        """Its configuration (see `shape_of`)."""
        return shape_of(self.entries[0])

    @property
    def word(self) -> str:
        """What ranks its models, in a word."""
        return score_word(self.entries[0].summary)


def settings_of(entries: Sequence[ComparedRun]) -> list[Setting]:
    """The entries by method and configuration, seeds aside. A seed that comes twice counts once: a
    copy adds no certainty."""
    found: dict[str, list[ComparedRun]] = {}
    for entry in entries:
        same = found.setdefault(_identity(entry), [])
        if entry.seed is None or entry.seed not in [other.seed for other in same]:
            same.append(entry)
    groups = list(found.values())
    return [Setting(label, group) for label, group in zip(_labels(groups), groups, strict=True)]


def shape_of(entry: ComparedRun) -> dict[str, str]:
    """The configuration as one level of dotted names, less what must not tell two runs apart, with
    what the fingerprint says of data, network and the code of a method of one's own."""
    config = entry.run.config or {"rounds": entry.summary.get("rounds")}
    named = {
        name: value
        for name, value in _flat(config)
        if not any(covers(word, name) for word in NO_MATTER)
    }
    prints = {
        name: mapping(entry.fingerprint, part).get("code")
        for name, part in ((NETWORK, "network"), (CODE, "method"))
    }
    return {**named, DATA: _data(entry), **{n: str(code) for n, code in prints.items() if code}}


def covers(word: str, name: str) -> bool:
    """Whether a dotted name is a field or what stands below it."""
    return name == word or name.startswith(f"{word}.")


def same_method(settings: Iterable[Setting]) -> bool:
    """Whether all of them are one method with one set of options."""
    own = [
        {name: value for name, value in setting.shape.items() if covers("method", name)}
        for setting in settings
    ]
    return all(options == own[0] for options in own)


def differing(settings: Sequence[Setting]) -> list[str]:
    """The names under which the settings do not all say the same, in order."""
    return _differing([setting.shape for setting in settings])


def common_word(settings: Iterable[Setting]) -> str:
    """The word for what ranks the models of all settings; "score" where they learn different
    things."""
    words = {setting.word for setting in settings}
    return words.pop() if len(words) == 1 else "score"


def left_out(entries: Sequence[ComparedRun], settings: Sequence[Setting]) -> list[ComparedRun]:
    """The runs that no setting counts, since they repeat a seed of theirs."""
    counted = {id(entry) for setting in settings for entry in setting.entries}
    return [entry for entry in entries if id(entry) not in counted]


def data_words(entry: ComparedRun) -> str:
    """A run's data as people would name them, with the start of their fingerprint."""
    data = entry.run.config.get("data")
    path = data.get("path") if isinstance(data, Mapping) else None
    name = Path(str(path)).name if path else str(entry.summary.get("data") or DASH)
    prints = mapping(entry.fingerprint, "data")
    return f"{name} #{_short(prints)}" if prints else name


def shortened(value: str) -> str:
    """A value of a configuration in the width of a label."""
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 1]}…"


def _identity(entry: ComparedRun) -> str:
    facts = [entry.summary.get(key) for key in ("method", "data", "model")]
    return json.dumps([*facts, shape_of(entry)], sort_keys=True, default=str)


def _data(entry: ComparedRun) -> str:
    """What the data are known by: their fingerprint or, where there is none, their path."""
    prints = mapping(entry.fingerprint, "data")
    if prints:
        return json.dumps(prints, sort_keys=True)
    data = entry.run.config.get("data")
    path = data.get("path") if isinstance(data, Mapping) else ""
    return f"no fingerprint {path or ''}".strip()


def _short(prints: Mapping[str, Any]) -> str:
    """Few letters that stand for all parts of a data set's fingerprint."""
    return "".join(str(prints.get(part, ""))[:2] for part in ("rows", "labels", "test"))


def _flat(config: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    """Nested tables as pairs of a dotted name and a value. A list of tables that have names, such
    as a fleet's tiers, is the list of those names, and a table for each."""
    found: list[tuple[str, str]] = []
    for key, value in config.items():
        if tables := _by_name(value):
            found.append((f"{above}{key}", ", ".join(tables)))
            value = tables
        if isinstance(value, dict):
            found += _flat(value, f"{above}{key}.")
        else:
            found.append((f"{above}{key}", str(value)))
    return found


def _by_name(value: object) -> dict[str, dict[str, Any]]:
    """The tables of a list, less their names, by these; nothing where they have none."""
    tables = value if isinstance(value, list) else []
    named = [one for one in tables if isinstance(one, dict) and isinstance(one.get("name"), str)]
    found = {one["name"]: {k: v for k, v in one.items() if k != "name"} for one in named}
    return found if len(found) == len(tables) else {}


def _differing(shapes: Sequence[Mapping[str, str]]) -> list[str]:
    """The names that not all shapes know, or not with one value; of a table that only some have,
    such as one more tier, the list that names it says enough."""
    names = sorted({name for shape in shapes for name in shape})
    found = [name for name in names if len({shape.get(name) for shape in shapes}) > 1]
    everywhere = {name for name in found if all(name in shape for shape in shapes)}
    lists = everywhere.difference(_PRINTS)
    return [
        name
        for name in found
        if name in everywhere or not any(covers(other, name) for other in lists)
    ]


def _labels(groups: Sequence[list[ComparedRun]]) -> list[str]:
    """The method's title; where two settings share it, with what sets them apart."""
    titles = [group[0].title for group in groups]
    shapes = [shape_of(group[0]) for group in groups]
    labels = []
    for group, title, shape in zip(groups, titles, shapes, strict=True):
        rivals = [other for name, other in zip(titles, shapes, strict=True) if name == title]
        told = [f"{key} = {_told(key, shape, group[0])}" for key in _telling(shape, rivals)]
        labels.append(title + (f" ({', '.join(told)})" if told else ""))
    clash = Counter(labels)
    return [
        label if clash[label] == 1 else f"{label} #{labels[:index].count(label) + 1}"
        for index, label in enumerate(labels)
    ]


def _telling(shape: Mapping[str, str], rivals: Sequence[Mapping[str, str]]) -> list[str]:
    """The fewest names that tell a shape from its rivals, two at most: those that set it apart from
    most of them, and rather a field than a fingerprint."""
    alike = [keys for other in rivals if (keys := set(_differing([other, shape])))]
    found: list[str] = []
    while alike and len(found) < _MOST_TOLD:
        counts = Counter(key for keys in alike for key in keys)
        found.append(min(counts, key=lambda key: (-counts[key], key in _PRINTS, key)))
        alike = [keys for keys in alike if found[-1] not in keys]
    return sorted(found)


def _told(key: str, shape: Mapping[str, str], entry: ComparedRun) -> str:
    if key == DATA:
        return data_words(entry)
    return shortened(shape.get(key, DASH))

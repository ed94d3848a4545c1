"""In what runs differ beside what is compared: a table shows a method's merit only where nothing
else differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from nestling.fair import unfair
from nestling.report.folder import mapping
from nestling.report.grouping import (
    CODE,
    DATA,
    NETWORK,
    ComparedRun,
    Setting,
    covers,
    data_words,
    differing,
    left_out,
    same_method,
    shortened,
)
from nestling.report.words import DASH, number, plural
from nestling.report.words import whole as whole_number

METHOD = "method"
_MOST = 4


def studied(settings: Sequence[Setting], by: Sequence[str] = ()) -> tuple[str, ...]:
    """What is compared: what the user says, else the method where there are several, else the one
    field that differs; nothing where several do."""
    if by:
        return tuple(by)
    if not same_method(settings):
        return (METHOD,)
    others = [name for name in differing(settings) if name not in (DATA, NETWORK, CODE)]
    return (others[0],) if len(others) == 1 else ()


def differences(
    entries: Sequence[ComparedRun], settings: Sequence[Setting], by: Sequence[str] = ()
) -> list[str]:
    """Every difference between runs, which make up the settings, that is not the one under study,
    and what cannot be known, in sentences."""
    return [
        *_data_differences(settings, by),
        *_score_differences(settings),
        *_field_differences(settings, by),
        *(() if CODE in by else _code_differences(settings)),
        *_drawn_differences(settings),
        *_seed_differences(settings),
        *_repeated(entries, settings),
        *_unfinished(entries),
        *_versions(entries),
        *_without_fingerprint(entries),
        *unfair(_words(entries, "group"), _words(entries, "norm")),
    ]


def _data_differences(settings: Sequence[Setting], by: Sequence[str]) -> list[str]:
    known = [s for s in settings if mapping(s.entries[0].fingerprint, "data")]
    names = _by_value(known, lambda setting: setting.shape[DATA])
    said = _by_value(settings, lambda s: str(s.entries[0].summary.get("data") or DASH))
    paths = _by_value([s for s in settings if s not in known], lambda setting: setting.shape[DATA])
    if len(names) < 2 and len(said) < 2 and len(paths) < 2:
        return []
    if any(covers(DATA, word) for word in by):
        return []
    groups = names if len(names) > 1 else said if len(said) > 1 else paths
    words = [
        f"{data_words(group[0].entries[0])} ({_listed(s.label for s in group)})"
        for group in groups.values()
    ]
    parts = _data_parts(known)
    which = f" Not the same: {', '.join(parts)}." if parts else ""
    return [
        f"DIFFERENT DATA: {', '.join(words)}. They are no seeds of one setting, and their "
        f"scores are of different tests.{which}"
    ]


def _score_differences(settings: Sequence[Setting]) -> list[str]:
    groups = _by_value(settings, lambda setting: setting.word)
    if len(groups) < 2:
        return []
    said = [f"{word} ({_listed(s.label for s in group)})" for word, group in groups.items()]
    return [f"DIFFERENT SCORES: {', '.join(said)}. They are not ranked against each other."]


def _data_parts(settings: Sequence[Setting]) -> list[str]:
    prints = [mapping(setting.entries[0].fingerprint, "data") for setting in settings]
    words = {"rows": "training rows", "labels": "labels", "test": "test rows"}
    return [
        word for part, word in words.items() if len({str(found.get(part)) for found in prints}) > 1
    ]


def _field_differences(settings: Sequence[Setting], by: Sequence[str]) -> list[str]:
    found = []
    hidden = (*studied(settings, by), DATA, "data.name", CODE)
    for name in differing(settings):
        if any(covers(word, name) for word in hidden):
            continue
        if name == NETWORK:
            if not any(covers("model", other) for other in differing(settings)):
                found.append(_not_the_same("The networks", "in code or shape", settings, NETWORK))
            continue
        values = _by_value(settings, lambda setting, name=name: setting.shape.get(name, DASH))  # type: ignore[misc]
        told = [
            f"{shortened(value)} ({_listed(s.label for s in group)})"
            for value, group in values.items()
        ]
        found.append(f"{name} differs: {', '.join(told)}.")
    return found


def _code_differences(settings: Sequence[Setting]) -> list[str]:
    """Methods of one's own that have one name and not the same code."""
    found = []
    for name, group in _by_value(settings, lambda s: s.shape.get("method.name", DASH)).items():
        if len({setting.shape.get(CODE) for setting in group}) > 1:
            found.append(_not_the_same(f"The methods {name}", "in code", group, CODE))
    return found


def _not_the_same(what: str, how: str, settings: Sequence[Setting], name: str) -> str:
    """Says which settings have which digest; digests of several forms tell nothing."""
    groups = _by_value(settings, lambda setting: setting.shape.get(name, DASH))
    said = " / ".join(_listed(s.label for s in group) for group in groups.values())
    if len({str(setting.entries[0].fingerprint.get("form")) for setting in settings}) > 1:
        return (
            f"{what} may not be the same {how}: {said} have fingerprints of different versions, "
            "which cannot be compared."
        )
    return f"{what} are not the same {how}: {said}."


def _drawn_differences(settings: Sequence[Setting]) -> list[str]:
    """What the same seed should have made the same for all, and what no field explains: splits,
    and the first weights of networks that are the same."""
    found = []
    explained = [n for n in differing(settings) if covers("split", n) or covers("fleet", n)]
    looks: tuple[tuple[str, Callable[[ComparedRun], str | None]], ...] = (
        ("the split of the rows over the clients", _split_print),
        ("the networks' first weights", _weights_print),
    )
    for what, look in looks:
        if look is _split_print and explained:
            continue
        by_seed: dict[tuple[int | None, str], set[str]] = {}
        for setting in settings:
            for entry in setting.entries:
                if (value := look(entry)) is not None:
                    kind = setting.shape[DATA]
                    if look is _weights_print:
                        kind = setting.shape.get(NETWORK, "")
                    by_seed.setdefault((entry.seed, kind), set()).add(value)
        if any(len(values) > 1 for values in by_seed.values()):
            found.append(f"At the same seed {what} are not the same: no pairs, strictly.")
    return found


def _split_print(entry: ComparedRun) -> str | None:
    found = entry.fingerprint.get("split")
    return None if found is None else str(found)


def _weights_print(entry: ComparedRun) -> str | None:
    found = mapping(entry.fingerprint, "network").get("weights")
    return None if found is None else str(found)


def _seed_differences(settings: Sequence[Setting]) -> list[str]:
    groups = _by_value(
        settings,
        lambda s: ", ".join(
            str(seed) for seed in sorted(e.seed for e in s.entries if e.seed is not None)
        ),
    )
    if len(groups) < 2:
        return []
    said = [f"{seeds or 'none'} ({_listed(s.label for s in g)})" for seeds, g in groups.items()]
    return [f"The seeds differ: {'; '.join(said)}. Only those in common are compared in pairs."]


def _repeated(entries: Sequence[ComparedRun], settings: Sequence[Setting]) -> list[str]:
    again = left_out(entries, settings)
    if not again:
        return []
    names = Counter(entry.run.name for entry in entries)
    said = [e.run.name if names[e.run.name] == 1 else str(e.run.folder) for e in again]
    repeat, are = ("repeats", "is") if len(again) == 1 else ("repeat", "are")
    return [f"{_listed(said)} {repeat} a seed of the same setting and {are} left out of the means."]


def _unfinished(entries: Sequence[ComparedRun]) -> list[str]:
    found = []
    for entry in entries:
        done, wanted = (number(entry.summary.get(key)) for key in ("rounds_done", "rounds"))
        if done is not None and wanted is not None and done < wanted:
            found.append(
                f"{entry.run.name} is not finished: {whole_number(done)} of "
                f"{plural(wanted, 'round')}."
            )
    return found


def _versions(entries: Sequence[ComparedRun]) -> list[str]:
    known = {str(c)[:10] for e in entries if (c := e.run.federation.get("commit"))}
    made = {str(v) for e in entries if (v := e.fingerprint.get("nestling"))}
    if len(known) < 2 and len(made) < 2:
        return []
    what = " and ".join(sorted(made if len(made) > 1 else known))
    return [f"The runs were made by different versions of Nestling: {what}."]


def _without_fingerprint(entries: Sequence[ComparedRun]) -> list[str]:
    bare = [entry for entry in entries if not entry.fingerprint]
    if not bare:
        return []
    have = "has no fingerprint" if len(bare) == 1 else "have no fingerprints"
    return [
        f"{_listed(entry.run.name for entry in bare)} {have} (made by an earlier version): whether "
        "the data, the split and the networks are the same is not known."
    ]


def _by_value(
    settings: Sequence[Setting], value: Callable[[Setting], str]
) -> dict[str, list[Setting]]:
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        groups.setdefault(value(setting), []).append(setting)
    return groups


def _listed(words: Iterable[str]) -> str:
    known = list(words)
    more = f" and {len(known) - _MOST} more" if len(known) > _MOST else ""
    return ", ".join(known[:_MOST]) + more


def _words(entries: Sequence[ComparedRun], key: str) -> list[str]:
    return list(
        dict.fromkeys(
            str(entry.summary[key]) for entry in entries if entry.summary.get(key) is not None
        )
    )

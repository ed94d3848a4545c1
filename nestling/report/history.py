"""What each client did in each round, from a run's lines: how much it trained, and what became of
its reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nestling.report.folder import Run, listed, mapping
from nestling.report.words import number, percent, plural

MARKS = ("refused", "dropped", "late", "clipped", "smaller")
"""What may be said of a client in a round, the worst first; the first three did not count."""
_LOST = MARKS[:3]
_MOST_REASONS, _REASON_LETTERS = 2000, 70

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """A client in one round: what share of the whole model it trained or was to train, and, if
    anything is to be said of it, what and why."""

    share: float
    mark: str = ""
    why: str = ""


@dataclass(frozen=True)
class HistoryCell:
    """A client in some rounds: the mean share of those of its replies that counted (None: none
    did), the worst mark, and all of it in words."""

    share: float | None
    mark: str
    text: str


def turns_of(run: Run) -> dict[tuple[int, int], Turn]:
    """By (client, index of the round), everybody who was chosen."""
    rest = _at_rest(run)
    whole = number(mapping(run.federation, "model").get("params"))
    whole = whole or max([*rest.values(), *_sizes_ever(run), 1])
    found: dict[tuple[int, int], Turn] = {}
    told = 0
    for at, record in enumerate(run.metrics):
        marks = _marks(record)
        for client, size in _chosen(record):
            usual = rest.get(client)
            trained = size if size is not None else usual if usual is not None else whole
            mark, why = marks.get(client, ("", ""))
            if not mark and usual is not None and trained < usual:
                mark = "smaller"
            told += bool(why)
            found[client, at] = Turn(trained / whole, mark, why if told <= _MOST_REASONS else "")
    return found


def binned(turns: Sequence[Turn]) -> HistoryCell:
    """Some rounds of one client as one cell."""
    counted = [turn.share for turn in turns if turn.mark not in _LOST]
    share = sum(counted) / len(counted) if counted else None
    marks = [turn.mark for turn in turns if turn.mark]
    worst = min(marks, key=MARKS.index, default="")
    if len(turns) == 1:
        return HistoryCell(share, worst, _one(turns[0]))
    words = [f"{percent(share)} of the model; {plural(len(turns), 'time')}"] if counted else []
    words += [f"{_WORDS[mark]} {marks.count(mark)}×" for mark in MARKS if mark in marks]
    words += [f"last: {why}" for why in [turn.why for turn in turns if turn.why][-1:]]
    return HistoryCell(share, worst, "; ".join(words))


_WORDS = {
    "refused": "refused",
    "dropped": "dropped out",
    "late": "too late",
    "clipped": "clipped",
    "smaller": "less than at rest",
}


def mark_words(mark: str) -> str:
    """A mark as it is written."""
    return _WORDS[mark]


def _one(turn: Turn) -> str:
    words = f"{percent(turn.share)} of the model"
    words += f"; {_WORDS[turn.mark]}" if turn.mark else ""
    return f"{words}: {turn.why}" if turn.why else words


def _at_rest(run: Run) -> dict[int, float]:
    """How many parameters each client trains when nothing else uses its memory."""
    tiers = {
        str(tier.get("name")): size
        for tier in listed(run.federation, "tiers")
        if (size := number(tier.get("params"))) is not None and size > 0
    }
    clients = listed(mapping(run.federation, "split"), "clients")
    known = ((_client(entry.get("id")), tiers.get(str(entry.get("tier")))) for entry in clients)
    return {client: size for client, size in known if client is not None and size is not None}


def _sizes_ever(run: Run) -> list[float]:
    return [size for record in run.metrics for _, size in _chosen(record) if size is not None]


def _chosen(record: Row) -> list[tuple[int, float | None]]:
    """Who was chosen in a round, and how much each trained, where the round says it."""
    clients, sizes = record.get("clients"), record.get("trained")
    clients = clients if isinstance(clients, list) else []
    sizes = (
        sizes if isinstance(sizes, list) and len(sizes) == len(clients) else [None] * len(clients)
    )
    pairs = ((_client(client), number(size)) for client, size in zip(clients, sizes, strict=True))
    return [(c, size if size is None or size > 0 else None) for c, size in pairs if c is not None]


def _marks(record: Row) -> dict[int, tuple[str, str]]:
    """What is said of clients in a round, the worst of each."""
    found: dict[int, tuple[str, str]] = {}
    for mark, key in (("clipped", "clipped"), ("late", "late_clients"), ("dropped", "missed")):
        told = record.get(key)
        for entry in told if isinstance(told, list) else []:
            _put(found, mark, entry)
    for entry in listed(record, "refusals"):
        _put(found, "refused", entry)
    return found


def _put(found: dict[int, tuple[str, str]], mark: str, entry: object) -> None:
    block = entry if isinstance(entry, dict) else {"client": entry}
    client = _client(block.get("client"))
    if client is not None:
        found[client] = (mark, str(block.get("reason") or "")[:_REASON_LETTERS])


def _client(told: object) -> int | None:
    found = number(told)
    return None if found is None else int(found)

"""What each client did in each round, from a run's lines: how much its tier trains, and what became
of its reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nestling.report.folder import Run, listed, mapping
from nestling.report.words import number, percent, plural

MARKS = ("refused", "dropped", "late", "clipped")
"""What may be said of a client in a round, the worst first; the first three did not count."""
_LOST = MARKS[:3]
_MOST_REASONS, _REASON_LETTERS = 2000, 70

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """A client in one round: what share of the whole model its tier trains, and, if anything is to
    be said of it, what and why."""

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
    whole = whole or max([*rest.values(), 1])
    found: dict[tuple[int, int], Turn] = {}
    told = 0
    for at, record in enumerate(run.metrics):
        marks = _marks(record)
        for client in _chosen(record):
            mark, why = marks.get(client, ("", ""))
            told += bool(why)
            share = rest.get(client, whole) / whole
            found[client, at] = Turn(share, mark, why if told <= _MOST_REASONS else "")
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


def _chosen(record: Row) -> list[int]:
    """Who was chosen in a round."""
    clients = record.get("clients")
    known = map(_client, clients if isinstance(clients, list) else [])
    return [client for client in known if client is not None]


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

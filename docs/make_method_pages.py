"""Writes docs/methods: one page a method, made from its docstring, its settings and its measured row.

python docs/make_method_pages.py [FOLDER]
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nestling.fair import GROUPS
from nestling.methods import METHODS, Method, method_class
from nestling.methods.part import Part
from nestling.settings import allowed, default_words, told_of

HERE = Path(__file__).resolve().parent / "methods"
FIELDS = ("Idea:", "Loss:", "Travels:", "Merge:", "Differs")


def main(folder: Path) -> None:
    """Writes every page and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    measured, floors = (
        json.loads(path.read_text()) if path.exists() else {}
        for path in (HERE / "measured.json", HERE / "floors.json")
    )
    for name in METHODS:
        (folder / f"{name}.md").write_text(
            page(name, method_class(name), measured.get(name), floors.get(name, []))
        )
    (folder / "README.md").write_text(index())


def page(
    name: str, method: type[Method], row: dict[str, Any] | None, floors: list[dict[str, Any]]
) -> str:
    """The page of one method."""
    info = method.info
    facts = {
        "family": info.family,
        "what may differ": info.heterogeneity,
        "tasks": "any" if info.any_task else "classification",
        "extra data": info.auxiliary,
        "global model": "yes" if info.global_model else "no",
        **({} if _own_messages(method) else {"messages": _messages(method)}),
        "paper": info.paper,
        "evidence": info.evidence,
        "compared with": f"group {info.group}: {GROUPS[info.group].title}"
        if info.group
        else "every group",
    }
    parts = [f"# {info.title}", "", *(f"- **{key}**: {value}" for key, value in facts.items()), ""]
    told, meanings = told_of(method, FIELDS)
    parts += [told, "", "## Settings", "", *_settings(method, meanings), ""]
    parts += [
        "```sh",
        f"nestling run --set method.name={name}",
        "```",
        "",
        "## Measured",
        "",
        _measured(row, floors),
        "",
    ]
    return "\n".join(parts)


def _own_messages(method: type[Method]) -> bool:
    """Whether a method makes its messages otherwise than from its parts."""
    return method.send is not Method.send or method.reply is not Method.reply


def _messages(method: type[Method]) -> str:
    """The parts of messages, and what replies say beside them."""
    down = [_part(part) for part in method.parts if part.down]
    up = [_part(part) for part in method.parts if part.up] + [
        f"`{fact.name}`" for fact in method.said
    ]
    return f"down {', '.join(down) or 'nothing'}; up {', '.join(up) or 'nothing'}"


def _part(part: Part) -> str:
    return f"`{part.name}`" + (" (where it is set so)" if part.when else "")


def index() -> str:
    """The page that lists all methods."""
    rows = [
        f"| [{method_class(n).info.title}]({n}.md) | `{n}` | {_cells(method_class(n))} |"
        for n in METHODS
    ]
    head = [
        "| method | name | family | what may differ | extra data | group | evidence |",
        "|---|---|---|---|---|---|---|",
    ]
    text = "Made by `python docs/make_method_pages.py` from the methods' own docstrings."
    return "\n".join(["# Methods", "", text, "", *head, *rows, "", *_groups(), ""])


def _groups() -> list[str]:
    lines = [
        f"- **{key}**, {group.title}. Equal must be: {group.equal}. Measured by {group.metric}."
        for key, group in GROUPS.items()
    ]
    return [
        "## What may be compared",
        "",
        "`nestling compare` says so when runs of different groups meet.",
        "",
        *lines,
    ]


def _cells(method: type[Method]) -> str:
    info = method.info
    return " | ".join(
        [info.family, info.heterogeneity, info.auxiliary, info.group or "all", info.evidence]
    )


def _settings(method: type[Method], meanings: dict[str, str]) -> list[str]:
    own = [f for f in dataclasses.fields(method) if f.init]  # type: ignore[arg-type]
    if not own:
        return ["None of its own."]
    rows = [
        f"| `method.{f.name}` | `{default_words(f)}` | {allowed(method, f.name)} | {meanings.get(f.name, '').replace('|', chr(92) + '|')} |"
        for f in own
    ]
    return ["| setting | default | allowed | |", "|---|---|---|---|", *rows]


def _measured(row: dict[str, Any] | None, floors: list[dict[str, Any]]) -> str:
    parts = []
    if row is not None:
        columns = ("network", *row["columns"])
        parts += [
            f"{row['setting']}: see [the results](../results.md).",
            "",
            *_table(columns, [[row["network"], row["cells"]]]),
        ]
    if floors:
        told = (
            "Beside its floor (the same clients, networks and local epochs without what it adds):"
        )
        verdict = (
            ""
            if any(line["clearly"] for line in floors)
            else " Nowhere by more than the seeds' spread: we could not make it pay."
        )
        cells = ("line", "data", "setting", "accuracy", "over", "by", "in how many seeds")
        parts += [
            *([""] if parts else []),
            f"{told} see [the results](../results.md).{verdict}",
            "",
        ]
        parts += _table(cells, [[str(line[cell]) for cell in cells] for line in floors])
    return "\n".join(parts) or "No measured row yet."


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(columns)} |",
        "|" + "---|" * len(columns),
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)

"""Writes docs/settings.md: every setting of an experiment and every option of a network, as
`nestling config` has them.

python docs/make_settings_page.py [FILE]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from nestling.sections import (
    TOP,
    Section,
    SettingRow,
    network_families,
    network_section,
    sections,
)

HERE = Path(__file__).resolve().parent / "settings.md"
HEAD = """# Settings

Every setting of an experiment, section by section. In a file a section is a table (`[split]`, then `alpha = 0.3`); on the command line
a setting is `--set split.alpha=0.3`; in Python a section is an object (`Experiment(split=SplitConfig(alpha=0.3))`). Whatever is left
out has its default, and what is not allowed is refused with its name. `nestling config` prints these sections, `nestling config split` one
of them, `nestling config method.heterofl` the settings of one method, which [its page](methods/README.md) has too, and
`nestling config model.mlp` the options of one network, which stand [below](#networks).

Made by `python docs/make_settings_page.py` from the types and docstrings of the settings themselves.
"""
NETWORKS = """## Networks

Options of the networks that are built in ([what they are for](networks.md), `nestling models`). They stand beside the network's name:
`[model]`, `name = "mlp"`, `hidden = [64, 64]`; `--set model.hidden=[64,64]`; `Named("mlp", {"hidden": [64, 64]})`; for a tier's own
network in `model_options`. `shape` and `classes` follow from the data and are never set. Networks that differ in their defaults alone
stand together.
"""


def main(file: Path) -> None:
    """Writes the page."""
    parts = [HEAD, *(chapter(section) for section in sections().values()), *networks()]
    file.write_text("\n".join(parts))


def chapter(section: Section) -> str:
    """The part of the page that one section has."""
    rows = [_row(row, f"`{row.default}`" if row.default else "") for row in section.rows]
    return _chapter(f"## {_title(section.name)}", section.text, rows)


def networks() -> list[str]:
    """The part of the page that networks have: what all of them take, then family by family."""
    everybody = {name: network_section(name) for family in network_families() for name in family}
    named = set.intersection(*({row.key for row in own.rows} for own in everybody.values()))
    common = {row.key: row for row in next(iter(everybody.values())).rows if row.key in named}
    parts = [NETWORKS, family_chapter("All of them", "", everybody, set(common))]
    for family in network_families():
        own = {name: everybody[name] for name in family}
        first = own[family[0]]
        title = ", ".join(f"`{name}`" for name in family)
        keys = {row.key for row in first.rows if not _same(row, common.get(row.key))}
        parts.append(family_chapter(title, first.text, own, keys))
    return parts


def _same(row: SettingRow, other: SettingRow | None) -> bool:
    """Whether two networks mean the same by an option, whatever its default."""
    return other is not None and (row.allowed, row.meaning) == (other.allowed, other.meaning)


def family_chapter(title: str, text: str, own: dict[str, Section], keys: set[str]) -> str:
    """The rows of some networks that have these keys, with the defaults of each."""
    first = next(iter(own.values()))
    rows = [_row(row, _defaults(row, own)) for row in first.rows if row.key in keys]
    return _chapter(f"### {title}", text, rows)


def _defaults(row: SettingRow, own: dict[str, Section]) -> str:
    """The default of each network that means the same by it, by name where they differ; one that
    most have stands alone."""
    found: dict[str, list[str]] = {}
    for name, section in own.items():
        other = next(one for one in section.rows if one.key == row.key)
        if _same(row, other):
            found.setdefault(other.default, []).append(name)
    most = max(found, key=lambda value: len(found[value]))
    alone = most if 2 * len(found[most]) > len(own) else None
    return ", ".join(
        f"`{value}`" if value == alone else f"`{value}` ({', '.join(names)})"
        for value, names in sorted(found.items(), key=lambda item: item[0] != alone)
    )


def _chapter(title: str, text: str, rows: list[str]) -> str:
    head = ["| setting | type | allowed | default | meaning |", "|---|---|---|---|---|"]
    told = [_linked(text), ""] if text else []
    return "\n".join([title, "", *told, *head, *rows, ""])


def _title(name: str) -> str:
    if name == TOP:
        return "The run itself"
    return f"`[[{name}]]`" if name == "fleet.tiers" else f"`[{name}]`"


def _row(row: SettingRow, default: str) -> str:
    cells = (f"`{row.key}`", row.type, row.allowed, default, _linked(row.meaning))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _linked(text: str) -> str:
    """Pages that are named become links, which the code has no use for."""
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)

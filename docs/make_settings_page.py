"""Writes docs/settings.md: every setting of an experiment, as `nestling config` has it.

python docs/make_settings_page.py [FILE]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from nestling.sections import TOP, Section, SettingRow, sections

HERE = Path(__file__).resolve().parent / "settings.md"
HEAD = """# Settings

Every setting of an experiment, section by section. In a file a section is a table (`[split]`, then `alpha = 0.3`); on the command line
a setting is `--set split.alpha=0.3`; in Python a section is an object (`Experiment(split=SplitConfig(alpha=0.3))`). Whatever is left
out has its default, and what is not allowed is refused with its name. `nestling config` prints this page, `nestling config split` one
section, `nestling config method.heterofl` the settings of one method, which [its page](methods/README.md) has too.

Made by `python docs/make_settings_page.py` from the types and docstrings of the settings themselves.
"""


def main(file: Path) -> None:
    """Writes the page."""
    parts = [HEAD, *(chapter(section) for section in sections().values())]
    file.write_text("\n".join(parts))


def chapter(section: Section) -> str:
    """The part of the page that one section has."""
    rows = [_row(row) for row in section.rows]
    head = ["| setting | type | allowed | default | meaning |", "|---|---|---|---|---|"]
    return "\n".join(
        [f"## {_title(section.name)}", "", _linked(section.text), "", *head, *rows, ""]
    )


def _title(name: str) -> str:
    if name == TOP:
        return "The run itself"
    return f"`[[{name}]]`" if name == "fleet.tiers" else f"`[{name}]`"


def _row(row: SettingRow) -> str:
    default = f"`{row.default}`" if row.default else ""
    cells = (f"`{row.key}`", row.type, row.allowed, default, _linked(row.meaning))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _linked(text: str) -> str:
    """Pages that are named become links, which the code has no use for."""
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)

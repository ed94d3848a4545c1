"""For the site: a list right below a line of text is a list there too, as it is on the repository's web view."""

from __future__ import annotations

from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page with an empty line in front of every list."""
    lines: list[str] = []
    fenced = False
    for line in markdown.splitlines():
        fenced ^= line.startswith("```")
        if not fenced and line.startswith(("- ", "* ")) and lines and _is_text(lines[-1]):
            lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _is_text(line: str) -> bool:
    """Whether a paragraph would go on below, and not a list, a table or a fence."""
    return bool(line.strip()) and not line.startswith((" ", "- ", "* ", "|", "```"))

"""Text of others, made safe to show and to log.

A client may say anything, and so may a file that somebody else made: codes that move the operator's
cursor, line ends that forge a line of the log, half characters that no file takes.
"""

from __future__ import annotations

MOST = 1000


def harmless(text: str, most: int = MOST) -> str:
    """The text on one line of at most `most` letters; what cannot be printed stands there as Python
    would write it, such as \\x1b."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def harmless_lines(text: str) -> str:
    """Text of several lines and any length, shown in the same way but for its line ends."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)

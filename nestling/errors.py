"""Errors written for the person who reads them.

`InputError` means the user can mend it (exit code 2): it names the field, says what is wrong and
how to put it right. Any other exception is our fault (exit code 1).
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable


class InputError(ValueError):
    """The user's input is wrong. `field` is the path of the offending field, `fix` what to do about
    it."""

    def __init__(self, message: str, *, field: str | None = None, fix: str | None = None) -> None:
        """Keeps message, field and fix apart, so that callers may say them in other places."""
        self.message, self.field, self.fix = message, field, fix
        super().__init__(message)

    def __str__(self) -> str:
        """The field, what is wrong with it, and the fix in brackets."""
        text = f"{self.field}: {self.message}" if self.field else self.message
        return f"{text} ({self.fix})" if self.fix else text

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles with field and fix, so that the error survives the way from a worker process."""
        return _rebuild, (self.message, self.field, self.fix)


def _rebuild(message: str, field: str | None, fix: str | None) -> InputError:
    return InputError(message, field=field, fix=fix)


def seen(value: object) -> str:
    """What was given, in a few words on one line: an array or a long list only as it begins."""
    return " ".join(reprlib.repr(value).split())


def unknown(
    kind: str, word: str, allowed: Iterable[str], *, field: str | None = None
) -> InputError:
    """An `InputError` for a word outside `allowed`: lists them and offers the nearest match."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(word), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InputError(
        f"unknown {kind} {word!r}", field=field, fix=f"{hint}allowed: {', '.join(names)}"
    )

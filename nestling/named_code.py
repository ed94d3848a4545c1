"""Code that an experiment names: "package.module:attribute", imported here and nowhere else.

Whoever writes an experiment may name code of their own. A run folder may come from anybody, and
reading it must run nothing of theirs: while one is opened, only names that the user trusts are
imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

from nestling.errors import InputError

_TRUSTED: ContextVar[frozenset[str] | None] = ContextVar("trusted", default=None)


@contextmanager
def only(names: Iterable[str]) -> Iterator[None]:
    """While the block lasts, code of other names than these is refused."""
    token = _TRUSTED.set(frozenset(names))
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def named_module(name: str, field: str) -> ModuleType:
    """The module of "package.module:attribute"; an `InputError` where the name is not trusted, and
    whatever the import raises."""
    trusted = _TRUSTED.get()
    if trusted is not None and name not in trusted:
        raise InputError(
            f"the run folder names code to import, {name!r}, and a folder is not trusted to",
            field=field,
            fix=f"if you know that code and want it to run: --trust {name}, in Python "
            f"trust=({name!r},)",
        )
    return importlib.import_module(name.partition(":")[0])

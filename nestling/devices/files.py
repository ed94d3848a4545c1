"""Reading a user's TOML file with errors that name the file, the line and the field."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nestling.errors import InputError, unknown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_toml(path: str | Path, field: str) -> dict[str, Any]:
    """The tables of a TOML file; a missing, unreadable or broken file is an `InputError` on `field`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"no such file: {path}", field=field, fix="check the path; it is relative to where you are") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}", field=field, fix="give a readable UTF-8 text file") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not valid TOML: {error}", field=field, fix="mend the line it names") from None


def check_keys(table: Mapping[str, Any], allowed: Iterable[str], field: str) -> None:
    """Refuse a key outside `allowed`, with the nearest one that exists."""
    known = list(allowed)
    for key in table:
        if key not in known:
            raise unknown("key", key, known, field=f"{field}.{key}" if field else key)

"""Rows from code of the user's own: `data.name = "package.module:callable"`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nestling.data.given import raw_rows
from nestling.data.recipe import RawRows
from nestling.errors import InputError
from nestling.named_code import named_module

_FORM = (
    'write "package.module:callable", where callable takes data.options and returns (x, y), a '
    "table with x and y, or a Dataset"
)


def call_rows(name: str, options: Mapping[str, Any]) -> RawRows:
    """Imports the callable, calls it with the options, and takes what comes back as rows."""
    try:
        found = getattr(named_module(name, "data.name"), name.partition(":")[2], None)
        if not callable(found):
            raise InputError(f"{name} is nothing to call", field="data.name", fix=_FORM)
        result = found(**options)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{name} raised {type(error).__name__}: {error}",
            field="data.name",
            fix="mend the callable, or data.options",
        ) from error
    return replace(_rows_of(result, name), where=name, field="data.name")


def _rows_of(result: Any, name: str) -> RawRows:
    own = getattr(result, "own", None)
    if isinstance(own, RawRows):  # what `Data.of` made
        return own
    keys = ("x", "y", "client", "test", "class_names")
    if isinstance(result, Mapping) and "x" in result and set(result) <= set(keys):
        more = {key: result[key] for key in keys[2:] if key in result}
        return raw_rows(result["x"], result.get("y"), **more)
    if isinstance(result, tuple):
        if len(result) not in (2, 3):
            raise InputError(f"{name} returned {len(result)} things", field="data.name", fix=_FORM)
        return raw_rows(*result[:2], client=result[2] if len(result) == 3 else None)
    return raw_rows(result)

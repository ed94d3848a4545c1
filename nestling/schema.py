"""Plain dataclasses from plain tables, checked field by field.

`from_table` refuses what it does not know and says where: the field's path, what it accepts, and
the nearest match. `to_table` is its inverse, so that a configuration written out reads back equal.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from nestling.errors import InputError, seen, unknown

T = TypeVar("T")


def from_table(cls: type[T], table: Mapping[str, Any], path: str = "") -> T:
    """An instance of dataclass `cls` from a table; `path` is where the table stands in the whole
    configuration."""
    if not isinstance(table, Mapping):
        raise InputError(
            f"expected a table of {cls.__name__} fields, got {seen(table)}", field=path or None
        )
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    values = {}
    for key, value in table.items():
        if key not in known:
            raise unknown("field", key, known, field=_join(path, key))
        values[key] = convert(hints[key], value, _join(path, key))
    return cls(**values)


def to_table(value: Any) -> Any:
    """Dataclasses, tuples and mappings as plain tables and lists; fields that are None are left
    out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init)
        return {name: to_table(v) for name, v in pairs if v is not None}
    if isinstance(value, Mapping):
        return {k: to_table(v) for k, v in value.items() if v is not None}
    return [to_table(v) for v in value] if isinstance(value, (list, tuple)) else value


def convert(hint: Any, value: Any, path: str) -> Any:
    """`value` as the type `hint` says, or an `InputError` that names `path`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(arguments, value, path)
    if origin is typing.Literal:
        if value not in arguments:
            raise unknown(
                path.rpartition(".")[2] or "value", value, map(str, arguments), field=path
            )
        return value
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else from_table(hint, value, path)
    if origin is tuple:
        return _convert_tuple(arguments, value, path)
    if origin in (dict, Mapping) or hint is dict:
        if not isinstance(value, Mapping):
            raise InputError(f"expected a table, got {seen(value)}", field=path)
        return dict(value)
    return _convert_plain(hint, value, path)


def _convert_union(arguments: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    error = None
    for choice in arguments:
        if choice is not type(None):
            try:
                return convert(choice, value, path)
            except InputError as e:
                error = error or e
    raise error or InputError(f"{value!r} is not allowed", field=path)


def one_or_more(given: Any, field: str, alone: tuple[type, ...] = (str,)) -> tuple[Any, ...]:
    """What a caller gave where a list is wanted; one thing of a type of `alone` stands for a list
    of it."""
    if isinstance(given, alone):
        return (given,)
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise InputError(f"expected a list, got {seen(given)}", field=field)
    return tuple(given)


def _convert_tuple(arguments: tuple[Any, ...], value: Any, path: str) -> Any:
    if not isinstance(value, (list, tuple)):
        items = {int: " of whole numbers", float: " of numbers", str: " of texts"}
        of = " of tables" if dataclasses.is_dataclass(arguments[0]) else items.get(arguments[0], "")
        raise InputError(f"expected a list{of}, got {seen(value)}", field=path)
    kinds = (
        [arguments[0]] * len(value)
        if len(arguments) == 2 and arguments[1] is Ellipsis
        else list(arguments)
    )
    if len(kinds) != len(value):
        raise InputError(f"expected {len(kinds)} values, got {len(value)}", field=path)
    return tuple(
        convert(kind, v, f"{path}[{i}]")
        for i, (kind, v) in enumerate(zip(kinds, value, strict=True))
    )


def _convert_plain(hint: Any, value: Any, path: str) -> Any:
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    value = _plain(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**1023 else math.inf
    # In Python a bool is an int; in a configuration that is a slip.
    if (
        hint not in wanted
        or not isinstance(value, hint)
        or (isinstance(value, bool) and hint is not bool)
    ):
        raise InputError(f"expected {wanted.get(hint, hint)}, got {seen(value)}", field=path)
    if hint is float and not math.isfinite(value):
        raise InputError(f"expected a finite number, got {value!r}", field=path)
    return value


def _plain(value: Any) -> Any:
    """What only Python has, as a file could say it: paths as texts, and numbers of numpy's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def check_keys(table: Mapping[str, Any], allowed: Iterable[str], field: str) -> None:
    """Refuse a key outside `allowed`, with the nearest one that exists."""
    known = list(allowed)
    for key in table:
        if key not in known:
            raise unknown("key", key, known, field=f"{field}.{key}" if field else key)


def require(condition: bool, message: str, field: str, fix: str | None = None) -> None:
    """`InputError` for `field` unless the condition holds."""
    if not condition:
        raise InputError(message, field=field, fix=fix)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key

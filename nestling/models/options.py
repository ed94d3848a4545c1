"""Check a model's options against its builder's signature, so that the signature is the only place
that names them."""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from nestling.errors import InputError, unknown

_GIVEN = ("shape", "classes")
_WORDS: dict[type, str] = {
    bool: "true or false",
    str: "a text",
    float: "a number",
    int: "a whole number",
}


def option_names(build: Callable[..., nn.Module]) -> list[str]:
    """The options a builder takes beside shape and classes."""
    return [name for name in inspect.signature(build).parameters if name not in _GIVEN]


def check_options(
    model: str, build: Callable[..., nn.Module], options: Mapping[str, object]
) -> dict[str, Any]:
    """`options` with every value in the type the builder declares, or an `InputError` that names
    the option."""
    allowed = option_names(build)
    for name in options:
        if name not in allowed:
            raise unknown(f"option of model {model!r}:", name, allowed, field=f"model.{name}")
    hints = typing.get_type_hints(build.func if isinstance(build, functools.partial) else build)
    return {name: _checked(f"model.{name}", value, hints[name]) for name, value in options.items()}


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """`shape` as a tuple of positive whole numbers."""
    if (
        not isinstance(shape, (tuple, list))
        or not shape
        or not all(_whole(size) and size > 0 for size in shape)
    ):
        fix = "give positive whole numbers, e.g. (1, 28, 28)"
        raise InputError(f"{shape!r} is not an input shape", field="model.shape", fix=fix)
    return tuple(shape)


def check_classes(classes: int) -> int:
    """`classes` as a positive whole number."""
    if not _whole(classes) or classes < 1:
        raise InputError(
            f"{classes!r} is not a number of classes",
            field="model.classes",
            fix="use a whole number, at least 1",
        )
    return classes


def _checked(field: str, value: object, hint: object) -> object:
    if typing.get_origin(hint) is tuple:
        return _checked_tuple(field, value, typing.get_args(hint))
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        return value
    if (
        hint is float
        and (_whole(value) or isinstance(value, float))
        and math.isfinite(typing.cast(float, value))
    ):
        return float(typing.cast(float, value))
    if hint is int and _whole(value):
        return _positive(field, typing.cast(int, value))
    wanted = _WORDS[typing.cast(type, hint)]
    raise InputError(f"{value!r} is not {wanted}", field=field, fix=f"use {wanted}")


def _checked_tuple(field: str, value: object, args: tuple[object, ...]) -> tuple[int, ...]:
    length = None if args[-1] is Ellipsis else len(args)
    wanted = "a list of whole numbers" if length is None else f"a list of {length} whole numbers"
    if (
        not isinstance(value, (list, tuple))
        or not all(map(_whole, value))
        or len(value) != (length or len(value))
    ):
        raise InputError(
            f"{value!r} is not {wanted}",
            field=field,
            fix=f"use {wanted}, e.g. {[16, 32, 64][:length]}",
        )
    return tuple(_positive(field, entry) for entry in value)


def _positive(field: str, value: int) -> int:
    if value < 1:
        raise InputError(f"{value} is too small", field=field, fix="use at least 1")
    return value


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

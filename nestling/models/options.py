"""A model's options, which its builder's signature and docstring name and nothing else: they are
checked against it, and told from it."""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from nestling.errors import InputError, unknown
from nestling.settings import told_in

_GIVEN = ("shape", "classes")
_WORDS: dict[type, str] = {
    bool: "true or false",
    str: "a text",
    float: "a number",
    int: "a whole number",
}
_EVERYWHERE = {
    "width": "the share of its hidden channels or units that every layer has, rounded up.",
    "norm": "what normalises: group (groups of four channels), batch (by the batch at hand, in "
    "tests too), sbn (the same, until it is given statistics once, after training), tracked "
    "(running statistics), per-width (running statistics for every width, which may be named), "
    "none.",
}
"""What options mean that every builder has."""


def function_of(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """The function behind a builder, which may only give it other defaults."""
    return build.func if isinstance(build, functools.partial) else build


def option_names(build: Callable[..., nn.Module]) -> list[str]:
    """The options a builder takes beside shape and classes."""
    return [name for name in inspect.signature(build).parameters if name not in _GIVEN]


def option_hints(build: Callable[..., nn.Module]) -> dict[str, Any]:
    """The type of every option, with what it allows."""
    hints = typing.get_type_hints(function_of(build), include_extras=True)
    return {name: hints[name] for name in option_names(build)}


def option_defaults(build: Callable[..., nn.Module]) -> dict[str, Any]:
    """The default of every option."""
    found = inspect.signature(build).parameters
    return {name: found[name].default for name in option_names(build)}


def told_of_options(build: Callable[..., nn.Module]) -> tuple[str, dict[str, str]]:
    """What a builder's docstring tells of its network, and what every option means."""
    text, own = told_in(function_of(build).__doc__ or "", option_names(build))
    return text, _EVERYWHERE | own


def check_options(
    model: str, build: Callable[..., nn.Module], options: Mapping[str, object]
) -> dict[str, Any]:
    """`options` with every value in the type the builder declares, or an `InputError` that names
    the option."""
    allowed = option_names(build)
    for name in options:
        if name not in allowed:
            raise unknown(f"option of model {model!r}:", name, allowed, field=f"model.{name}")
    hints = typing.get_type_hints(function_of(build))
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

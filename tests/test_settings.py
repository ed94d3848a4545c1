"""What settings may be is said in their types: it is checked for every method, in words that name
the field."""

from __future__ import annotations

import dataclasses
import typing
from typing import Annotated, Any, Literal

import pytest

from nestling.errors import InputError
from nestling.methods import METHODS, method_class
from nestling.settings import (
    Bounds,
    Count,
    NonZeroShare,
    OneOf,
    Positive,
    ShareBelowOne,
    allowed,
    check_settings,
)


@dataclasses.dataclass
class Some:
    """Settings of every kind."""

    rate: Positive = 1.0
    share: ShareBelowOne = 0.5
    rows: Count = 1
    way: Literal["mean", "sum"] = "mean"
    levels: tuple[NonZeroShare, ...] = (0.5, 1.0)
    warm: Annotated[float, Bounds(high=3.0)] = 0.0
    free: float = -5.0
    gate: Annotated[float, Bounds(1, open_low=True, zero="no gate")] = 0.0
    engine: Annotated[str, OneOf(("slow", "fast"), "engine")] = "slow"
    own: Annotated[str, OneOf(("one", "two"), more="module:name")] = "one"


def test_what_its_types_allow_is_allowed() -> None:
    check_settings(Some(), "some")
    check_settings(Some(1e-9, 0.0, 7, "sum", (), -100.0, 0.0, 1.5, "fast", "mine:net"), "some")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("rate", 0.0, "above 0"),
        ("share", 1.0, r"in \[0, 1\)"),
        ("rows", 0, "at least 1"),
        ("way", "meen", "did you mean 'mean'"),
        ("levels", (0.5, 0.0), r"in \(0, 1\]"),
        ("warm", 3.1, "at most 3"),
        ("rate", float("nan"), "above 0"),
        ("gate", 1.0, r"above 1 \(0: no gate\)"),
        ("engine", "fats", "unknown engine 'fats' .*did you mean 'fast'"),
    ],
)
def test_what_they_do_not_is_refused_by_name(field: str, value: Any, said: str) -> None:
    with pytest.raises(InputError, match=rf"some\.{field}.*{said}"):
        check_settings(dataclasses.replace(Some(), **{field: value}), "some")


def test_it_can_be_read() -> None:
    assert [allowed(Some, f.name) for f in dataclasses.fields(Some)] == [
        "above 0",
        "in [0, 1)",
        "at least 1",
        "mean, sum",
        "each in (0, 1]",
        "at most 3",
        "",
        "above 1 (0: no gate)",
        "slow, fast",
        "one, two, module:name",
    ]


def _outside(hint: Any) -> Any:
    """A value that a type does not allow, or None where it allows everything."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "nonsense"
    if origin is tuple:
        inner = _outside(arguments[0])
        return None if inner is None else (inner,)
    if origin is not Annotated:
        return None
    bounds = arguments[1]
    below = bounds.low is not None
    return arguments[0]((bounds.low if below else bounds.high) + (-1 if below else 1))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_refuses_what_its_settings_do_not_allow(name: str) -> None:
    cls = method_class(name)
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        value = _outside(hints[field.name]) if field.init else None
        if value is not None:
            with pytest.raises(InputError, match=rf"method\.{field.name}"):
                cls(**{field.name: value})

"""What a method's server keeps: fields that are marked so are checkpointed, taken back and restored without a line in the method."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nestling.views import State, Tensors
from nestling.views.flat import Packed, pack

_ALONE = "value"  # the name of a tensor or number that is a field by itself


def made() -> Any:
    """A field that `setup` makes and that follows from settings and what is kept."""
    return dataclasses.field(init=False, repr=False, compare=False)


def kept() -> Any:
    """A field that `setup` makes and the server keeps: a state, several states by name or in a list, a tensor, a number, a flag,
    or a dataclass of these."""
    return dataclasses.field(init=False, repr=False, compare=False, metadata={"kept": True})


def state_of(method: Any) -> dict[str, State]:
    """What is kept, by the names of its fields."""
    cls: type = type(method)
    return _join(_written(name, getattr(method, name)) for name in _kept(cls))


def put_back(method: Any, state: Mapping[str, State]) -> None:
    """Gives the fields back what `state_of` wrote of them."""
    cls: type = type(method)
    for name, hint in _kept(cls).items():
        setattr(method, name, _read(hint, name, state, getattr(method, name, None)))


@lru_cache(maxsize=256)
def _kept(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.metadata.get("kept")}


def _written(name: str, value: Any) -> dict[str, State]:
    if isinstance(value, Tensor | int | float):
        return {name: {_ALONE: value if isinstance(value, Tensor) else torch.tensor(value, dtype=_TYPES[type(value)])}}
    if isinstance(value, list):
        return {f"{name} {number}": state for number, state in enumerate(value)}
    if dataclasses.is_dataclass(value):
        return _join(_written(f"{name} {own.name}", getattr(value, own.name)) for own in dataclasses.fields(value))
    if isinstance(next(iter(value.values()), None), Mapping):
        return {f"{name} {key}": state for key, state in value.items()}
    return {name: value} if value else {}


def _join(parts: Iterable[dict[str, State]]) -> dict[str, State]:
    return {name: state for part in parts for name, state in part.items()}


_TYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


def _read(hint: Any, name: str, state: Mapping[str, State], now: Any) -> Any:
    if hint is Tensor:
        return state[name][_ALONE].to(now.device)
    if hint in _TYPES:
        return hint(state[name][_ALONE].item())
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = typing.get_type_hints(hint)
        return hint(
            **{f.name: _read(hints[f.name], f"{name} {f.name}", state, getattr(now, f.name)) for f in dataclasses.fields(hint)}
        )
    own = {key.removeprefix(f"{name} "): part for key, part in state.items() if key.startswith(f"{name} ")}
    if typing.get_origin(hint) is list:
        return [_like(own.get(str(number), {}), part) for number, part in enumerate(now)]
    if typing.get_args(hint)[1] is Tensor:
        return _like(state.get(name, {}), now)
    return {key: _like(part, now.get(key)) for key, part in own.items()}


def _like(state: Tensors, now: Any) -> State:
    """In one piece of memory where it was so, or where nothing was."""
    return pack(state) if now is None or isinstance(now, Packed) else dict(state)

"""Objects and code of one's own, spelled out as plain values: the same in every process for what
was written the same, so that a digest of them says whether it is the same object.

Plain values and containers are spelled as they are, objects by their attributes, functions and
classes by their source and by that of the functions, classes and CONSTANTS beside them that it
speaks of. Of anything else there is its kind: an address is another one tomorrow. What belongs to
torch, Python or Nestling is known by its name, since a newer version of it is no other object.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cached_property, partial
from numbers import Number
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

DEPTH = 8
"""How deep objects are looked into."""
MOST_VALUES, MOST_CODE = 20_000, 500
"""How much is looked at: whatever somebody's attribute leads to, a run begins in time."""

_TORCHS = frozenset(vars(nn.Module()))
"""What torch itself keeps in every module: weights, which are known apart, and hooks."""
_NAMED = frozenset((*sys.stdlib_module_names, "torch", "nestling")) - {"test"}
_NAMESPACES = (SimpleNamespace, argparse.Namespace)
_TEXTS = (Number, Enum, np.generic, bytes, range, slice, torch.dtype, np.dtype)
_NO_VALUES = ("__dict__", "__weakref__")
Code = type | FunctionType


class Speller:
    """Spells values, and gathers what belongs to them: `tensors`, whose shapes alone are spelled,
    and the code that they are made of. Parts of `network` are spelled by their names."""

    def __init__(self, network: nn.Module | None = None) -> None:
        """Nothing is gathered yet."""
        self.tensors: list[Tensor | np.ndarray] = []
        self._parts = {id(part): name for name, part in network.named_modules()} if network else {}
        self._code: list[list[Any]] = []
        self._met: dict[int, Code] = {}
        self._constants: set[tuple[str, str]] = set()
        self._open: set[int] = set()
        self._left = MOST_VALUES

    def spelled(self, value: Any, depth: int = DEPTH) -> Any:
        """A value as JSON can hold it."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        self._left -= 1
        if depth == 0 or self._left < 0 or id(value) in self._open:
            return _kind(value)
        self._open.add(id(value))
        try:
            return self._within(value, depth - 1)
        except Exception:  # somebody's object may raise whatever it likes when it is looked at
            return _kind(value)
        finally:
            self._open.remove(id(value))

    def attributes(self, part: nn.Module, depth: int = DEPTH) -> dict[str, Any]:
        """What a part of a network is beside its weights; of private attributes those that are
        neither torch's nor ours."""
        named = _known_by_name(type(part))
        return {
            name: self.spelled(value, depth)
            for name, value in vars(part).items()
            if name not in _TORCHS and not (named and name.startswith("_"))
        }

    def take(self, code: Code) -> None:
        """Gathers a class or a function with what it speaks of."""
        if id(code) in self._met or _known_by_name(code) or len(self._met) == MOST_CODE:
            return
        self._met[id(code)] = code
        self._code.append([code.__qualname__, source_of(code)])
        if isinstance(code, type):
            for base in code.__mro__[1:]:
                self.take(base)
        # a library stands for itself: what it calls within itself is its version's business
        if not _installed(code.__module__):
            for function in _functions(code):
                self._follow(function)

    def code(self) -> list[str]:
        """All code that was gathered, in an order that does not depend on how it was met."""
        return sorted(json.dumps(piece, sort_keys=True) for piece in self._code)

    def _within(self, value: Any, depth: int) -> Any:
        if isinstance(value, (Tensor, np.ndarray)):
            return self._array(value, depth)
        if isinstance(value, nn.Module):
            return self._module(value, depth)
        if isinstance(value, _TEXTS):
            return str(value)
        if isinstance(value, Mapping):
            return {self._key(k, depth): self.spelled(inner, depth) for k, inner in value.items()}
        if isinstance(value, (list, tuple, deque)):
            return [self.spelled(inner, depth) for inner in value]
        if isinstance(value, (set, frozenset)):
            known = len(self.tensors)
            found = sorted(self._key(inner, depth) for inner in value)
            del self.tensors[known:]  # they came in no order
            return found
        if callable(value) and not _is_object(value):
            return self._callable(value, depth)
        return self._object(value, depth)

    def _array(self, value: Tensor | np.ndarray, depth: int) -> Any:
        if isinstance(value, np.ndarray) and value.dtype.kind not in "biuf":
            return self.spelled(value.tolist(), depth)
        # parameters are weights, wherever else a network keeps them
        if not isinstance(value, nn.Parameter) and _has_bytes(value):
            self.tensors.append(value)
        return [type(value).__qualname__, list(value.shape), str(value.dtype)]

    def _module(self, module: nn.Module, depth: int) -> Any:
        if id(module) in self._parts:
            return ["part", self._parts[id(module)]]
        found = []
        for name, part in module.named_modules():
            self.take(type(part))
            found.append([name, type(part).__qualname__, self.attributes(part, depth)])
        return [found, [[name, list(t.shape)] for name, t in module.state_dict().items()]]

    def _key(self, value: Any, depth: int) -> str:
        plain = value is None or isinstance(value, (bool, int, float, str))
        return str(value) if plain else json.dumps(self.spelled(value, depth), sort_keys=True)

    def _callable(self, value: Any, depth: int) -> Any:
        if isinstance(value, partial):
            return ["partial", *(self.spelled(v, depth) for v in _inside_partial(value))]
        if isinstance(value, MethodType):
            return [self.spelled(value.__func__, depth), self.spelled(value.__self__, depth)]
        if isinstance(value, FunctionType) and not _known_by_name(value):
            self.take(value)
            cells = [self.spelled(_enclosed(cell), depth) for cell in value.__closure__ or ()]
            return [_kind(value), cells, self.spelled(value.__defaults__, depth)]
        if isinstance(value, type):
            self.take(value)
        wrapped = getattr(value, "__wrapped__", None)  # as what remembers its results has it
        return self.spelled(wrapped, depth) if isinstance(wrapped, FunctionType) else _kind(value)

    def _object(self, value: Any, depth: int) -> Any:
        kind = type(value)
        inside: dict[str, Any] = {}
        if dataclasses.is_dataclass(value):
            inside = {one.name: getattr(value, one.name, None) for one in dataclasses.fields(value)}
        if isinstance(value, _NAMESPACES) or not _known_by_name(kind):
            inside |= getattr(value, "__dict__", {}) | _in_slots(value)
        self.take(kind)
        attributes = {name: self.spelled(v, depth) for name, v in inside.items()}
        return [kind.__qualname__, str(getattr(value, "__name__", "")), attributes]

    def _follow(self, function: FunctionType) -> None:
        """Takes what a function's code speaks of and what lies beside it."""
        home, here = function.__globals__, str(function.__globals__.get("__name__"))
        names = sorted(_names(function.__code__))
        for name in names:
            value = home.get(name)
            if isinstance(value, ModuleType) and _beside(value.__name__, here):
                for inner in (vars(value).get(other) for other in names):
                    if isinstance(inner, (type, FunctionType)) and _beside(inner.__module__, here):
                        self.take(inner)
            elif isinstance(value, (type, FunctionType)):
                if _beside(value.__module__, here):
                    self.take(value)
            elif name.isupper() and name in home and (here, name) not in self._constants:
                self._constants.add((here, name))
                self._code.append([name, self.spelled(value)])


def source_of(code: Code) -> Any:
    """The source of a class or function; of what has no file, such as a cell of a notebook, what
    Python made of it."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError, SyntaxError):
        return [[one.__qualname__, _compiled(one.__code__)] for one in _functions(code)]


def _compiled(code: CodeType) -> list[Any]:
    constants = [
        _compiled(c) if isinstance(c, CodeType) else repr(c) if isinstance(c, _PLAIN) else _kind(c)
        for c in code.co_consts
    ]
    return [code.co_code.hex(), list(code.co_names), constants]


_PLAIN = (bool, int, float, str, bytes, type(None))


def _names(code: CodeType) -> set[str]:
    """Every name that code, and the code within it, reads from outside."""
    inner = [_names(c) for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*inner)


def _functions(code: Code) -> Iterator[FunctionType]:
    """A function itself; of a class, all that are written in it."""
    for value in vars(code).values() if isinstance(code, type) else (code,):
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, cached_property):
            value = value.func
        for one in (value.fget, value.fset) if isinstance(value, property) else (value,):
            found = inspect.unwrap(one) if isinstance(one, FunctionType) else None
            if isinstance(found, FunctionType):
                yield found


def _inside_partial(value: partial[Any]) -> tuple[Any, ...]:
    return value.func, value.args, value.keywords


def _enclosed(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not there yet
        return None


def _in_slots(value: Any) -> dict[str, Any]:
    found = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [n for slots in found for n in ((slots,) if isinstance(slots, str) else slots)]
    return {name: getattr(value, name, None) for name in names if name not in _NO_VALUES}


def _is_object(value: Any) -> bool:
    """Whether something that can be called is an object with a class of somebody's own."""
    kinds = (type, FunctionType, MethodType, partial)
    return not isinstance(value, kinds) and not _known_by_name(type(value))


def _has_bytes(value: Tensor | np.ndarray) -> bool:
    if isinstance(value, np.ndarray):
        return True
    return value.layout == torch.strided and not value.is_meta and not value.is_quantized


def _kind(value: Any) -> str:
    own = getattr(value, "__qualname__", None)
    return own if isinstance(own, str) else type(value).__qualname__


def _known_by_name(code: Any) -> bool:
    return str(getattr(code, "__module__", None) or "builtins").partition(".")[0] in _NAMED


def _beside(module: str | None, other: str) -> bool:
    """Whether two modules are of one package, or lie in one folder."""
    if module is None or module.partition(".")[0] in _NAMED:
        return False
    if module.partition(".")[0] == other.partition(".")[0]:
        return True
    places = [_file(name).rpartition("/")[0] for name in (module, other)]
    return bool(places[0]) and places[0] == places[1]


def _installed(module: str) -> bool:
    return any(f"/{folder}/" in _file(module) for folder in ("site-packages", "dist-packages"))


def _file(module: str) -> str:
    found = getattr(sys.modules.get(module), "__file__", None)
    return str(found or "").replace("\\", "/")

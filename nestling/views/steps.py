"""A forward pass on the meta device, operation by operation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from nestling.views.rules import apply_rule, tensors_in
from nestling.views.ties import Joint, Nodes, Ties

_META = torch.device("meta")

LAYING_OUT = frozenset(
    {
        "view",
        "_unsafe_view",
        "reshape",
        "clone",
        "expand",
        "repeat",
        "permute",
        "transpose",
        "transpose_",
        "t",
        "contiguous",
        "alias",
        "detach",
        "unsqueeze",
        "squeeze",
        "select",
        "slice",
        "unbind",
        "split",
        "unsafe_split",
        "split_with_sizes",
        "_to_copy",
        "lift_fresh",
        "empty",
    }
)
"""Operations that compute nothing; whether they are needed may depend on sizes."""


@dataclass(frozen=True, eq=False)
class Carried:
    """A tensor of a pass: its shape, and the nodes it carried."""

    shape: tuple[int, ...]
    nodes: Nodes
    joints: tuple[Joint, ...]

    def lines(self) -> Iterator[np.ndarray]:
        """All its nodes, dimension by dimension."""
        yield from (line for line in self.nodes if line is not None)
        yield from (joint.nodes.reshape(-1) for joint in self.joints)


@dataclass(frozen=True, eq=False)
class TracedStep:
    """One operation: what it read and made, the plain numbers it was given, the module in which it
    ran, and whether anything that the network answers comes from it."""

    name: str
    path: str
    read: tuple[Carried, ...]
    made: tuple[Carried, ...]
    scalars: tuple[float, ...]
    used: bool


Steps = list[TracedStep]


class Uses(TorchDispatchMode):
    """Writes down which tensors every operation reads and makes."""

    def __init__(self) -> None:
        """Starts with nothing written down."""
        super().__init__()
        self.calls: list[tuple[list[Tensor], list[Tensor], bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation."""
        out, args, kwargs = run_on_meta(func, args, kwargs)
        # What is changed in place may be a part of something that is read later.
        self.calls.append(
            (list(tensors_in([args, kwargs])), list(tensors_in(out)), func._schema.is_mutable)
        )
        return out

    def used(self, answer: Any) -> list[bool]:
        """For every operation, whether anything of the answer comes from it."""
        wanted = {id(t) for t in tensors_in(answer)}
        found = []
        for read, made, changes in reversed(self.calls):
            counts = changes or any(id(t) in wanted for t in made)
            if counts:
                wanted.update(id(t) for t in read)
            found.append(counts)
        return found[::-1]


class TieRecorder(TorchDispatchMode):
    """Draws the ties of every operation that runs inside the block and is used, and writes it
    down."""

    def __init__(self, ties: Ties, used: Sequence[bool]) -> None:
        """Starts with the ties' nodes of the state's tensors."""
        super().__init__()
        self.ties, self.used = ties, used
        self.read: set[int] = set()
        self.path: list[str] = []
        self.steps: Steps = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation."""
        used, before = self.used[len(self.steps)], list(tensors_in([args, kwargs]))
        read = tuple(_carried(self.ties, t) for t in before)
        out, args, kwargs = run_on_meta(func, args, kwargs)
        inputs = list(tensors_in([args, kwargs]))
        if used:
            self.read.update(id(t) for t in inputs)
            apply_rule(self.ties, func, out, args, kwargs)
        made = tuple(_carried(self.ties, t) for t in tensors_in(out))
        path = self.path[-1] if self.path else ""
        name, scalars = func.overloadpacket.__name__, scalars_of(func, args)
        self.steps.append(TracedStep(name, path, read, made, scalars, used))
        self.ties.alive += inputs
        return out


def run_on_meta(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The result of an operation, and its arguments, with everything on the meta device: also
    constants that a forward makes or keeps on another."""
    args, kwargs = tree_map_only(Tensor, _to_meta, (args, kwargs or {}))
    if any(argument.name == "device" for argument in func._schema.arguments):
        kwargs = {**kwargs, "device": _META}
    return func(*args, **kwargs), args, kwargs


def scalars_of(func: Any, args: Sequence[Any]) -> tuple[float, ...]:
    """The numbers by which an element-wise operation computes: a scale, a power."""
    if torch.Tag.pointwise not in func.tags:
        return ()
    return tuple(a for a in args if type(a) in (int, float))


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.device == _META else torch.empty_like(tensor, device=_META)


def _carried(ties: Ties, tensor: Tensor) -> Carried:
    return Carried(tuple(tensor.shape), list(ties.apart(tensor)), ties.jointly(tensor))


@contextlib.contextmanager
def following(module: nn.Module, path: list[str]) -> Iterator[None]:
    """Keeps the names of the modules that are running in `path`, innermost last; where one fails
    they stay there."""

    def enter(name: str, *_: Any) -> None:
        path.append(name)

    def leave(*_: Any) -> None:
        path.pop()

    hooks = []
    for name, part in module.named_modules():
        hooks += [
            part.register_forward_pre_hook(partial(enter, name)),
            part.register_forward_hook(leave),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def answer(module: nn.Module, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """What the network makes of a batch of a shape on the meta device."""
    # Two samples, so that the batch dimension is never taken for a broadcast one.
    x = torch.empty((2, *shape), device="meta", dtype=dtype)
    # A network with early exits is traced through all of them, or the earlier heads would seem
    # unused.
    return getattr(module, "all_exits", module)(x)

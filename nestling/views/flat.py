"""States in one piece of memory.

A state of many small tensors is copied, cut, summed and sent fastest as one flat buffer. `Packed`
is a state whose floating-point tensors are views of such a buffer; `Stack` holds the states of
several clients as rows of one matrix, and `Row` is one of them. Both read like any other state, so
nobody has to know; the merge and the engines do, and are fast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from nestling.message import LARGEST

FLOAT = torch.float32


@dataclass(frozen=True, eq=False)
class Layout:
    """Where each tensor lies in a flat buffer. `others` are the names kept beside it (counters and
    other types)."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    others: tuple[str, ...] = ()

    @cached_property
    def sizes(self) -> list[int]:
        """How many entries each tensor has."""
        return [math.prod(shape) for shape in self.shapes]

    @cached_property
    def offsets(self) -> dict[str, tuple[int, int, tuple[int, ...]]]:
        """Name → (start, end, shape)."""
        ends = list(itertools.accumulate(self.sizes))
        return {
            n: (e - k, e, s)
            for n, e, k, s in zip(self.names, ends, self.sizes, self.shapes, strict=True)
        }

    @cached_property
    def numel(self) -> int:
        """How many entries the buffer has."""
        return sum(self.sizes)

    @cached_property
    def all_names(self) -> frozenset[str]:
        """The names in the buffer and those kept beside it."""
        return frozenset((*self.names, *self.others))

    @cached_property
    def count(self) -> int:
        """How many tensors a state with this layout has."""
        return len(self.names) + len(self.others)

    def split(self, flat: Tensor) -> list[Tensor]:
        """The tensors in a buffer of shape (…, numel), as views with the leading dimensions
        kept."""
        lead = flat.shape[:-1]
        return [
            part.view((*lead, *shape))
            for part, shape in zip(flat.split(self.sizes, -1), self.shapes, strict=True)
        ]


def layout_of(state: Mapping[str, Tensor]) -> Layout:
    """The layout of a state, tensors in its own order."""
    kept: Layout | None = getattr(state, "layout", None)
    if kept is not None:
        return kept
    floats = [(name, tuple(t.shape)) for name, t in state.items() if t.dtype == FLOAT]
    return layout(
        tuple(name for name, _ in floats),
        tuple(shape for _, shape in floats),
        tuple(name for name, t in state.items() if t.dtype != FLOAT),
    )


@lru_cache(maxsize=1024)
def layout(
    names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], others: tuple[str, ...]
) -> Layout:
    """The one layout object with these fields: equal layouts are the same object, which is how they
    are compared."""
    return Layout(names, shapes, others)


class Packed(dict[str, Tensor]):
    """A state whose float32 tensors lie in `flat`. As soon as an entry is replaced it is an
    ordinary state."""

    flat: Tensor | None
    layout: Layout | None

    def __init__(
        self, layout: Layout, flat: Tensor, others: Mapping[str, Tensor] | None = None
    ) -> None:
        """Makes views of `flat`, and puts `others` beside them."""
        super().__init__(zip(layout.names, layout.split(flat), strict=True))
        super().update(others or {})
        self.layout, self.flat = layout, flat

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        """Replaces an entry, which ends the packing."""
        self.layout = self.flat = None
        super().__setitem__(name, tensor)

    def __delitem__(self, name: str) -> None:
        """Removes an entry, which ends the packing."""
        self.layout = self.flat = None
        super().__delitem__(name)

    def update(self, *given: Any, **named: Any) -> None:
        """Replaces entries, which ends the packing."""
        self.layout = self.flat = None
        super().update(*given, **named)

    def pop(self, *given: Any) -> Any:
        """Takes an entry out, which ends the packing."""
        self.layout = self.flat = None
        return super().pop(*given)

    def copy(self) -> Packed:
        """The same tensors in a state of its own, whose entries may be replaced."""
        fresh = Packed.__new__(Packed)
        dict.update(fresh, self)
        fresh.layout, fresh.flat = self.layout, self.flat
        return fresh

    def __reduce__(self) -> Any:
        """Pickles as an ordinary dict."""
        return dict, (dict(self),)


def pack(state: Mapping[str, Tensor]) -> Packed:
    """The state in one fresh buffer (or as it is, where it already lies in one)."""
    if isinstance(state, Packed) and state.flat is not None:
        return state
    layout = layout_of(state)
    flat = (
        torch.cat([state[name].detach().reshape(-1) for name in layout.names])
        if layout.names
        else torch.zeros(0)
    )
    # One tensor's `cat` may be the tensor itself.
    flat = flat.clone() if len(layout.names) == 1 else flat
    return Packed(layout, flat, {name: state[name].detach().clone() for name in layout.others})


def flat_of(state: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """The state's float32 tensors as one vector in the order of a layout; a fresh one only where it
    must be."""
    if getattr(state, "layout", None) is layout:
        return state.flat  # type: ignore[attr-defined]
    if not layout.names:
        return torch.zeros(0)
    return torch.cat([state[name].reshape(-1) for name in layout.names])


class Fetched:
    """A small tensor on its way to the host. Reading it waits for what was queued before it, and
    for nothing queued since."""

    def __init__(self, tensor: Tensor) -> None:
        """Starts the copy to the host without waiting for it; on a CPU there is nothing to copy."""
        self.tensor, self._host, self._event = tensor, tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def values(self) -> list[Any]:
        """The numbers, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()

    def row(self, number: int) -> FetchedRow:
        """One row of it, which comes with the others."""
        return FetchedRow(self, number)


@dataclass(frozen=True, eq=False)
class FetchedRow:
    """A row of what is on its way."""

    whole: Fetched
    number: int

    def values(self) -> list[Any]:
        """The numbers of the row, once all rows have arrived."""
        return self.whole.values()[self.number]


@dataclass(eq=False)
class Stack:
    """The states of several clients: a matrix of one row each, and what is not float32 stacked
    tensor by tensor."""

    layout: Layout
    flat: Tensor
    others: dict[str, Tensor]
    _norms: Fetched | FetchedRow | None = None

    def rows(self) -> list[Row]:
        """One row for each client."""
        return [Row(self, k) for k in range(len(self.flat))]

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row's tensors (0 where flags among them would have to be packed first)."""
        kept = self.others.values()
        if any(t.dtype == torch.bool for t in kept):
            return 0
        return 4 * self.layout.numel + sum(t[0].nbytes for t in kept)

    def start_norms(self) -> None:
        """Has the device find the rows' norms, without waiting for it: a norm is finite where all
        values are."""
        if self._norms is None:
            self._norms = Fetched(torch.linalg.vector_norm(self.flat, dim=1))

    @cached_property
    def finite(self) -> list[bool]:
        """One flag per row: whether all its values are finite, and not too large to be merged."""
        self.start_norms()
        return [norm <= LARGEST for norm in self._norms.values()]  # type: ignore[union-attr]


class Row(Mapping[str, Tensor]):
    """One client's state in a stack; its tensors are made when asked for."""

    __slots__ = ("layout", "number", "stack")

    def __init__(self, stack: Stack, number: int) -> None:
        """Points at row `number` of a stack."""
        self.stack, self.number, self.layout = stack, number, stack.layout

    @property
    def flat(self) -> Tensor:
        """Its float32 tensors as one vector, a view of the matrix."""
        return self.stack.flat[self.number]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors (0 where flags among them would have to be packed first)."""
        return self.stack.row_bytes

    def __getitem__(self, name: str) -> Tensor:
        """A tensor of the state, as a view of the stack."""
        place = self.layout.offsets.get(name)
        if place is None:
            return self.stack.others[name][self.number]
        start, end, shape = place
        return self.stack.flat[self.number, start:end].view(shape)

    def __iter__(self) -> Iterator[str]:
        """The names: those in the matrix, then the others."""
        yield from self.layout.names
        yield from self.layout.others

    def __len__(self) -> int:
        """How many tensors the state has."""
        return self.layout.count


def only(state: Mapping[str, Tensor], names: Sequence[str]) -> Mapping[str, Tensor]:
    """The named tensors of a state; the state itself where that is all of it."""
    layout = getattr(state, "layout", None)
    if layout is not None and len(names) == len(state) and layout.all_names.issuperset(names):
        return state
    return {name: state[name] for name in names}

"""Tensors between two processes, through memory that both see.

A `Block` is a piece of memory without a name, known to whoever was handed it: it goes when the last
of them ends, however it ends, so there is nothing to clean up. Through a `Channel` one process
fills a `Page` (a block of its own, from the start) and posts it; only the page's number and length
go through the pipe. What arrives lies in the block and is *read-only by agreement*: `view` shows it
there, `copy` takes it out in one piece.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import pickle
import socket
import tempfile
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nestling.views.flat import FLOAT, Packed, layout, layout_of

Parts = Mapping[str, Mapping[str, Tensor]]

ALIGN = 64
"""Where a tensor may start: what torch gives its own."""


class Place(NamedTuple):
    """One tensor in a block."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class PagePart(NamedTuple):
    """A state in a block: its float32 tensors in one piece, the others one by one. `order` is that
    of the names, where the state is not one that `Packed` can hold."""

    start: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    others: dict[str, Place]
    order: tuple[str, ...] | None


class PagePacket(NamedTuple):
    """States in a block: which block, from where to where, and each of them. It is what travels in
    place of tensors."""

    block: int
    begin: int
    end: int
    parts: dict[str, PagePart]


class Block:
    """Memory that grows on demand and never shrinks. `number` is what its owner calls it."""

    memory: mmap.mmap
    bytes: Tensor

    def __init__(self, number: int, handle: int | None = None) -> None:
        """Makes fresh memory, or takes the handle of a block that another process made."""
        self.number, self.size = number, 0
        self.handle = _nameless_file() if handle is None else handle
        weakref.finalize(self, os.close, self.handle)

    def reserve(self, size: int) -> None:
        """Makes the block at least so large. Tensors in it stay as they are."""
        if size > self.size:
            size = math.ceil(size / mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self.handle, size)
            self.show(size)

    def show(self, size: int) -> None:
        """Maps the block, which has that size now. An earlier mapping shows the same memory, and
        lasts as long as its tensors."""
        if size > self.size:
            self.memory, self.size = mmap.mmap(self.handle, size), size
            self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)


class Page:
    """A block as it is filled: `add` finds places, `flush` copies what was added since."""

    def __init__(self, block: Block) -> None:
        """Starts an empty page at the beginning of a block."""
        self.block, self.size = block, 0
        self.header = (0, 0)
        self._waiting: list[tuple[int, Tensor]] = []

    def add(self, parts: Parts) -> PagePacket:
        """Makes room for some states."""
        begin = self.size
        placed = {kind: self._part(part) for kind, part in parts.items()}
        return PagePacket(self.block.number, begin, self.size, placed)

    def flush(self) -> None:
        """Copies what was added: the one copy on this side."""
        self.block.reserve(max(self.size, 1))
        for start, tensor in self._waiting:
            _tensor(self.block.bytes, Place(start, tensor.dtype, tuple(tensor.shape))).copy_(
                tensor.detach()
            )
        self._waiting = []

    def finish(self, header: object) -> None:
        """Copies what was added, and behind it the plain data that says what it is."""
        data = pickle.dumps(header, protocol=5)
        self.block.reserve(self.size + len(data))
        self.flush()
        self.block.memory[self.size : self.size + len(data)] = data
        self.header = (self.size, len(data))

    def _part(self, part: Mapping[str, Tensor]) -> PagePart:
        plan = layout_of(part)
        start = self._room(plan.numel * FLOAT.itemsize)
        if getattr(part, "layout", None) is plan:
            self._waiting.append((start, part.flat))  # type: ignore[attr-defined]
        else:
            self._waiting += [
                (start + plan.offsets[name][0] * FLOAT.itemsize, part[name]) for name in plan.names
            ]
        others = {name: self._place(part[name]) for name in plan.others}
        order = tuple(part)
        whole = order == (*plan.names, *plan.others)
        return PagePart(start, plan.names, plan.shapes, others, None if whole else order)

    def _place(self, tensor: Tensor) -> Place:
        place = Place(
            self._room(tensor.numel() * tensor.element_size()), tensor.dtype, tuple(tensor.shape)
        )
        self._waiting.append((place.start, tensor))
        return place

    def _room(self, nbytes: int) -> int:
        start = self.size
        self.size = math.ceil((start + nbytes) / ALIGN) * ALIGN
        return start


class Spare:
    """Memory for copies. What nobody refers to any more is used again, since fresh pages cost far
    more than the copy itself.

    All in all there is never more of it than was in use at once.
    """

    def __init__(self) -> None:
        """Starts with no memory at all."""
        self._free: dict[int, list[Tensor]] = {}
        self._used = self._kept = self._peak = 0

    def take(self, size: int) -> Tensor:
        """So many bytes, free again when the last tensor that shares them is gone."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        memory = self._again(size)
        if memory is None:
            self._make_room(size)
            memory = torch.empty(size, dtype=torch.uint8)
        self._used += size
        self._peak = max(self._peak, self._used)
        # The tensor given away holds this array, and so do all views of it, wherever they go.
        lent = memory.numpy()
        weakref.finalize(lent, self._back, memory).atexit = False
        return torch.frombuffer(lent, dtype=torch.uint8)

    def _again(self, size: int) -> Tensor | None:
        free = self._free.get(size)
        if not free:
            return None
        self._kept -= size
        return free.pop()

    def _back(self, memory: Tensor) -> None:
        self._used -= len(memory)
        self._kept += len(memory)
        self._free.setdefault(len(memory), []).append(memory)

    def _make_room(self, size: int) -> None:
        limit = max(self._peak, self._used + size)
        while self._kept and self._used + self._kept + size > limit:
            oldest = next(iter(self._free))
            if not self._free[oldest]:
                del self._free[oldest]
            else:
                self._again(oldest)


class Channel:
    """One end of a pipe and the blocks that belong to it.

    Pages are written to `depth` blocks in turn: whoever posts must have had an answer to its last
    but `depth` page, which says that the other end is done with it.
    """

    def __init__(self, connection: Connection, depth: int) -> None:
        """Makes `depth` blocks to write to; those of the other end are met as they are
        mentioned."""
        self.connection = connection
        self._own = [Block(number) for number in range(depth)]
        self._turn = 0
        self._shown: set[int] = set()
        self._theirs: dict[int, Block] = {}

    def page(self) -> Page:
        """The next page, empty."""
        return Page(self._own[self._turn % len(self._own)])

    def post(self, page: Page, *also: Block) -> None:
        """Tells the other end of a finished page, and of other blocks that it mentions."""
        self._turn += 1
        blocks = (page.block, *also)
        self.connection.send_bytes(
            json.dumps([[(b.number, b.size) for b in blocks], *page.header]).encode()
        )
        for block in blocks:
            if block.number not in self._shown:
                self._shown.add(block.number)
                self._send_handle(block.handle)

    def fetch(self) -> Any:
        """The header of the next page from the other end. Raises `EOFError` or `OSError` when that
        end is gone."""
        blocks, start, length = json.loads(self.connection.recv_bytes())
        for number, size in blocks:
            if number not in self._theirs:
                self._theirs[number] = Block(number, self._receive_handle())
            self._theirs[number].show(size)
        return _Header(io.BytesIO(self._theirs[blocks[0][0]].memory[start : start + length])).load()

    def view(self, packet: PagePacket) -> dict[str, dict[str, Tensor]]:
        """The states of a packet where they lie: not to be written to, nor kept once the page is
        answered."""
        return _states(self._theirs[packet.block].bytes, packet, 0)

    def copy(self, packet: PagePacket, spare: Spare) -> dict[str, dict[str, Tensor]]:
        """The states of a packet in memory of their own, one piece for all of them."""
        memory = spare.take(packet.end - packet.begin)
        memory.copy_(self._theirs[packet.block].bytes[packet.begin : packet.end])
        return _states(memory, packet, packet.begin)

    def _send_handle(self, handle: int) -> None:
        with socket.socket(fileno=os.dup(self.connection.fileno())) as line:
            socket.send_fds(line, [b"\0"], [handle])

    def _receive_handle(self) -> int:
        with socket.socket(fileno=os.dup(self.connection.fileno())) as line:
            _, handles, _, _ = socket.recv_fds(line, 1, 1)
        if not handles:
            raise EOFError("the other end is gone")
        os.set_inheritable(handles[0], False)
        return handles[0]


class _Header(pickle.Unpickler):
    """Reads plain data, the descriptions of this file and types of numbers, and refuses anything
    that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in ("PagePacket", "PagePart", "Place"):
            return globals()[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a header")


def _states(memory: Tensor, packet: PagePacket, shift: int) -> dict[str, dict[str, Tensor]]:
    return {kind: _state(memory, part, shift) for kind, part in packet.parts.items()}


def _state(memory: Tensor, part: PagePart, shift: int) -> dict[str, Tensor]:
    others = {name: _tensor(memory, place, shift) for name, place in part.others.items()}
    if not part.names:
        return others
    plan = layout(part.names, part.shapes, tuple(others))
    flat = _tensor(memory, Place(part.start, FLOAT, (plan.numel,)), shift)
    if part.order is None:
        return Packed(plan, flat, others)
    found = {
        name: flat[start:end].view(shape) for name, (start, end, shape) in plan.offsets.items()
    }
    return {name: found[name] if name in found else others[name] for name in part.order}


def _tensor(memory: Tensor, place: Place, shift: int = 0) -> Tensor:
    start = place.start - shift
    return (
        memory[start : start + math.prod(place.shape) * place.dtype.itemsize]
        .view(place.dtype)
        .view(place.shape)
    )


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nestling")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())

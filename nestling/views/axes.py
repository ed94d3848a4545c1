"""Channel axes of any `nn.Module`, found by tracing.

One forward pass on the meta device is recorded operation by operation. Every entry of every
sliceable dimension of every state tensor is a node; an operation ties the nodes that must be kept
or dropped together (the inputs of a convolution to the outputs it reads, both sides of a residual
add, the affine of a norm to its channels, the H×W entries of a flattened channel). What remains
after all ties are drawn are classes of nodes: a class is one channel, and the channels that a layer
produces form an axis.

An operation that is not understood freezes what it touches: those channels are then never sliced. A
network that nobody thought of is therefore at worst sliced less, never wrongly.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nestling.errors import InputError

FREE = -1
"""Marks an entry of a dimension that belongs to no axis: it is part of every view."""

Nodes = list[np.ndarray | None]
"""For each dimension of a tensor its node numbers, or None where the dimension can never be sliced
(batch, space)."""


@dataclass(frozen=True, eq=False)
class Axes:
    """The channel axes of one reference network.

    The channels of all axes are numbered through: channel `c` of axis `a` is `offsets[a] + c`.
    `dims[name][d]` holds that number for every entry of dimension `d` of the state tensor `name`
    (`FREE` where the entry belongs to every view), or None where no entry belongs to an axis.
    `grains[a]` is the number of neighbouring channels that a group norm on axis `a` normalises
    together: a prefix of whole grains behaves exactly as in the wide network.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    grains: tuple[int, ...]
    dims: dict[str, tuple[np.ndarray | None, ...]]
    shapes: dict[str, tuple[int, ...]]

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where each axis begins in the numbering of all channels, and at last their number."""
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    @property
    def channels(self) -> int:
        """How many channels there are in all axes together."""
        return int(sum(self.sizes))

    def number(self, name: str) -> int:
        """The position of the axis called `name`."""
        if name not in self.names:
            raise InputError(f"there is no axis {name!r}", fix=f"axes: {', '.join(self.names)}")
        return self.names.index(name)


def trace(module: nn.Module, shape: Sequence[int]) -> Axes:
    """The axes of `module` for inputs of `shape` (without the batch dimension)."""
    on_meta = copy.deepcopy(module).to("meta").eval()
    ties = _record(on_meta, shape)
    roots = {
        name: [None if n is None else ties.roots(n) for n in ties.of(t)]
        for name, t in _state(on_meta).items()
    }
    return _number_axes(roots, ties, {name: tuple(t.shape) for name, t in _state(on_meta).items()})


def _state(module: nn.Module) -> dict[str, Tensor]:
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return {name: tensors[name] for name in module.state_dict() if name in tensors}


def _record(module: nn.Module, shape: Sequence[int]) -> _Ties:
    ties = _Ties()
    state = _state(module)
    for tensor in state.values():
        ties.number(tensor)
    # Two samples, so that the batch dimension is never taken for a broadcast one.
    x = torch.empty((2, *shape), device="meta")
    recorder = _Recorder(ties)
    try:
        with torch.no_grad(), recorder:
            # A network with early exits is traced through all of them, or the earlier heads would
            # seem unused.
            every = getattr(module, "all_exits", module)
            out = every(x)
    except Exception as error:
        raise InputError(
            f"the network cannot be traced with inputs of shape {tuple(shape)}: {error}",
            field="model.name",
            fix="its forward must run on a batch of that shape without looking at the values",
        ) from error
    for tensor in _tensors(out):
        ties.freeze(tensor)
    for tensor in state.values():
        if id(tensor) not in recorder.seen:
            ties.freeze(tensor)
    return ties


def _number_axes(roots: dict[str, Nodes], ties: _Ties, shapes: dict[str, tuple[int, ...]]) -> Axes:
    names: list[str] = []
    sizes: list[int] = []
    grains: list[int] = []
    frozen, grouped = ties.frozen_roots(), ties.grouped_roots()
    channel_of: dict[int, int] = {}
    # Producers first (dimension 0 of weights), so that the reader of a concatenation does not
    # define the axes that it reads.
    order = [(name, 0) for name, dims in roots.items() if len(dims) >= 2]
    order += [(name, d) for name, dims in roots.items() for d in range(len(dims))]
    for name, d in order:
        nodes = roots[name][d]
        if nodes is None:
            continue
        fresh = [
            n for n in dict.fromkeys(nodes.tolist()) if n not in channel_of and n not in frozen
        ]
        if fresh:
            start = len(channel_of)
            channel_of.update({n: start + i for i, n in enumerate(fresh)})
            base = name.rsplit(".", 1)[0] if "." in name else name
            names.append(base if base not in names else f"{base}.{d}.{len(names)}")
            sizes.append(len(fresh))
            grain = math.lcm(*(grouped.get(n, 1) for n in fresh))
            grains.append(grain if len(fresh) % grain == 0 else 1)
    dims = {
        name: tuple(_channels(nodes, channel_of) for nodes in tensor)
        for name, tensor in roots.items()
    }
    return Axes(tuple(names), tuple(sizes), tuple(grains), dims, shapes)


def _channels(nodes: np.ndarray | None, channel_of: dict[int, int]) -> np.ndarray | None:
    if nodes is None:
        return None
    channels = np.array([channel_of.get(n, FREE) for n in nodes.tolist()], dtype=np.int64)
    return channels if (channels != FREE).any() else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (t for v in value.values() for t in _tensors(v))
    elif isinstance(value, (list, tuple)):
        yield from (t for v in value for t in _tensors(v))


class _Ties:
    """Union-find over nodes, and which nodes each tensor's dimensions carry."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.frozen: set[int] = set()
        self.groups: dict[int, int] = {}  # node → size of the group norm's group it is in
        self.nodes: dict[int, Nodes] = {}
        # holds the tensors, so that an id is never given to a second one
        self.alive: list[Tensor] = []

    def number(self, tensor: Tensor) -> None:
        """Fresh nodes for a state tensor: one per row and column, none for kernel sides."""
        self.give(
            tensor, [self._fresh(size) if d < 2 else None for d, size in enumerate(tensor.shape)]
        )

    def _fresh(self, size: int) -> np.ndarray:
        start = len(self.parent)
        self.parent.extend(range(start, start + size))
        return np.arange(start, start + size)

    def give(self, tensor: Tensor, nodes: Nodes) -> None:
        self.alive.append(tensor)
        self.nodes[id(tensor)] = nodes

    def of(self, tensor: Tensor) -> Nodes:
        """The nodes of a tensor; a constant that appeared from nowhere has none."""
        return self.nodes.get(id(tensor), [None] * tensor.dim())

    def root(self, node: int) -> int:
        while self.parent[node] != node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def roots(self, nodes: np.ndarray) -> np.ndarray:
        return np.array([self.root(n) for n in nodes.tolist()], dtype=np.int64)

    def frozen_roots(self) -> set[int]:
        return {self.root(n) for n in self.frozen}

    def grouped_roots(self) -> dict[int, int]:
        return {self.root(n): size for n, size in self.groups.items()}

    def tie(self, a: np.ndarray | None, b: np.ndarray | None) -> None:
        """Entry i of `a` and entry i of `b` are kept or dropped together; what is tied to an
        unsliceable dimension is frozen."""
        if a is None or b is None or len(a) != len(b):
            self.freeze_nodes(a)
            self.freeze_nodes(b)
            return
        for i, j in zip(a.tolist(), b.tolist(), strict=True):
            ri, rj = self.root(i), self.root(j)
            if ri != rj:
                # The older node stays the root: numbering follows the order of the state.
                self.parent[max(ri, rj)] = min(ri, rj)

    def freeze_nodes(self, nodes: np.ndarray | None) -> None:
        if nodes is not None:
            self.frozen.update(nodes.tolist())

    def freeze(self, tensor: Tensor) -> None:
        for nodes in self.of(tensor):
            self.freeze_nodes(nodes)


class _Recorder(TorchDispatchMode):
    """Calls the rule of every operation that runs inside the block."""

    def __init__(self, ties: _Ties) -> None:
        super().__init__()
        self.ties = ties
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.seen.update(id(t) for t in _tensors([args, kwargs]))
        name = func.overloadpacket.__name__
        rule = RULES.get(name) or (_pointwise if torch.Tag.pointwise in func.tags else _unknown)
        rule(self.ties, out, *args, **kwargs)
        return out


def _unknown(ties: _Ties, out: Any, *args: Any, **kwargs: Any) -> None:
    for tensor in _tensors([args, kwargs]):
        ties.freeze(tensor)
    for tensor in _tensors(out):
        ties.give(tensor, [None] * tensor.dim())


def _pointwise(ties: _Ties, out: Tensor, *args: Any, **kwargs: Any) -> None:
    """Element by element with broadcasting: equal dimensions are tied, broadcast ones say
    nothing."""
    nodes: Nodes = [None] * out.dim()
    inputs = [t for t in _tensors([args, kwargs]) if t.dim() > 0]
    for d in range(out.dim()):
        sides = [
            ties.of(t)[d - out.dim()]
            for t in inputs
            if t.dim() >= out.dim() - d and t.shape[d - out.dim()] == out.shape[d]
        ]
        broadcast = [
            ties.of(t)[d - out.dim()]
            for t in inputs
            if t.dim() >= out.dim() - d and t.shape[d - out.dim()] != out.shape[d]
        ]
        for side in broadcast:
            ties.freeze_nodes(side)
        for side in sides[1:]:
            ties.tie(sides[0], side)
        nodes[d] = next((s for s in sides if s is not None), None) if sides else None
    ties.give(out, nodes)


def _convolution(
    ties: _Ties,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,  # noqa: ARG001 (aten's name)
    padding: Any,  # noqa: ARG001 (aten's name)
    dilation: Any,  # noqa: ARG001 (aten's name)
    transposed: bool,
    output_padding: Any,  # noqa: ARG001 (aten's name)
    groups: int,
) -> None:
    channels, (rows, columns) = ties.of(x)[1], ties.of(weight)[:2]
    produced = columns if transposed else rows
    if groups == 1:
        ties.tie(channels, rows if transposed else columns)
    elif groups == x.shape[1] and not transposed:
        # Depth-wise: output j reads input j // multiplier only, so both live and die together.
        ties.tie(None if channels is None else np.repeat(channels, out.shape[1] // groups), rows)
        ties.freeze_nodes(columns)
    else:
        ties.freeze(weight)
        ties.freeze_nodes(channels)
    if bias is not None:
        ties.tie(produced, ties.of(bias)[0])
    ties.give(out, [None, produced, *[None] * (out.dim() - 2)])


def _matrix_product(ties: _Ties, out: Tensor, a: Tensor, b: Tensor) -> None:
    left, right = ties.of(a), ties.of(b)
    ties.tie(left[-1], right[-2])
    for one, other in zip(left[:-2], right[:-2], strict=True):
        ties.tie(one, other)
    ties.give(out, [*left[:-1], right[-1]])


def _affine_product(ties: _Ties, out: Tensor, bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> None:
    _matrix_product(ties, out, a, b)
    ties.tie(ties.of(bias)[-1], ties.of(out)[-1])


def _linear(
    ties: _Ties, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> None:
    ties.tie(ties.of(x)[-1], ties.of(weight)[1])
    if bias is not None:
        ties.tie(ties.of(bias)[0], ties.of(weight)[0])
    ties.give(out, [*ties.of(x)[:-1], ties.of(weight)[0]])


def _channel_norm(ties: _Ties, out: Any, x: Tensor, *rest: Any, **kwargs: Any) -> None:
    """Batch and group norm: affine and statistics follow the channels."""
    for tensor in _tensors([rest, kwargs]):
        ties.tie(ties.of(x)[1], ties.of(tensor)[0])
    outs = list(_tensors(out))
    ties.give(outs[0], ties.of(x))
    for extra in outs[1:]:
        ties.give(extra, [None] * extra.dim())


def _group_norm(ties: _Ties, out: Any, x: Tensor, *rest: Any, **kwargs: Any) -> None:
    _channel_norm(ties, out, x, *rest, **kwargs)
    groups = rest[5]  # (weight, bias, N, C, H×W, groups, eps)
    if (channels := ties.of(x)[1]) is not None:
        ties.groups.update(dict.fromkeys(channels.tolist(), len(channels) // groups))


def _layer_norm(
    ties: _Ties, out: Any, x: Tensor, shape: Sequence[int], *rest: Any, **kwargs: Any
) -> None:
    for tensor in _tensors([rest, kwargs]):
        for mine, other in zip(ties.of(x)[-len(shape) :], ties.of(tensor), strict=True):
            ties.tie(mine, other)
    outs = list(_tensors(out))
    ties.give(outs[0], ties.of(x))
    for extra in outs[1:]:
        ties.give(extra, [None] * extra.dim())


def _spatial(ties: _Ties, out: Any, x: Tensor, *_rest: Any, **_: Any) -> None:
    """Pooling, padding and resizing: channels pass through, a channel dimension whose size changed
    is frozen."""
    for tensor in _tensors(out):
        nodes: Nodes = []
        for d, mine in enumerate(ties.of(x)):
            same = mine is not None and tensor.dim() == x.dim() and tensor.shape[d] == x.shape[d]
            if not same:
                ties.freeze_nodes(mine)
            nodes.append(mine if same else None)
        ties.give(tensor, nodes if tensor.dim() == x.dim() else [None] * tensor.dim())


def _reduce(
    ties: _Ties, out: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **_: Any
) -> None:
    """Sums and means: a dimension that is reduced away must stay whole."""
    given = range(x.dim()) if dim is None or dim == [] else ([dim] if isinstance(dim, int) else dim)
    gone = {d % x.dim() for d in given}
    nodes = ties.of(x)
    for d in gone:
        ties.freeze_nodes(nodes[d])
    kept: Nodes = [
        None if d in gone else n for d, n in enumerate(nodes) if keepdim or d not in gone
    ]
    for tensor in _tensors(out):
        ties.give(tensor, kept)


def _softmax(ties: _Ties, out: Tensor, x: Tensor, dim: int, *_rest: Any, **_: Any) -> None:
    ties.freeze_nodes(ties.of(x)[dim])
    ties.give(out, ties.of(x))


def _same(ties: _Ties, out: Any, x: Tensor, *_rest: Any, **_: Any) -> None:
    for tensor in _tensors(out):
        ties.give(tensor, ties.of(x) if tensor.shape == x.shape else [None] * tensor.dim())


def _embedding(ties: _Ties, out: Tensor, weight: Tensor, *_rest: Any, **_: Any) -> None:
    ties.freeze_nodes(ties.of(weight)[0])
    ties.give(out, [*[None] * (out.dim() - 1), ties.of(weight)[1]])


def _permute(ties: _Ties, out: Tensor, x: Tensor, dims: Sequence[int]) -> None:
    ties.give(out, [ties.of(x)[d] for d in dims])


def _transpose(ties: _Ties, out: Tensor, x: Tensor, a: int, b: int) -> None:
    nodes = list(ties.of(x))
    nodes[a], nodes[b] = nodes[b], nodes[a]
    ties.give(out, nodes)


def _turn(ties: _Ties, out: Tensor, x: Tensor) -> None:
    ties.give(out, ties.of(x)[::-1])


def _cat(ties: _Ties, out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> None:
    """Along the joined dimension the nodes line up one after another; an unsliceable part gets
    frozen nodes to hold its place."""
    dim = dim % out.dim()
    pieces = []
    for part in parts:
        nodes = ties.of(part)[dim]
        if nodes is None:
            nodes = ties._fresh(part.shape[dim])
            ties.freeze_nodes(nodes)
        pieces.append(nodes)
    joined = [list(ties.of(p)) for p in parts]
    result: Nodes = []
    for d in range(out.dim()):
        if d == dim:
            result.append(
                np.concatenate(pieces) if any(ties.of(p)[dim] is not None for p in parts) else None
            )
            continue
        for other in joined[1:]:
            ties.tie(joined[0][d], other[d])
        result.append(joined[0][d])
    ties.give(out, result)


def _slice(
    ties: _Ties,
    out: Tensor,
    x: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> None:
    nodes = list(ties.of(x))
    taken = nodes[dim]
    nodes[dim] = None if taken is None else taken[start:end:step]
    ties.give(out, nodes)


def _select(ties: _Ties, out: Tensor, x: Tensor, dim: int, index: int) -> None:  # noqa: ARG001 (aten's name)
    nodes = list(ties.of(x))
    taken = nodes.pop(dim)
    ties.freeze_nodes(taken)
    ties.give(out, nodes)


def _split(ties: _Ties, out: Sequence[Tensor], x: Tensor, sizes: Any, dim: int = 0) -> None:  # noqa: ARG001 (by aten's order)
    start = 0
    for part in out:
        _slice(ties, part, x, dim, start, start + part.shape[dim])
        start += part.shape[dim]


def _reshape(ties: _Ties, out: Tensor, x: Tensor, *_: Any) -> None:
    """Dimensions are matched in blocks of equal size; inside a block the nodes are laid out and
    read back in the new shape."""
    nodes: Nodes = []
    mine = ties.of(x)
    for old, new in _blocks(tuple(x.shape), tuple(out.shape)):
        nodes += _refold(
            ties, [mine[d] for d in old], [x.shape[d] for d in old], [out.shape[d] for d in new]
        )
    ties.give(out, nodes)


def _blocks(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    blocks: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        a, b = (
            ([i], [j])
            if i < len(old) and j < len(new)
            else (list(range(i, len(old))), list(range(j, len(new))))
        )
        i, j = i + len(a), j + len(b)
        size_a, size_b = _product(old, a), _product(new, b)
        while size_a != size_b:
            if size_a < size_b:
                a.append(i)
                i += 1
            else:
                b.append(j)
                j += 1
            size_a, size_b = _product(old, a), _product(new, b)
        blocks.append((a, b))
    return blocks


def _product(shape: tuple[int, ...], dims: list[int]) -> int:
    return int(np.prod([shape[d] for d in dims], dtype=np.int64))


def _refold(ties: _Ties, nodes: Nodes, old: list[int], new: list[int]) -> Nodes:
    live = [d for d, n in enumerate(nodes) if n is not None]
    if len(live) != 1:
        for n in nodes:
            ties.freeze_nodes(n)
        return [None] * len(new)
    d = live[0]
    line = nodes[d]
    assert line is not None
    block = np.broadcast_to(
        line.reshape([-1 if k == d else 1 for k in range(len(old))]), old
    ).reshape(new)
    for k in range(len(new)):
        first = np.moveaxis(block, k, 0).reshape(new[k], -1)
        if (first == first[:, :1]).all():
            return [first[:, 0].copy() if j == k else None for j in range(len(new))]
    ties.freeze_nodes(line)
    return [None] * len(new)


RULES: dict[str, Callable[..., None]] = {
    "convolution": _convolution,
    "mm": _matrix_product,
    "bmm": _matrix_product,
    "addmm": _affine_product,
    "linear": _linear,
    "embedding": _embedding,
    "native_batch_norm": _channel_norm,
    "_native_batch_norm_legit": _channel_norm,
    "_native_batch_norm_legit_no_training": _channel_norm,
    "native_group_norm": _group_norm,
    "native_layer_norm": _layer_norm,
    "cat": _cat,
    "permute": _permute,
    "transpose": _transpose,
    "t": _turn,
    "view": _reshape,
    "_unsafe_view": _reshape,
    "reshape": _reshape,
    "unsqueeze": _reshape,
    "squeeze": _reshape,
    "slice": _slice,
    "select": _select,
    "split": _split,
    "split_with_sizes": _split,
    "mean": _reduce,
    "sum": _reduce,
    "amax": _reduce,
    "max": _reduce,
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    **dict.fromkeys(
        ["clone", "detach", "alias", "_to_copy", "lift_fresh", "contiguous", "native_dropout"],
        _same,
    ),
    **dict.fromkeys(
        [
            *(
                f"{kind}_pool{n}d"
                for kind in ("avg", "max", "adaptive_avg", "adaptive_max", "_adaptive_avg")
                for n in (1, 2, 3)
            ),
            *(f"max_pool{n}d_with_indices" for n in (2, 3)),
            *(
                f"upsample_{kind}"
                for kind in ("nearest1d", "nearest2d", "bilinear2d", "bicubic2d", "linear1d")
            ),
            "constant_pad_nd",
            "reflection_pad2d",
            "replication_pad2d",
        ],
        _spatial,
    ),
}
"""The rule of every operation that is understood; point-wise ones are known by their tag."""

"""What each operation does to the nodes of its tensors.

An operation ties the nodes that must be kept or dropped together. One that has no rule freezes what
it touches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestling.views.ties import Heads, Joint, Nodes, Ties


def apply_rule(ties: Ties, func: Any, out: Any, args: Any, kwargs: Any) -> None:
    """Does to the nodes what an operation does to its tensors."""
    rule = RULES.get(func.overloadpacket.__name__)
    rule = rule or (_pointwise if torch.Tag.pointwise in func.tags else _unknown)
    rule(ties, out, *args, **kwargs)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (t for v in value.values() for t in tensors_in(v))
    elif isinstance(value, (list, tuple)):
        yield from (t for v in value for t in tensors_in(v))


def _unknown(ties: Ties, out: Any, *args: Any, **kwargs: Any) -> None:
    for tensor in tensors_in([args, kwargs]):
        ties.freeze(tensor)
    for tensor in tensors_in(out):
        ties.give(tensor, [None] * tensor.dim())


def _pointwise(ties: Ties, out: Tensor, *args: Any, **kwargs: Any) -> None:
    """Element by element with broadcasting: equal dimensions are tied, broadcast ones say
    nothing."""
    nodes: Nodes = [None] * out.dim()
    inputs = [t for t in tensors_in([args, kwargs]) if t.dim() > 0]
    joints = _joined(ties, out, inputs)
    for d in range(out.dim()):
        if any(d in joint.dims for joint in joints):
            continue
        sides = [
            ties.apart(t)[d - out.dim()]
            for t in inputs
            if t.dim() >= out.dim() - d and t.shape[d - out.dim()] == out.shape[d]
        ]
        broadcast = [
            ties.apart(t)[d - out.dim()]
            for t in inputs
            if t.dim() >= out.dim() - d and t.shape[d - out.dim()] != out.shape[d]
        ]
        for side in broadcast:
            ties.freeze_nodes(side)
        for side in sides[1:]:
            ties.tie(sides[0], side)
        nodes[d] = next((s for s in sides if s is not None), None) if sides else None
    ties.give(out, nodes, joints)


def _joined(ties: Ties, out: Tensor, inputs: Sequence[Tensor]) -> list[Joint]:
    """What the inputs of an element-wise operation carry jointly, on the dimensions that all of
    them leave sliceable; along the others it is tied together."""
    found = [
        joint.moved(range(out.dim() - t.dim(), out.dim()))
        for t in inputs
        for joint in ties.jointly(t)
    ]
    if not found:
        return []
    spread = {d for joint in found for d in joint.dims}
    common = set.intersection(*(set(joint.dims) for joint in found))
    for t in inputs:
        first = out.dim() - t.dim()
        own = {d + first for joint in ties.jointly(t) for d in joint.dims}
        for d in spread - own:
            if d < first or t.shape[d - first] != out.shape[d]:
                continue
            line = ties.apart(t)[d - first]
            if line is None:
                common.discard(d)
            else:
                found.append(Joint((d,), line))
                common &= {d}
    flat = [ties.flatten(joint, set(joint.dims) - common) for joint in found]
    if not common:
        for joint in flat:
            ties.freeze_nodes(joint.nodes)
        return []
    for other in flat[1:]:
        ties.tie(flat[0].nodes.reshape(-1), other.nodes.reshape(-1))
    return flat[:1]


def _convolution(
    ties: Ties,
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
    channels, (rows, columns, *kernel) = ties.of(x)[1], ties.of(weight)
    for side in kernel:
        ties.freeze_nodes(side)
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


def _matrix_product(ties: Ties, out: Tensor, a: Tensor, b: Tensor) -> None:
    _by_head(ties, a)
    _by_head(ties, b)
    left, right = ties.of(a), ties.of(b)
    ties.tie(left[-1], right[-2])
    for one, other in zip(left[:-2], right[:-2], strict=True):
        ties.tie(one, other)
    ties.give(out, [*left[:-1], right[-1]])


def _by_head(ties: Ties, x: Tensor) -> None:
    """A batched product takes each head by itself: what a factor carries over the batch dimension
    and another one is kept or dropped by whole heads."""
    for joint in ties.jointly(x):
        if x.dim() != 3 or 0 not in joint.dims:
            continue
        heads = ties.flatten(joint, joint.dims[1:])
        each = joint.nodes[0].size
        ties.heads.append(Heads(np.array(list(dict.fromkeys(heads.nodes.tolist()))), each))
        nodes = list(ties.apart(x))
        nodes[0] = heads.nodes
        ties.give(x, nodes, [other for other in ties.jointly(x) if other is not joint])


def _batched_affine(ties: Ties, out: Tensor, bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> None:
    _matrix_product(ties, out, a, b)
    _pointwise(ties, out, out, bias)


def _affine_product(ties: Ties, out: Tensor, bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> None:
    _matrix_product(ties, out, a, b)
    ties.tie(ties.of(bias)[-1], ties.of(out)[-1])


def _linear(ties: Ties, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    ties.tie(ties.of(x)[-1], ties.of(weight)[1])
    if bias is not None:
        ties.tie(ties.of(bias)[0], ties.of(weight)[0])
    ties.give(out, [*ties.of(x)[:-1], ties.of(weight)[0]])


def _channel_norm(ties: Ties, out: Any, x: Tensor, *rest: Any, **kwargs: Any) -> None:
    """Batch and group norm: affine and statistics follow the channels."""
    for tensor in tensors_in([rest, kwargs]):
        ties.tie(ties.of(x)[1], ties.of(tensor)[0])
    outs = list(tensors_in(out))
    ties.give(outs[0], ties.of(x))
    for extra in outs[1:]:
        ties.give(extra, [None] * extra.dim())


def _group_norm(ties: Ties, out: Any, x: Tensor, *rest: Any, **kwargs: Any) -> None:
    _channel_norm(ties, out, x, *rest, **kwargs)
    groups = rest[5]  # (weight, bias, N, C, H×W, groups, eps)
    if (channels := ties.of(x)[1]) is not None:
        ties.groups.update(dict.fromkeys(channels.tolist(), len(channels) // groups))


def _layer_norm(
    ties: Ties, out: Any, x: Tensor, shape: Sequence[int], *rest: Any, **kwargs: Any
) -> None:
    over = range(x.dim() - len(shape), x.dim())
    joints = [ties.flatten(joint, over) for joint in ties.jointly(x)]
    for joint in joints:
        if not joint.dims:
            ties.freeze_nodes(joint.nodes)
    for tensor in tensors_in([rest, kwargs]):
        for mine, other in zip(ties.apart(x)[-len(shape) :], ties.of(tensor), strict=True):
            ties.tie(mine, other)
    outs = list(tensors_in(out))
    ties.give(outs[0], ties.apart(x), [joint for joint in joints if joint.dims])
    for extra in outs[1:]:
        ties.give(extra, [None] * extra.dim())


def _spatial(ties: Ties, out: Any, x: Tensor, *_rest: Any, **_: Any) -> None:
    """Pooling, padding and resizing: channels pass through, a channel dimension whose size changed
    is frozen."""
    for tensor in tensors_in(out):
        nodes: Nodes = []
        for d, mine in enumerate(ties.of(x)):
            same = mine is not None and tensor.dim() == x.dim() and tensor.shape[d] == x.shape[d]
            if not same:
                ties.freeze_nodes(mine)
            nodes.append(mine if same else None)
        ties.give(tensor, nodes if tensor.dim() == x.dim() else [None] * tensor.dim())


def _reduce(
    ties: Ties, out: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **_: Any
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
    for tensor in tensors_in(out):
        ties.give(tensor, kept)


def _softmax(ties: Ties, out: Tensor, x: Tensor, dim: int, *_rest: Any, **_: Any) -> None:
    ties.freeze_nodes(ties.of(x)[dim])
    ties.give(out, ties.of(x))


def _same(ties: Ties, out: Any, x: Tensor, *_rest: Any, **_: Any) -> None:
    for tensor in tensors_in(out):
        if tensor.shape == x.shape:
            ties.give(tensor, ties.apart(x), ties.jointly(x))
        else:
            ties.give(tensor, [None] * tensor.dim())


def _expand(ties: Ties, out: Tensor, x: Tensor, *_rest: Any, **_: Any) -> None:
    """Also `repeat` of dimensions of one entry: those are the same for everyone."""
    first = out.dim() - x.dim()
    nodes: Nodes = [None] * out.dim()
    for d, mine in enumerate(ties.apart(x)):
        if out.shape[d + first] == x.shape[d] > 1:
            nodes[d + first] = mine
        else:
            ties.freeze_nodes(mine)
    joints = []
    for joint in ties.jointly(x):
        if all(out.shape[d + first] == x.shape[d] for d in joint.dims):
            joints.append(joint.moved(range(first, out.dim())))
        else:
            ties.freeze_nodes(joint.nodes)
    ties.give(out, nodes, joints)


def _uniform(ties: Ties, out: Tensor, *_: Any, **__: Any) -> None:
    """A constant of one value everywhere is the same in any size: it takes part in whatever it
    meets, if the network makes it in the right size."""
    ties.risky = True
    nodes: Nodes = [ties.fresh(size) for size in out.shape]
    for line in nodes:
        ties.made.update([] if line is None else line.tolist())
    ties.give(out, nodes)


def _embedding(ties: Ties, out: Tensor, weight: Tensor, *_rest: Any, **_: Any) -> None:
    ties.freeze_nodes(ties.of(weight)[0])
    ties.give(out, [*[None] * (out.dim() - 1), ties.of(weight)[1]])


def _permute(ties: Ties, out: Tensor, x: Tensor, dims: Sequence[int]) -> None:
    order = [d % x.dim() for d in dims]
    places = [order.index(d) for d in range(x.dim())]
    nodes, joints = ties.apart(x), ties.jointly(x)
    ties.give(out, [nodes[d] for d in order], [joint.moved(places) for joint in joints])


def _transpose(ties: Ties, out: Tensor, x: Tensor, a: int, b: int) -> None:
    order = list(range(x.dim()))
    order[a], order[b] = order[b], order[a]
    _permute(ties, out, x, order)


def _turn(ties: Ties, out: Tensor, x: Tensor) -> None:
    _permute(ties, out, x, list(range(x.dim()))[::-1])


def _cat(ties: Ties, out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> None:
    """Along the joined dimension the nodes line up one after another; an unsliceable part gets
    frozen nodes to hold its place."""
    dim = dim % out.dim()
    pieces = []
    for part in parts:
        nodes = ties.of(part)[dim]
        if nodes is None:
            nodes = ties.fresh(part.shape[dim])
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


def _stack(ties: Ties, out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> None:
    dim = dim % out.dim()
    nodes = list(ties.of(parts[0]))
    for part in parts[1:]:
        for mine, other in zip(nodes, ties.of(part), strict=True):
            ties.tie(mine, other)
    ties.give(out, [*nodes[:dim], None, *nodes[dim:]])


def _slice(
    ties: Ties,
    out: Tensor,
    x: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> None:
    dim = dim % x.dim()
    nodes = list(ties.apart(x))
    taken = nodes[dim]
    if out.shape[dim] == x.shape[dim]:
        ties.give(out, nodes, ties.jointly(x))
        return
    if taken is not None:
        # Where a table of the network is read in part (positions), its rest is no channel.
        ties.freeze_nodes(taken if id(x) in ties.states else None)
        ties.risky = True
        nodes[dim] = taken[start:end:step]
    ties.give(out, nodes, _all_along(ties, x, dim))


def _all_along(ties: Ties, x: Tensor, dim: int) -> list[Joint]:
    """What a tensor carries jointly, tied together along a dimension that is about to be taken
    apart."""
    joints = [ties.flatten(joint, [dim]) for joint in ties.jointly(x)]
    for joint in joints:
        if not joint.dims:
            ties.freeze_nodes(joint.nodes)
    return [joint for joint in joints if joint.dims]


def _select(ties: Ties, out: Tensor, x: Tensor, dim: int, index: int) -> None:  # noqa: ARG001 (aten's name)
    dim = dim % x.dim()
    nodes = list(ties.apart(x))
    taken = nodes.pop(dim)
    ties.freeze_nodes(taken)
    places = [d - (d > dim) for d in range(x.dim())]
    ties.give(out, nodes, [joint.moved(places) for joint in _all_along(ties, x, dim)])


def _unbind(ties: Ties, out: Sequence[Tensor], x: Tensor, dim: int = 0) -> None:
    for index, part in enumerate(out):
        _select(ties, part, x, dim, index)


def _split(ties: Ties, out: Sequence[Tensor], x: Tensor, sizes: Any, dim: int = 0) -> None:  # noqa: ARG001 (by aten's order)
    start = 0
    for part in out:
        _slice(ties, part, x, dim, start, start + part.shape[dim])
        start += part.shape[dim]


def _reshape(ties: Ties, out: Tensor, x: Tensor, *_: Any) -> None:
    """Dimensions are matched in blocks of equal size; inside a block the nodes are laid out and
    read back in the new shape."""
    nodes: Nodes = [None] * out.dim()
    joints: list[Joint] = []
    mine, joined = ties.apart(x), ties.jointly(x)
    blocks = _blocks(tuple(x.shape), tuple(out.shape))
    for joint in joined:
        touched = [block for block in blocks if set(block[0]) & set(joint.dims)]
        joints.append(_relaid(ties, joint, touched, x, out, mine))
        blocks = [block for block in blocks if block not in touched]
    for old, new in blocks:
        found = _refold(
            ties, [mine[d] for d in old], [x.shape[d] for d in old], [out.shape[d] for d in new]
        )
        if found is not None:
            joints.append(Joint(tuple(new[k] for k in found.dims), found.nodes))
    ties.give(out, nodes, [joint for joint in joints if joint.dims])


def _relaid(
    ties: Ties,
    joint: Joint,
    blocks: Sequence[tuple[list[int], list[int]]],
    x: Tensor,
    out: Tensor,
    mine: Nodes,
) -> Joint:
    old = [d for block in blocks for d in block[0]]
    new = [d for block in blocks for d in block[1]]
    if any(mine[d] is not None for d in old) or not set(joint.dims) <= set(old):
        ties.freeze_nodes(joint.nodes)
        for d in old:
            ties.freeze_nodes(mine[d])
        return Joint((), joint.nodes)
    laid = joint.nodes.reshape([x.shape[d] if d in joint.dims else 1 for d in old])
    laid = np.broadcast_to(laid, [x.shape[d] for d in old]).reshape([out.shape[d] for d in new])
    found = _varying(laid)
    return Joint(tuple(new[k] for k in found.dims), found.nodes)


def _varying(nodes: np.ndarray) -> Joint:
    """The nodes on those dimensions along which they differ (on the first, if on none)."""
    dims = tuple(k for k in range(nodes.ndim) if (nodes != nodes.take([0], axis=k)).any())
    dims = dims or (0,)
    return Joint(
        dims, nodes[tuple(slice(None) if k in dims else 0 for k in range(nodes.ndim))].copy()
    )


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


def _refold(ties: Ties, nodes: Nodes, old: list[int], new: list[int]) -> Joint | None:
    live = [d for d, n in enumerate(nodes) if n is not None]
    if len(live) != 1 or not new:
        for n in nodes:
            ties.freeze_nodes(n)
        return None
    d = live[0]
    line = nodes[d]
    assert line is not None
    block = np.broadcast_to(
        line.reshape([-1 if k == d else 1 for k in range(len(old))]), old
    ).reshape(new)
    found = _varying(block)
    return found if len(found.dims) == 1 else _varying(ties.roots(block))


RULES: dict[str, Callable[..., None]] = {
    "convolution": _convolution,
    "mm": _matrix_product,
    "bmm": _matrix_product,
    "baddbmm": _batched_affine,
    "addmm": _affine_product,
    "linear": _linear,
    "embedding": _embedding,
    "native_batch_norm": _channel_norm,
    "_native_batch_norm_legit": _channel_norm,
    "_native_batch_norm_legit_no_training": _channel_norm,
    "native_group_norm": _group_norm,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _layer_norm,
    "cat": _cat,
    "stack": _stack,
    "unbind": _unbind,
    "expand": _expand,
    "repeat": _expand,
    "permute": _permute,
    "transpose": _transpose,
    "transpose_": _transpose,
    "t": _turn,
    "view": _reshape,
    "_unsafe_view": _reshape,
    "reshape": _reshape,
    "unsqueeze": _reshape,
    "squeeze": _reshape,
    "slice": _slice,
    "select": _select,
    "split": _split,
    "unsafe_split": _split,
    "split_with_sizes": _split,
    "mean": _reduce,
    "sum": _reduce,
    "amax": _reduce,
    "max": _reduce,
    "_softmax": _softmax,
    "_safe_softmax": _softmax,
    "_log_softmax": _softmax,
    **dict.fromkeys(
        [
            f"{prefix}{kind}{suffix}"
            for kind in ("zeros", "ones", "full")
            for prefix, suffix in (("", ""), ("new_", ""), ("", "_like"))
        ],
        _uniform,
    ),
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

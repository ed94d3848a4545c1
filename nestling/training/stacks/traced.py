"""A stacked step written down: the operations of one step as a flat list, run without the machinery
that found them.

Batching an objective over clients costs interpreter time at every operation, which for a tiny
network is as much as its arithmetic. A step that keeps coming back is therefore traced once and
replayed: the same kernels on the same shapes in the same order, and so the same bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

OFTEN = 12
"""How often a step is taken the plain way before it is traced, which costs about as much as a
hundred such steps save."""

MOST = 256
"""How many kinds of steps are remembered."""

_seen: OrderedDict[Hashable, int | Callable[..., Any] | None] = OrderedDict()


def replayed(key: Hashable, compute: Callable[..., Any], *args: Any) -> Any:
    """`compute(*args)`, traced where steps of this key and these shapes are frequent. The key must
    tell apart whatever `compute` does beyond its arguments."""
    kind = (key, _form(args))
    known = _seen.get(kind, 0)
    if isinstance(known, int):
        known = known + 1 if known < OFTEN else _trace(compute, args)
        _seen[kind] = known
        while len(_seen) > MOST:
            _seen.popitem(last=False)
    return known(*args) if callable(known) else compute(*args)


def _trace(compute: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The step as a list of operations; None where it cannot be one."""
    try:
        program = make_fx(compute, tracing_mode="real")(*args)
    except Exception:  # whatever tracing cannot follow, the plain way can
        return None
    # A tensor that is not an argument may be another one next time.
    if any(node.op == "get_attr" for node in program.graph.nodes):
        return None
    program.source = compute  # type: ignore[assignment]  # kept alive with all it holds: a key may name an object by its address
    return program


def _form(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        (t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else t for t in _leaves(args)
    )


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for name, part in tree.items():
            yield name
            yield from _leaves(part)
    elif isinstance(tree, tuple):
        for part in tree:
            yield from _leaves(part)
    else:
        yield tree

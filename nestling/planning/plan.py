"""The plan of a training job: where everything lies in the arena, as the descriptor that the C
runtime is given."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from nestling.errors import InputError
from nestling.planning import descriptor
from nestling.planning.arena import aligned, floor_of, place
from nestling.planning.descriptor import (
    ADD_TO_FIRST,
    ADD_TO_SECOND,
    INPUT_GRADIENT,
    LINEAR,
    MOST_OPS,
    NONE,
    TRAINED,
    Header,
    Op,
)
from nestling.planning.graph import Graph, Node, Unsupported, affine_of, lower
from nestling.planning.lives import FLOAT, Lives, lives_of

_KINDS = {
    "conv": descriptor.CONV,
    "dense": descriptor.DENSE,
    "max_pool": descriptor.MAX_POOL,
    "avg_pool": descriptor.AVG_POOL,
    "add": descriptor.ADD,
    "group_norm": descriptor.GROUP_NORM,
    "affine": descriptor.AFFINE,
    "activation": descriptor.ACTIVATION,
}


@dataclass(frozen=True)
class PlanEntry:
    """A part of the block of parameters: its name in the module's state, and its place counted in
    floats."""

    name: str
    shape: tuple[int, ...]
    offset: int
    trained: bool

    @property
    def size(self) -> int:
        """How many floats it has."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class MemoryPlan:
    """A network ready for the C runtime.

    parts: the arena's bytes by what they are for; they add up to `header.arena`. floor: the least
           that the activations, gradients of
    values and the like could take at all.
    """

    graph: Graph
    header: Header
    ops: tuple[Op, ...]
    names: tuple[PlanEntry, ...]
    parts: dict[str, int]
    floor: int

    @cached_property
    def descriptor(self) -> bytes:
        """The plan as the bytes that the C runtime reads."""
        return descriptor.to_bytes(self.header, list(self.ops))

    @property
    def arena(self) -> int:
        """Bytes of the arena."""
        return self.header.arena

    @property
    def params(self) -> int:
        """Floats in the block of parameters, trained or not."""
        return self.header.params

    @property
    def trained(self) -> int:
        """How many of the parameters are trained."""
        return self.header.trained

    def pack(self, state: Mapping[str, Tensor]) -> np.ndarray:
        """The block of parameters with the values of a state."""
        flat = np.empty(self.header.params, np.float32)
        folded = self._folded(state)
        for entry in self.names:
            tensor = folded[entry.name] if entry.name in folded else state[entry.name]
            if tensor.numel() != entry.size:
                raise InputError(
                    f"{entry.name} has shape {tuple(tensor.shape)}, the plan {entry.shape}",
                    field=entry.name,
                )
            flat[entry.offset : entry.offset + entry.size] = (
                tensor.detach().to("cpu", torch.float32).reshape(-1).numpy()
            )
        return flat

    def unpack(self, flat: np.ndarray, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state `like` with the trained parts of it taken from the block of parameters."""
        if flat.shape != (self.header.params,):
            raise InputError(
                f"{flat.shape} values, the plan has {self.header.params} parameters",
                field="weights",
            )
        state = {name: tensor.detach().clone() for name, tensor in like.items()}
        for entry in self.names:
            if entry.trained:
                values = torch.from_numpy(
                    np.ascontiguousarray(flat[entry.offset : entry.offset + entry.size], np.float32)
                )
                old = state[entry.name]
                state[entry.name] = values.reshape(old.shape).to(old.device, old.dtype, copy=True)
        return state

    def mask(self, flags: Mapping[str, Tensor]) -> np.ndarray:
        """One flag for each trained parameter, in the plan's order; a name that is missing may move
        everywhere."""
        found = np.ones(self.header.trained, bool)
        for entry in self.names:
            if entry.trained and entry.name in flags:
                found[entry.offset : entry.offset + entry.size] = (
                    flags[entry.name].detach().cpu().reshape(-1).numpy() != 0
                )
        return found

    def _folded(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a batch norm with fixed statistics comes to, in the places of its statistics."""
        found: dict[str, Tensor] = {}
        for node in self.graph.nodes:
            if node.mean is not None and node.variance is not None:
                found[node.variance], found[node.mean] = affine_of(node, state)
        return found


def plan(
    network: nn.Module | Graph,
    shape: Sequence[int] | None = None,
    *,
    freeze: Iterable[str] = (),
    momentum: bool = False,
    anchor: bool = False,
    mask: bool = False,
    target: bool = False,
    present: bool = False,
    scales: Sequence[tuple[Sequence[str], float]] = (),
) -> MemoryPlan:
    """The plan of training a network on samples of `shape` (not needed with a graph).

    freeze: prefixes of parameter names that are not trained, as in a phase. momentum, anchor, mask,
            target, present: which of these
    blocks the job needs. scales: what the results of convolutions are multiplied by, each with the
    names of the layers (none: all of them).
    """
    graph = _sunk(network if isinstance(network, Graph) else lower(network, tuple(shape or ())))
    if len(graph.nodes) > MOST_OPS:
        raise Unsupported(
            "",
            f"room for {len(graph.nodes)} operations (at most {MOST_OPS})",
            "take a shallower network",
        )
    _refuse_batch_norms(graph, tuple(freeze))
    entries = _entries(graph, tuple(freeze))
    trained = _trained_nodes(graph, {entry.name for entry in entries if entry.trained})
    lives = lives_of(graph, trained)
    blocks = _blocks(
        entries, graph, momentum=momentum, anchor=anchor, mask=mask, target=target, present=present
    )
    base = sum(blocks.values())
    offsets, scratch = place(lives.buffers)
    places = _Places(
        graph,
        lives,
        [base + offset for offset in offsets],
        {entry.name: entry.offset for entry in entries},
    )
    ops = tuple(
        _op(places, index, _scale(graph.nodes[index], scales)) for index in range(len(graph.nodes))
    )
    header = _header(places, len(ops), entries, blocks, base + scratch)
    parts = {name: size for name, size in (*blocks.items(), ("activations", scratch)) if size}
    return MemoryPlan(graph, header, ops, entries, parts, floor_of(lives.buffers))


def _sunk(graph: Graph) -> Graph:
    """The graph with activation functions behind max-pooling instead of before: the same values and
    the same gradients, but the large map need not be kept for the backward."""
    readers = [value for node in graph.nodes for value in node.inputs]
    maker = {node.output: index for index, node in enumerate(graph.nodes)}
    nodes = list(graph.nodes)
    for index, node in enumerate(nodes):
        source = maker.get(node.inputs[0])
        if (
            node.kind != "max_pool"
            or node.activation
            or source is None
            or readers.count(node.inputs[0]) > 1
        ):
            continue
        if nodes[source].kind != "activation":
            nodes[index] = replace(node, activation=nodes[source].activation)
            nodes[source] = replace(nodes[source], activation=LINEAR)
    return replace(graph, nodes=tuple(nodes))


def _frozen(name: str, freeze: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in freeze)


def _entries(graph: Graph, freeze: tuple[str, ...]) -> tuple[PlanEntry, ...]:
    """What the block of parameters holds: the trained ones in the order of the state, then the
    others."""
    own = {name for node in graph.nodes for name in _own(node)}
    used = [name for name in graph.weights if name in own]
    trains = {name: name in graph.trainable and not _frozen(name, freeze) for name in used}
    found, offset = [], 0
    for wanted in (True, False):
        for name in used:
            if trains[name] == wanted:
                found.append(PlanEntry(name, tuple(graph.weights[name]), offset, wanted))
                offset += math.prod(graph.weights[name])
    return tuple(found)


def _own(node: Node) -> tuple[str | None, str | None]:
    """What lies at an operation's weight and bias; for a batch norm with fixed statistics their
    places hold scale and shift."""
    return (node.weight, node.bias) if node.mean is None else (node.variance, node.mean)


def _trained_nodes(graph: Graph, names: set[str]) -> frozenset[int]:
    return frozenset(
        index for index, node in enumerate(graph.nodes) if names.intersection(_own(node))
    )


def _refuse_batch_norms(graph: Graph, freeze: tuple[str, ...]) -> None:
    for node in graph.nodes:
        own = [
            name
            for name in (node.weight, node.bias)
            if name in graph.trainable and not _frozen(name or "", freeze)
        ]
        if node.mean is not None and own:
            raise Unsupported(
                node.layer, "training of a batch normalisation", f"freeze {node.layer!r}"
            )


def _blocks(
    entries: tuple[PlanEntry, ...],
    graph: Graph,
    *,
    momentum: bool,
    anchor: bool,
    mask: bool,
    target: bool,
    present: bool,
) -> dict[str, int]:
    """Bytes of the blocks that stay for the whole job, in the order in which they lie in the
    arena."""
    params = sum(entry.size for entry in entries)
    trained = sum(entry.size for entry in entries if entry.trained)
    classes = math.prod(graph.shapes[graph.output])
    return {
        "weights": FLOAT * params,
        "gradients": FLOAT * trained,
        "momentum": FLOAT * trained * momentum,
        "anchor": FLOAT * trained * anchor,
        "mask": aligned(-(-trained // 8)) * mask,
        "target": FLOAT * classes * target,
        "present": FLOAT * classes * present,
    }


@dataclass(frozen=True, eq=False)
class _Places:
    """Offsets in the arena."""

    graph: Graph
    lives: Lives
    offsets: list[int]  # by buffer
    weights: dict[str, int]  # by name, in floats

    def of(self, table: dict[int, int], key: int) -> int:
        return self.offsets[table[key]] if key in table else NONE


def _scale(node: Node, scales: Sequence[tuple[Sequence[str], float]]) -> float:
    own = [
        scale
        for names, scale in scales
        if node.kind == "conv" and (not names or node.layer in names)
    ]
    return float(np.float32(math.prod(own)))


def _op(places: _Places, index: int, scale: float) -> Op:
    graph, lives = places.graph, places.lives
    node = graph.nodes[index]
    works = index in lives.trained or index in lives.hands_on
    inputs = [places.of(lives.activation, value) for value in node.inputs]
    given = [
        places.of(lives.gradient, value) if index in lives.hands_on else NONE
        for value in node.inputs
    ]
    channels, high, wide = graph.shapes[node.inputs[0]]
    made, rows, columns = graph.shapes[node.output]
    if node.kind == "dense":
        channels, high, wide = channels * high * wide, 1, 1
    weight, bias = _own(node)
    op = Op(
        _KINDS[node.kind],
        _flags(lives, index),
        node.activation,
        first=inputs[0],
        second=inputs[1] if len(inputs) > 1 else NONE,
        out=places.of(lives.activation, node.output),
        first_grad=given[0],
        second_grad=given[1] if len(given) > 1 else NONE,
        out_grad=places.of(lives.gradient, node.output) if works else NONE,
        aux=places.of(lives.aux, index),
        weight=NONE if weight is None else places.weights[weight],
        bias=NONE if bias is None else places.weights[bias],
        in_channels=channels,
        in_height=high,
        in_width=wide,
        out_channels=made,
        out_height=rows,
        out_width=columns,
        kernel_height=node.kernel[0],
        kernel_width=node.kernel[1],
        stride_height=node.stride[0],
        stride_width=node.stride[1],
        pad_top=node.padding[0],
        pad_left=node.padding[1],
        groups=node.groups,
        scale=scale,
        eps=float(np.float32(node.eps)) if node.kind == "group_norm" else 0.0,
    )
    return _checked(op, node)


def _flags(lives: Lives, index: int) -> int:
    flags = TRAINED if index in lives.trained else 0
    if index in lives.hands_on:
        adds = lives.adds[index]
        flags |= (
            INPUT_GRADIENT
            | (ADD_TO_FIRST if adds[0] else 0)
            | (ADD_TO_SECOND if len(adds) > 1 and adds[1] else 0)
        )
    return flags


def _checked(op: Op, node: Node) -> Op:
    """The record, if its sizes go into the descriptor's fields."""
    sizes = (
        op.in_channels,
        op.in_height,
        op.in_width,
        op.out_channels,
        op.out_height,
        op.out_width,
        op.groups,
    )
    small = (
        op.kernel_height,
        op.kernel_width,
        op.stride_height,
        op.stride_width,
        op.pad_top,
        op.pad_left,
    )
    if max(sizes) >= 1 << 16 or max(small) >= 1 << 8:
        raise Unsupported(
            node.layer,
            f"{node.kind} of such a size",
            "sides and channels are below 65536, windows below 256",
        )
    return op


def _header(
    places: _Places, ops: int, entries: tuple[PlanEntry, ...], blocks: dict[str, int], arena: int
) -> Header:
    graph, lives = places.graph, places.lives
    starts, at = {}, 0
    for name, size in blocks.items():
        starts[name] = at if size or name in ("weights", "gradients") else NONE
        at += size
    channels, high, wide = graph.shapes[graph.input]
    return Header(
        ops=ops,
        params=sum(entry.size for entry in entries),
        trained=sum(entry.size for entry in entries if entry.trained),
        arena=arena,
        weights=starts["weights"],
        grads=starts["gradients"],
        momentum=starts["momentum"],
        anchor=starts["anchor"],
        mask=starts["mask"],
        input=places.of(lives.activation, graph.input),
        in_channels=channels,
        in_height=high,
        in_width=wide,
        output=places.of(lives.activation, graph.output),
        output_grad=places.of(lives.gradient, graph.output),
        classes=math.prod(graph.shapes[graph.output]),
        target=starts["target"],
        present=starts["present"],
    )

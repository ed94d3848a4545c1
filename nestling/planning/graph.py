"""A network as the operations that the C runtime and the exporters know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from nestling.models.record import Operation, Record, record
from nestling.planning.descriptor import LINEAR
from nestling.planning.node import Node, Shape, Unsupported, planar
from nestling.planning.translate import Builder

__all__ = ["Graph", "Node", "Unsupported", "affine_of", "lower", "lower_record"]


@dataclass(frozen=True)
class Graph:
    """The operations of one sample's forward pass in order. `shapes` are (channels, height, width)
    by value; a vector is (n, 1, 1).

    weights: the shape of every entry of the module's state that an operation uses, in the order of
             the state.
    trainable: those of them that the module trains.
    """

    nodes: tuple[Node, ...]
    shapes: tuple[Shape, ...]
    input: int
    output: int
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    trainable: frozenset[str] = frozenset()


def lower(module: nn.Module, shape: tuple[int, ...], *, inference: bool = False) -> Graph:
    """The network as a graph for samples of `shape` (no batch), from one recorded forward without
    computation.

    With `inference` the module is taken in evaluation mode, and a batch norm with running
    statistics becomes an "affine".
    """
    return lower_record(
        record(module, tuple(shape), training=not inference),
        module,
        shape,
        inference=inference,
    )


def lower_record(
    forward: Record, module: nn.Module, shape: tuple[int, ...], *, inference: bool = False
) -> Graph:
    """`lower` of a forward that is recorded already."""
    operations = _wanted(forward)
    _refuse_by_kind(module, operations)
    builder = Builder(forward, planar(tuple(shape)), inference)
    for operation in operations:
        builder.add(operation)
    nodes, output = builder.nodes, builder.result()
    return _tidy(_fused(nodes, output), builder.shapes, builder.first, output, module)


def _refuse_by_kind(module: nn.Module, operations: Sequence[Operation]) -> None:
    """Calls a network of another kind by what it is, and not by the first of its operations that is
    missing."""
    fix = (
        "give that tier a network of convolutions or dense layers (model = ...) and a method that "
        "fuses unlike networks, or give it no board"
    )
    for name, part in module.named_modules():
        if isinstance(part, (nn.RNNBase, nn.RNNCellBase)):
            raise Unsupported(name, f"{type(part).__name__}, or other recurrent layer", fix)
    for operation in operations:
        if operation.name in _OF_TWO_MAPS or "scaled_dot_product" in operation.name:
            raise Unsupported(operation.layer, "attention (a product of two maps)", fix)
    for operation in operations:
        if operation.name == "embedding":
            raise Unsupported(operation.layer, "embedding: its inputs are numbers", fix)


_OF_TWO_MAPS = ("bmm", "baddbmm")


def _wanted(forward: Record) -> list[Operation]:
    """The operations on the way from the input to the output."""
    wanted, found = set(forward.outputs), []
    for operation in reversed(forward.operations):
        if operation.on_path and wanted.intersection(operation.writes):
            wanted.update(operation.reads)
            found.append(operation)
    return found[::-1]


def affine_of(node: Node, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Scale and shift per channel of an "affine" node, a batch norm's statistics included."""
    scale, shift, mean, variance = (
        None if name is None else state[name].detach().double().flatten()
        for name in (node.weight, node.bias, node.mean, node.variance)
    )
    like = next(part for part in (scale, shift, variance) if part is not None)
    scale = torch.ones_like(like) if scale is None else scale
    shift = torch.zeros_like(like) if shift is None else shift
    if mean is not None and variance is not None:
        scale = scale / torch.sqrt(variance + node.eps)
        shift = shift - mean * scale
    return scale.float(), shift.float()


def _fused(nodes: list[Node], output: int) -> list[Node]:
    """The nodes with every activation, and every shift after a scale, merged into the operation
    whose result only it reads."""
    readers: dict[int, int] = {output: 1}
    for node in nodes:
        for value in node.inputs:
            readers[value] = readers.get(value, 0) + 1
    merged: list[Node] = []
    writer: dict[int, int] = {}
    for node in nodes:
        at = writer.get(node.inputs[0], -1)
        both = _merged(merged[at], node) if at >= 0 and readers[node.inputs[0]] == 1 else None
        if both is None:
            at = len(merged)
            merged.append(node)
        else:
            merged[at] = both
        writer[node.output] = at
    return merged


def _merged(host: Node, node: Node) -> Node | None:
    """Both operations as one, if there is an operation that does both."""
    if host.activation != LINEAR:
        return None
    if node.kind == "activation":
        return replace(host, activation=node.activation, output=node.output)
    if (
        node.kind == host.kind == "affine"
        and node.weight is None
        and host.bias is None
        and host.mean is None
    ):
        return replace(host, bias=node.bias, output=node.output)
    return None


def _tidy(
    nodes: list[Node], shapes: list[Shape], first: int, output: int, module: nn.Module
) -> Graph:
    """The graph without what the output does not depend on, its values numbered in order."""
    wanted, kept = {output}, []
    for node in reversed(nodes):
        if node.output in wanted:
            wanted.update(node.inputs)
            kept.append(node)
    kept.reverse()
    order = [first, *(node.output for node in kept)]
    number = {value: place for place, value in enumerate(order)}
    renamed = [
        replace(node, inputs=tuple(number[v] for v in node.inputs), output=number[node.output])
        for node in kept
    ]
    _refuse_two_names(module)
    names = {
        name for node in kept for name in (node.weight, node.bias, node.mean, node.variance) if name
    }
    weights = {
        name: tuple(tensor.shape) for name, tensor in module.state_dict().items() if name in names
    }
    trainable = frozenset(
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name in names
    )
    return Graph(
        tuple(renamed),
        tuple(shapes[value] for value in order),
        0,
        number[output],
        weights,
        trainable,
    )


def _refuse_two_names(module: nn.Module) -> None:
    """A weight under two names would come back under one of them only."""
    once = {name for name, _ in module.named_parameters()}
    for name, _ in module.named_parameters(remove_duplicate=False):
        if name not in once:
            raise Unsupported(
                name, "second name for a weight", "give every layer weights of its own"
            )

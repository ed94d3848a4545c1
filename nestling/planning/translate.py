"""From recorded operations of torch to nodes, one function per kind. What cannot be said with nodes
is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from nestling.models.record import Operation, Record, Seen
from nestling.planning.descriptor import RELU, RELU6
from nestling.planning.node import Node, Shape, Unsupported, planar

_BATCH_NORMS = {
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "_batch_norm_no_update",
    "_batch_norm_with_update", "_native_batch_norm_legit_functional", "cudnn_batch_norm",
}  # fmt: skip


class Builder:
    """Turns recorded operations into nodes. A storage that is written in place gets a new value
    each time."""

    def __init__(self, forward: Record, shape: Shape, inference: bool) -> None:
        """Starts with the input as value 0 and no node."""
        self.forward, self.inference = forward, inference
        self.nodes: list[Node] = []
        self.shapes: list[Shape] = [shape]
        self.first = 0
        self.current = {forward.inputs[0]: 0}  # storage -> the value that it holds now

    def add(self, operation: Operation) -> None:
        """Appends the node of an operation; one without a translation, or that mixes rows, is
        refused."""
        translate = _TRANSLATIONS.get(operation.name)
        if translate is None:
            raise Unsupported(
                operation.layer, _wording(operation.name), _FIXES.get(operation.name, _KNOWN)
            )
        if operation.shape and operation.shape[0] != self.forward.batch:
            raise Unsupported(
                operation.layer, f"{_wording(operation.name)} over several rows at once", _KNOWN
            )
        node = translate(self, operation)
        self.current.update(dict.fromkeys(operation.writes, node.output))
        self.nodes.append(node)

    def result(self) -> int:
        """The value that the network returns; it must be one, and made from the input."""
        if len(self.forward.outputs) != 1:
            raise Unsupported(
                "",
                "several outputs",
                "give a network that returns the logits alone, such as one exit of it",
            )
        value = self.current.get(self.forward.outputs[0])
        if value is None or value == self.first:
            raise Unsupported(
                "", "output that does not depend on the input", "give a network that returns logits"
            )
        return value

    def value(self, operation: Operation, argument: str) -> int:
        """The value an operation reads; it must see all of it, in order."""
        seen = operation.arguments.get(argument)
        value = (
            self.current.get(seen.value)
            if isinstance(seen, Seen) and seen.value is not None
            else None
        )
        if value is None or not isinstance(seen, Seen):
            raise Unsupported(
                operation.layer, f"{_wording(operation.name)} with a constant or a weight", _KNOWN
            )
        if not seen.whole:
            raise Unsupported(
                operation.layer,
                f"{_wording(operation.name)} of a part or of a transposed map",
                _KNOWN,
            )
        return value

    def map(self, operation: Operation, argument: str) -> int:
        """The value an operation reads as a map; it must not have been reshaped on the way."""
        value = self.value(operation, argument)
        seen = _squeezed(operation.arguments[argument].shape[1:])
        if seen != self.shapes[value] and not (
            len(seen) == 3 and math.prod(seen) == seen[0] == math.prod(self.shapes[value])
        ):
            raise Unsupported(
                operation.layer,
                f"{_wording(operation.name)} of a reshaped value",
                "keep channels, rows and columns",
            )
        return value

    def weight(self, operation: Operation, argument: str, transposed: bool = False) -> str | None:
        """The name of the weight an operation is given, or None; it must be a whole tensor of the
        state."""
        seen = operation.arguments.get(argument)
        if seen is None:
            return None
        if not isinstance(seen, Seen) or seen.name is None:
            raise Unsupported(
                operation.layer, f"{_wording(operation.name)} with a computed {argument}", _KNOWN
            )
        if not (seen.transposed if transposed else seen.whole):
            raise Unsupported(
                operation.layer, f"{_wording(operation.name)} with a part of {seen.name}", _KNOWN
            )
        return seen.name

    def make(self, shape: tuple[int, ...]) -> int:
        """The number of a new value of this shape."""
        self.shapes.append(_squeezed(shape))
        return len(self.shapes) - 1


def _squeezed(shape: tuple[int, ...]) -> Shape:
    if len(shape) > 3 or not shape:
        raise Unsupported("", f"value of shape {shape}", _KNOWN)
    return planar(shape)


def _pair(numbers: Any, default: int) -> tuple[int, int]:
    """Rows and columns of a setting that torch gives as a number, a list of one (a sequence or both
    alike), of two, or not at all."""
    if numbers is None or numbers == []:
        return (default, default)
    if isinstance(numbers, int):
        return (numbers, numbers)
    return (numbers[0], numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _conv(builder: Builder, operation: Operation) -> Node:
    given = operation.arguments
    flat = len(given["weight"].shape) == 3
    if given["transposed"] or len(given["weight"].shape) > 4:
        raise Unsupported(
            operation.layer,
            "transposed or 3-D convolution",
            "use an ordinary 1-D or 2-D convolution",
        )
    if any(side != 1 for side in given["dilation"]):
        raise Unsupported(operation.layer, "dilation", "use dilation = 1")

    def sides(numbers: list[int], other: int) -> tuple[int, int]:
        return (other, numbers[0]) if flat else _pair(numbers, other)

    return Node(
        "conv",
        (builder.map(operation, "input"),),
        builder.make(operation.shape[1:]),
        builder.weight(operation, "weight"),
        builder.weight(operation, "bias"),
        kernel=sides(list(given["weight"].shape[2:]), 1),
        stride=sides(given["stride"], 1),
        padding=sides(given["padding"], 0),
        groups=given["groups"],
        layer=operation.layer,
    )


def _dense(builder: Builder, operation: Operation) -> Node:
    given = operation.arguments
    source, matrix, bias = (
        ("mat1", "mat2", "self") if operation.name == "addmm" else ("self", "mat2", None)
    )
    if any(given.get(factor, 1) != 1 for factor in ("alpha", "beta")):
        raise Unsupported(operation.layer, "scaled product", _KNOWN)
    value = builder.value(operation, source)
    if math.prod(builder.shapes[value]) != given[source].shape[-1]:
        raise Unsupported(
            operation.layer, "dense layer over several rows at once", "flatten the sample first"
        )
    weight = builder.weight(operation, matrix, transposed=True)
    shift = builder.weight(operation, bias) if bias else None
    return Node(
        "dense", (value,), builder.make(operation.shape[1:]), weight, shift, layer=operation.layer
    )


def _max_pool(builder: Builder, operation: Operation) -> Node:
    given = operation.arguments
    if _pair(given.get("dilation"), 1) != (1, 1):
        raise Unsupported(operation.layer, "dilated pooling", "use dilation = 1")
    kernel = _pair(given["kernel_size"], 1)
    stride = _pair(given.get("stride"), 1) if given.get("stride") else kernel
    return _pool(builder, operation, "max_pool", kernel, stride, _pair(given.get("padding"), 0))


def _avg_pool(builder: Builder, operation: Operation) -> Node:
    given = operation.arguments
    kernel = _pair(given["kernel_size"], 1)
    stride = _pair(given.get("stride"), 1) if given.get("stride") else kernel
    padding = _pair(given.get("padding"), 0)
    padded = padding != (0, 0) or given.get("ceil_mode", False)
    if (
        given.get("divisor_override")
        or given.get("ceil_mode")
        or (padded and not given.get("count_include_pad", True))
    ):
        raise Unsupported(
            operation.layer,
            "average over a cut window",
            "use no padding, ceil_mode or divisor_override",
        )
    return _pool(builder, operation, "avg_pool", kernel, stride, padding)


def _adaptive(builder: Builder, operation: Operation) -> Node:
    kind = "max_pool" if "max" in operation.name else "avg_pool"
    _, high, wide = builder.shapes[builder.map(operation, "self")]
    _, rows, columns = _squeezed(operation.shape[1:])
    if high % rows or wide % columns:
        fix = f"give an output size that divides {high}x{wide}"
        raise Unsupported(
            operation.layer, f"adaptive pooling of {high}x{wide} to {rows}x{columns}", fix
        )
    kernel = (high // rows, wide // columns)
    return _pool(builder, operation, kind, kernel, kernel, (0, 0))


def _mean(builder: Builder, operation: Operation) -> Node:
    given = operation.arguments
    shape = given["self"].shape
    axes = {axis % len(shape) for axis in given.get("dim") or range(len(shape))}
    if min(axes) < 2:
        raise Unsupported(
            operation.layer, "mean over channels", "take means over rows and columns only"
        )
    sides = [size if axis in axes else 1 for axis, size in enumerate(shape)][2:]
    kernel = (1, sides[0]) if len(sides) == 1 else (sides[0], sides[1])
    value = builder.map(operation, "self")
    channels, high, wide = builder.shapes[value]
    builder.shapes.append((channels, high // kernel[0], wide // kernel[1]))
    return Node(
        "avg_pool",
        (value,),
        len(builder.shapes) - 1,
        kernel=kernel,
        stride=kernel,
        layer=operation.layer,
    )


def _pool(
    builder: Builder,
    operation: Operation,
    kind: str,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> Node:
    value = builder.map(operation, "self")
    if kind == "max_pool" and math.prod(kernel) > 256:
        raise Unsupported(
            operation.layer,
            f"maximum over {math.prod(kernel)} values",
            "use a window of at most 256",
        )
    output = builder.make(operation.shape[1:])
    return Node(
        kind, (value,), output, kernel=kernel, stride=stride, padding=padding, layer=operation.layer
    )


def _add(builder: Builder, operation: Operation) -> Node:
    given = operation.arguments
    if given.get("alpha", 1) != 1:
        raise Unsupported(operation.layer, "scaled sum", "add the values as they are")
    if _has_weight(given):
        return _affine(builder, operation)
    pair = builder.value(operation, "self"), builder.value(operation, "other")
    if (
        len({builder.shapes[value] for value in pair}) != 1
        or given["self"].shape != given["other"].shape
    ):
        raise Unsupported(operation.layer, "sum of unequal shapes", "add values of one shape")
    return Node("add", pair, builder.make(operation.shape[1:]), layer=operation.layer)


def _affine(builder: Builder, operation: Operation) -> Node:
    """A weight per channel that a map is multiplied by or that is added to it."""
    given = operation.arguments
    weight, source = ("self", "other") if given["self"].name else ("other", "self")
    value, name = builder.map(operation, source), builder.weight(operation, weight)
    channels, shape = builder.shapes[value][0], given[weight].shape
    aligned = (1,) * (len(given[source].shape) - len(shape)) + shape
    if aligned[1:2] != (channels,) or math.prod(shape) != channels:
        raise Unsupported(
            operation.layer,
            f"{_wording(operation.name)} with {name} of shape {shape}",
            "give one number a channel",
        )
    scale, shift = (name, None) if operation.name == "mul" else (None, name)
    return Node(
        "affine", (value,), builder.make(operation.shape[1:]), scale, shift, layer=operation.layer
    )


def _mul(builder: Builder, operation: Operation) -> Node:
    if not _has_weight(operation.arguments):
        raise Unsupported(
            operation.layer, "product of values, as in dropout", _FIXES.get(operation.name, _KNOWN)
        )
    return _affine(builder, operation)


def _has_weight(given: Mapping[str, Any]) -> bool:
    sides = [given["self"], given["other"]]
    return (
        all(isinstance(side, Seen) for side in sides)
        and sum(side.name is not None for side in sides) == 1
    )


def _group_norm(builder: Builder, operation: Operation) -> Node:
    given = operation.arguments
    return Node(
        "group_norm",
        (builder.map(operation, "input"),),
        builder.make(operation.shape[1:]),
        builder.weight(operation, "weight"),
        builder.weight(operation, "bias"),
        groups=given["group"],
        eps=given["eps"],
        layer=operation.layer,
    )


def _batch_norm(builder: Builder, operation: Operation) -> Node:
    given = operation.arguments
    fixed = not given.get("training", "no_" not in operation.name)
    if not fixed or not builder.inference:
        raise Unsupported(operation.layer, "batch normalisation", _FIXES["native_batch_norm"])
    return Node(
        "affine",
        (builder.map(operation, "input"),),
        builder.make(operation.shape[1:]),
        builder.weight(operation, "weight"),
        builder.weight(operation, "bias"),
        eps=given["eps"],
        mean=builder.weight(operation, "running_mean"),
        variance=builder.weight(operation, "running_var"),
        layer=operation.layer,
    )


def _activation(builder: Builder, operation: Operation) -> Node:
    given = operation.arguments
    low, high = given.get("min_val", given.get("min", 0)), given.get("max_val", given.get("max"))
    kinds = {(0, None): RELU, (0, 6): RELU6}
    kind = RELU if operation.name == "relu" else kinds.get((low, high))
    if kind is None:
        raise Unsupported(
            operation.layer, f"{_wording(operation.name)} from {low} to {high}", "use ReLU or ReLU6"
        )
    value = builder.value(operation, "self")
    builder.shapes.append(builder.shapes[value])
    return Node(
        "activation", (value,), len(builder.shapes) - 1, activation=kind, layer=operation.layer
    )


_TRANSLATIONS: dict[str, Callable[[Builder, Operation], Node]] = {
    "convolution": _conv,
    "addmm": _dense,
    "mm": _dense,
    "max_pool2d_with_indices": _max_pool,
    "avg_pool1d": _avg_pool,
    "avg_pool2d": _avg_pool,
    "_adaptive_avg_pool2d": _adaptive,
    "adaptive_avg_pool2d": _adaptive,
    "adaptive_max_pool2d": _adaptive,
    "mean": _mean,
    "add": _add,
    "mul": _mul,
    "native_group_norm": _group_norm,
    "relu": _activation,
    "hardtanh": _activation,
    "clamp": _activation,
    "clamp_min": _activation,
    **dict.fromkeys(_BATCH_NORMS, _batch_norm),
}

_WORDS = {
    **dict.fromkeys(_BATCH_NORMS, "batch normalisation"),
    "convolution": "convolution", "addmm": "dense layer", "mm": "dense layer",
    "bmm": "batched matrix product",
    "native_layer_norm": "layer normalisation", "cat": "concatenation", "gelu": "GELU",
    "silu": "SiLU", "bernoulli": "dropout",
    "native_dropout": "dropout", "mul": "product",
    "embedding": "embedding", "_softmax": "softmax", "_log_softmax": "softmax", "mean": "mean",
    "max_pool2d_with_indices": "max-pooling", "native_group_norm": "group normalisation",
    "add": "sum", "clamp": "clamp",
    "constant_pad_nd": "padding apart from a convolution",
}  # fmt: skip

_KNOWN = (
    "build it of 1-D or 2-D convolutions, dense layers, max or average pooling, residual "
    "sums, group normalisation, ReLU and ReLU6"
)
_FIXES = {
    "native_batch_norm": 'use model.norm = "group" or "none": a board sees one sample at a time',
    "gelu": "use ReLU or ReLU6",
    "silu": "use ReLU or ReLU6",
    "bernoulli": "use dropout = 0",
    "mul": "scale channels by a weight of their number; use dropout = 0",
    "native_dropout": "use dropout = 0",
}


def _wording(name: str) -> str:
    return _WORDS.get(name, f"operation {name!r}")

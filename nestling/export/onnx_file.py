"""A network in float32 as an ONNX file, for devices that run a general runtime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nestling.errors import InputError
from nestling.export.fold import FoldedLayer, FoldedNetwork, paddings
from nestling.planning.descriptor import RELU, RELU6

OPSET, IR_VERSION = 13, 8
"""Old enough for runtimes of several years ago, new enough for all that is used."""


@dataclass
class _File:
    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)

    def add(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        from onnx import helper

        self.nodes.append(
            helper.make_node(kind, inputs, [output], name=f"{kind}_{len(self.nodes)}", **attributes)
        )
        return output

    def constant(self, name: str, data: np.ndarray) -> str:
        from onnx import numpy_helper

        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(data), name))
        return name


def write(network: FoldedNetwork, shape: tuple[int, ...], name: str = "model") -> bytes:
    """The file's bytes, for batches of any size of samples of `shape`."""
    try:
        from onnx import TensorProto, checker, helper
    except ImportError:
        fix = "pip install 'nestling[export]', or leave onnx out"
        raise InputError("the package onnx is not installed", field="--format", fix=fix) from None
    file = _File()
    names = {network.input: _as_map(file, network, shape), network.output: "output"}
    for layer in network.layers:
        names.setdefault(layer.output, f"value_{layer.output}")
        _write_layer(
            file, layer, network, [names[value] for value in layer.inputs], names[layer.output]
        )
    classes = int(np.prod(network.shapes[network.output]))
    graph = helper.make_graph(
        file.nodes,
        name,
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", *shape])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", classes])],
        file.constants,
    )
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(
        graph, producer_name="nestling", opset_imports=opsets, ir_version=IR_VERSION
    )
    checker.check_model(model, full_check=True)
    return model.SerializeToString()


def _as_map(file: _File, network: FoldedNetwork, shape: tuple[int, ...]) -> str:
    """The input as channels, rows, columns, where something other than a dense layer reads it."""
    readers = [layer.kind for layer in network.layers if network.input in layer.inputs]
    if len(shape) == 3 or set(readers) == {"dense"}:
        return "input"
    sizes = file.constant("input_shape", np.array([-1, *network.shapes[network.input]], np.int64))
    return file.add("Reshape", ["input", sizes], "input_map")


def _write_layer(
    file: _File, layer: FoldedLayer, network: FoldedNetwork, inputs: list[str], output: str
) -> None:
    plain = f"{output}_linear" if layer.activation in (RELU, RELU6) else output
    if layer.kind in ("conv", "dense"):
        _weighted(file, layer, network, inputs, plain)
    elif layer.kind in ("max_pool", "avg_pool"):
        _pool(file, layer, network, inputs, plain)
    elif layer.kind == "add":
        file.add("Add", inputs, plain)
    elif layer.kind == "group_norm":
        _group_norm(file, layer, network, inputs[0], plain)
    else:
        plain = inputs[0]
    if layer.activation == RELU:
        file.add("Relu", [plain], output)
    elif layer.activation == RELU6:
        low, high = (file.constant(f"{output}_{end}", np.array(end, np.float32)) for end in (0, 6))
        file.add("Clip", [plain, low, high], output)


def _weighted(
    file: _File, layer: FoldedLayer, network: FoldedNetwork, inputs: list[str], output: str
) -> None:
    weights = [
        file.constant(f"{output}_{k}", t.numpy())
        for k, t in (("weight", layer.weight), ("bias", layer.bias))
    ]
    if layer.kind == "conv":
        file.add("Conv", [*inputs, *weights], output, **_window(layer, network), group=layer.groups)
    else:
        flat = file.add("Flatten", inputs, f"{output}_flat", axis=1)
        file.add("Gemm", [flat, *weights], output, transB=1)


def _pool(
    file: _File, layer: FoldedLayer, network: FoldedNetwork, inputs: list[str], output: str
) -> None:
    if layer.kind == "max_pool":
        file.add("MaxPool", inputs, output, **_window(layer, network))
    else:
        file.add("AveragePool", inputs, output, **_window(layer, network), count_include_pad=1)


def _window(layer: FoldedLayer, network: FoldedNetwork) -> dict[str, list[int]]:
    (top, bottom), (left, right) = paddings(layer, network)
    return {
        "kernel_shape": [*layer.kernel],
        "strides": [*layer.stride],
        "pads": [top, left, bottom, right],
    }


def _group_norm(
    file: _File, layer: FoldedLayer, network: FoldedNetwork, source: str, output: str
) -> None:
    """As instance normalisation of the groups: ONNX has no group normalisation that all its
    runtimes know."""
    channels, height, width = network.shapes[layer.output]
    grouped = file.constant(
        f"{output}_groups",
        np.array([-1, layer.groups, channels // layer.groups * height * width], np.int64),
    )
    whole = file.constant(f"{output}_whole", np.array([-1, channels, height, width], np.int64))
    ones = file.constant(f"{output}_ones", np.ones(layer.groups, np.float32))
    zeros = file.constant(f"{output}_zeros", np.zeros(layer.groups, np.float32))
    scale, offset = (
        file.constant(f"{output}_{k}", t.numpy().reshape(channels, 1, 1))
        for k, t in (("scale", layer.weight), ("offset", layer.bias))
    )
    cut = file.add("Reshape", [source, grouped], f"{output}_cut")
    normal = file.add(
        "InstanceNormalization", [cut, ones, zeros], f"{output}_normal", epsilon=layer.eps
    )
    back = file.add("Reshape", [normal, whole], f"{output}_back")
    scaled = file.add("Mul", [back, scale], f"{output}_scaled")
    file.add("Add", [scaled, offset], output)

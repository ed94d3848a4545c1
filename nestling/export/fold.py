"""The forward pass of a trained network with its weights: normalisation with fixed statistics is
folded into the layer before it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.models.norm import WidthNorm
from nestling.planning.descriptor import LINEAR, RELU, RELU6
from nestling.planning.graph import Graph, Node, Unsupported, affine_of, lower

Shape = tuple[int, int, int]
NOTHING = torch.empty(0)
"""The weights of an operation that has none."""


@dataclass(frozen=True, eq=False)
class FoldedLayer:
    """One operation: `kind` is "conv", "dense", "max_pool", "avg_pool", "add", "group_norm" or
    "activation".

    weight: float32, (out, in / groups, height, width) of a convolution, (out, in) of a dense layer,
            per channel of a group norm.
    bias: float32, one per channel. The other fields are those of `Node`.
    """

    kind: str
    inputs: tuple[int, ...]
    output: int
    weight: Tensor = NOTHING
    bias: Tensor = NOTHING
    activation: int = LINEAR
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    groups: int = 1
    eps: float = 0.0


@dataclass(frozen=True, eq=False)
class FoldedNetwork:
    """The layers of one sample's forward pass in order; `shapes` are (channels, height, width) by
    value."""

    layers: tuple[FoldedLayer, ...]
    shapes: tuple[Shape, ...]
    input: int
    output: int


def fold(module: nn.Module, shape: tuple[int, ...]) -> FoldedNetwork:
    """The network of a module in evaluation mode, for inputs of `shape`."""
    fixed = with_one_width(module)
    return fold_graph(lower(fixed, shape, inference=True), state_of(fixed))


class _BatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch normalisation of anything."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


def with_one_width(module: nn.Module) -> nn.Module:
    """The module, or a copy in which norms with statistics for several widths are left with those
    of the width it has."""
    if not any(isinstance(part, WidthNorm) for part in module.modules()):
        return module
    fixed = copy.deepcopy(module).eval()
    for name, part in list(fixed.named_modules()):
        if isinstance(part, WidthNorm):
            norm = _BatchNorm(len(part.weight), eps=part.eps).eval()
            norm.weight, norm.bias = part.weight, part.bias
            norm.running_mean, norm.running_var = (
                part.means[part.row].clone(),
                part.variances[part.row].clone(),
            )
            fixed.set_submodule(name, norm)
    return fixed


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """The module's state on the CPU."""
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}


def fold_graph(graph: Graph, state: Mapping[str, Tensor]) -> FoldedNetwork:
    """The network of a graph whose weights are those of `state`."""
    readers = Counter(value for node in graph.nodes for value in node.inputs)
    readers[graph.output] += 1
    layers: list[FoldedLayer] = []
    writer: dict[int, int] = {}
    for node in graph.nodes:
        _require_map(node, graph)
        layer = _layer(node, graph, state)
        before = writer.get(node.inputs[0], -1)
        if (
            node.kind == "affine"
            and before >= 0
            and readers[node.inputs[0]] == 1
            and _takes_affine(layers[before])
        ):
            layers[before] = _merged(layers[before], layer)
            writer[node.output] = before
            continue
        writer[node.output] = len(layers)
        layers.append(_as_convolution(layer) if node.kind == "affine" else layer)
    return FoldedNetwork(tuple(layers), graph.shapes, graph.input, graph.output)


def _require_map(node: Node, graph: Graph) -> None:
    """Only a dense layer may read a map as a vector: its weights are put in the order of the
    map."""
    same_shape = node.kind in ("add", "group_norm", "affine", "activation")
    if same_shape and any(
        graph.shapes[value] != graph.shapes[node.output] for value in node.inputs
    ):
        raise Unsupported(
            node.layer, f"{node.kind} of a flattened map", "flatten just before a linear layer"
        )


def _layer(node: Node, graph: Graph, state: Mapping[str, Tensor]) -> FoldedLayer:
    weight, bias = _tensors(node, graph.shapes[node.output][0], state)
    return FoldedLayer(
        node.kind,
        node.inputs,
        node.output,
        weight,
        bias,
        node.activation,
        node.kernel,
        node.stride,
        node.padding,
        node.groups,
        node.eps,
    )


def _tensors(node: Node, channels: int, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    if node.kind == "affine":
        return affine_of(node, state)
    if node.kind not in ("conv", "dense", "group_norm"):
        return NOTHING, NOTHING
    weight = state[node.weight].float() if node.weight else torch.ones(channels)
    bias = state[node.bias].float() if node.bias else torch.zeros(channels)
    if node.kind == "conv":
        # a 1-D kernel becomes one of height 1
        weight = weight.reshape(*weight.shape[:2], *node.kernel)
    return weight, bias


def _takes_affine(layer: FoldedLayer) -> bool:
    return layer.kind in ("conv", "dense") and layer.activation == LINEAR


def _merged(layer: FoldedLayer, affine: FoldedLayer) -> FoldedLayer:
    """The layer that does what both did."""
    scale = affine.weight.double()
    weight = layer.weight.double() * scale.reshape(-1, *[1] * (layer.weight.dim() - 1))
    bias = layer.bias.double() * scale + affine.bias.double()
    return replace(
        layer,
        weight=weight.float(),
        bias=bias.float(),
        output=affine.output,
        activation=affine.activation,
    )


def _as_convolution(affine: FoldedLayer) -> FoldedLayer:
    """A scale and a shift per channel are a depth-wise convolution of one pixel."""
    channels = len(affine.weight)
    return replace(
        affine,
        kind="conv",
        weight=affine.weight.reshape(channels, 1, 1, 1),
        groups=channels,
        kernel=(1, 1),
    )


@torch.no_grad()
def run(network: FoldedNetwork, x: Tensor) -> dict[int, Tensor]:
    """All values of a forward pass of a batch, by number, each (batch, channels, height, width)."""
    values = {network.input: x.reshape(len(x), *network.shapes[network.input])}
    for layer in network.layers:
        out = _activated(
            _run_layer(layer, network, [values[v] for v in layer.inputs]), layer.activation
        )
        values[layer.output] = out.reshape(len(x), *network.shapes[layer.output])
    return values


def _run_layer(layer: FoldedLayer, network: FoldedNetwork, inputs: list[Tensor]) -> Tensor:
    x = inputs[0]
    if layer.kind == "conv":
        return F.conv2d(
            _padded(x, layer, network),
            layer.weight,
            layer.bias,
            stride=layer.stride,
            groups=layer.groups,
        )
    if layer.kind == "dense":
        return F.linear(x.flatten(1), layer.weight, layer.bias)
    if layer.kind == "max_pool":
        return F.max_pool2d(_padded(x, layer, network, -torch.inf), layer.kernel, layer.stride)
    if layer.kind == "avg_pool":
        return F.avg_pool2d(_padded(x, layer, network), layer.kernel, layer.stride)
    if layer.kind == "add":
        return x + inputs[1]
    if layer.kind == "group_norm":
        return F.group_norm(x, layer.groups, layer.weight, layer.bias, layer.eps)
    assert layer.kind == "activation", layer.kind
    return x


def _activated(x: Tensor, activation: int) -> Tensor:
    return {LINEAR: lambda: x, RELU: lambda: F.relu(x), RELU6: lambda: F.relu6(x)}[activation]()


def _padded(x: Tensor, layer: FoldedLayer, network: FoldedNetwork, value: float = 0.0) -> Tensor:
    (top, bottom), (left, right) = paddings(layer, network)
    return (
        F.pad(x, (left, right, top, bottom), value=value) if top or bottom or left or right else x
    )


def paddings(layer: FoldedLayer, network: FoldedNetwork) -> tuple[tuple[int, int], tuple[int, int]]:
    """What is put round the input, (top, bottom) and (left, right), so that the output has the size
    it has."""
    before, after = network.shapes[layer.inputs[0]][1:], network.shapes[layer.output][1:]
    sides = []
    for size, result, kernel, stride, pad in zip(
        before, after, layer.kernel, layer.stride, layer.padding, strict=True
    ):
        sides.append((pad, max(0, (result - 1) * stride + kernel - size - pad)))
    return sides[0], sides[1]

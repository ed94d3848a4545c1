"""Post-training quantisation to eight bits, by TensorFlow Lite's rules.

A value is scale · (q − zero), q from −128 to 127, with a scale and a zero for a whole activation,
found from the smallest and largest number that calibration rows gave. Weights have a scale for each
output channel, zero 0 and q from −127 to 127. Sums are 32-bit; they are brought to the scale of the
result by an integer multiplier and a shift. Pooling keeps the scale of its input. The order in
memory is rows, columns, channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from nestling.errors import InputError
from nestling.export.fold import FoldedLayer, FoldedNetwork, paddings, run
from nestling.planning.descriptor import LINEAR, RELU6

LOW, HIGH = -128, 127
ADD_SHIFT = 20
"""The operands of a residual sum get this many bits below the point, as in TensorFlow Lite."""
BATCH = 256
BELOW = 16
"""A class that is never said gets this part of the others' range less than the least of them."""
KEEPS_SCALE = ("max_pool", "avg_pool", "activation")


@dataclass(frozen=True)
class IntegerScale:
    """What a value's eight bits mean. `scale` is a float32."""

    scale: float
    zero: int


def _nothing() -> np.ndarray:
    return np.zeros(0, np.int8)


@dataclass(frozen=True, eq=False)
class IntegerOperation:
    """One operation on eight bits: `kind` is "conv", "depthwise", "dense", "max_pool", "avg_pool",
    "add" or "group_norm".

    weight: int8; (out, height, width, in / groups) of a convolution, (height, width, out) of a
            depth-wise one, (out, in) of a dense layer.
    bias: int32. channel_scale: float32, the weights' scales.
    multiplier, shift: one per output channel (convolutions, dense); the two operands' and the sum's
                       (add).
    low, high: what the result is cut to; the activation is in it.
    scale, offset, eps: of a group norm, float32.
    """

    kind: str
    inputs: tuple[int, ...]
    output: int
    activation: int
    low: int
    high: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    pad_rows: tuple[int, int] = (0, 0)
    pad_columns: tuple[int, int] = (0, 0)
    groups: int = 1
    weight: np.ndarray = field(default_factory=_nothing)
    bias: np.ndarray = field(default_factory=_nothing)
    channel_scale: np.ndarray = field(default_factory=_nothing)
    multiplier: np.ndarray = field(default_factory=_nothing)
    shift: np.ndarray = field(default_factory=_nothing)
    scale: np.ndarray = field(default_factory=_nothing)
    offset: np.ndarray = field(default_factory=_nothing)
    eps: float = 0.0


@dataclass(frozen=True, eq=False)
class Quantised:
    """A network on eight bits. `shapes` are (height, width, channels) by value."""

    operations: tuple[IntegerOperation, ...]
    shapes: tuple[tuple[int, int, int], ...]
    scales: dict[int, IntegerScale]
    input: int
    output: int

    def quantise(self, x: Tensor) -> np.ndarray:
        """Inputs as the network takes them: (rows, height, width, channels), int8."""
        channels_last = x.reshape(len(x), *_channels_first(self.shapes[self.input])).permute(
            0, 2, 3, 1
        )
        return to_int8(channels_last.detach().cpu().numpy(), self.scales[self.input])


def _channels_first(shape: tuple[int, int, int]) -> tuple[int, int, int]:
    return shape[2], shape[0], shape[1]


def to_int8(x: np.ndarray, scale: IntegerScale) -> np.ndarray:
    """Rounds half away from zero, as C's round does."""
    exact = x.astype(np.float32) / np.float32(scale.scale)
    whole = np.trunc(exact)
    rounded = whole + np.sign(exact) * (np.abs(exact - whole) >= 0.5)
    return np.clip(rounded + scale.zero, LOW, HIGH).astype(np.int8)


def quantise(network: FoldedNetwork, rows: Tensor) -> Quantised:
    """The network on eight bits, for values as `rows` (inputs, training data) give them."""
    if not len(rows):
        raise InputError(
            "no rows to calibrate with", field="--calibration", fix="give at least one"
        )
    network = _without_infinity(network, rows)
    scales = _scales(network, ranges(network, rows))
    operations = tuple(_operation(layer, network, scales) for layer in network.layers)
    shapes = tuple((height, width, channels) for channels, height, width in network.shapes)
    return Quantised(operations, shapes, scales, network.input, network.output)


def _without_infinity(network: FoldedNetwork, rows: Tensor) -> FoldedNetwork:
    """The network with a number in the place of the −inf of classes that it never says (FedProto's,
    of those that a client has no rows of): one below all that the other classes get, since eight
    bits have no infinity."""
    last = network.layers[-1]
    never = torch.isneginf(last.bias)
    if last.kind != "dense" or last.output != network.output or not never.any() or never.all():
        return network
    parts = rows.cpu().float().split(BATCH)
    said = torch.cat([run(network, part)[network.output].flatten(1)[:, ~never] for part in parts])
    low, high = float(said.min()), float(said.max())
    floor = torch.tensor(low - max(high - low, 1.0) / BELOW)
    weight = torch.where(never[:, None], 0.0, last.weight)
    finite = replace(last, weight=weight, bias=torch.where(never, floor, last.bias))
    return replace(network, layers=(*network.layers[:-1], finite))


def ranges(network: FoldedNetwork, rows: Tensor) -> dict[int, tuple[float, float]]:
    """The smallest and the largest number of every value over the rows."""
    found: dict[int, tuple[float, float]] = {}
    for part in rows.cpu().float().split(BATCH):
        for value, numbers in run(network, part).items():
            low, high = found.get(value, (math.inf, -math.inf))
            found[value] = (min(low, float(numbers.min())), max(high, float(numbers.max())))
    if not all(math.isfinite(end) for pair in found.values() for end in pair):
        raise InputError(
            "the network gives numbers that are not finite",
            field="RUN",
            fix="train it again with a smaller train.lr",
        )
    return found


def _scales(
    network: FoldedNetwork, found: dict[int, tuple[float, float]]
) -> dict[int, IntegerScale]:
    scales = {network.input: scale_of(*found[network.input])}
    for layer in network.layers:
        keeps = layer.kind in KEEPS_SCALE
        scales[layer.output] = scales[layer.inputs[0]] if keeps else scale_of(*found[layer.output])
    return scales


def scale_of(low: float, high: float) -> IntegerScale:
    """The scale for numbers between `low` and `high`; zero is always among what can be said
    exactly."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = float(np.float32((high - low) / (HIGH - LOW))) or 1.0
    return IntegerScale(scale, int(np.clip(round(LOW - low / scale), LOW, HIGH)))


def _operation(
    layer: FoldedLayer, network: FoldedNetwork, scales: dict[int, IntegerScale]
) -> IntegerOperation:
    if layer.kind in ("conv", "dense"):
        return _weighted(layer, network, scales)
    low, high = _limits(layer.activation, scales[layer.output])
    common = {
        "inputs": layer.inputs,
        "output": layer.output,
        "activation": layer.activation,
        "low": low,
        "high": high,
    }
    if layer.kind == "add":
        multiplier, shift = _add_multipliers(
            *(scales[v].scale for v in (*layer.inputs, layer.output))
        )
        return IntegerOperation("add", **common, multiplier=multiplier, shift=shift)  # type: ignore[arg-type]
    if layer.kind == "group_norm":
        numbers = {
            "scale": layer.weight.numpy(),
            "offset": layer.bias.numpy(),
            "eps": layer.eps,
            "groups": layer.groups,
        }
        return IntegerOperation("group_norm", **common, **numbers)  # type: ignore[arg-type]
    pad_rows, pad_columns = paddings(layer, network)
    # An activation that stands alone is a pool of one pixel.
    kind = "max_pool" if layer.kind == "activation" else layer.kind
    window = {
        "kernel": layer.kernel,
        "stride": layer.stride,
        "pad_rows": pad_rows,
        "pad_columns": pad_columns,
    }
    return IntegerOperation(kind, **common, **window)  # type: ignore[arg-type]


def _limits(activation: int, scale: IntegerScale) -> tuple[int, int]:
    """What the activation leaves of the eight bits."""
    if activation == LINEAR:
        return LOW, HIGH
    six = scale.zero + int(np.float32(6) / np.float32(scale.scale) + np.float32(0.5))
    return scale.zero, min(HIGH, six) if activation == RELU6 else HIGH


def _weighted(
    layer: FoldedLayer, network: FoldedNetwork, scales: dict[int, IntegerScale]
) -> IntegerOperation:
    before, after = scales[layer.inputs[0]], scales[layer.output]
    kind, weight = _arranged(layer, network)
    axis = 2 if kind == "depthwise" else 0
    others = tuple(a for a in range(weight.ndim) if a != axis)
    channel_scale = weight_scales(np.abs(weight).max(axis=others), layer.bias.numpy(), before.scale)
    shape = [-1 if a == axis else 1 for a in range(weight.ndim)]
    whole = np.clip(np.rint(weight / channel_scale.reshape(shape)), -HIGH, HIGH).astype(np.int8)
    bias = np.rint(
        layer.bias.double().numpy() / (before.scale * channel_scale.astype(np.float64))
    ).astype(np.int32)
    real = before.scale * channel_scale.astype(np.float64) / after.scale
    multiplier, shift = fixed_points(real)
    low, high = _limits(layer.activation, after)
    pad_rows, pad_columns = paddings(layer, network)
    return IntegerOperation(
        kind,
        layer.inputs,
        layer.output,
        layer.activation,
        low,
        high,
        layer.kernel,
        layer.stride,
        pad_rows if kind != "dense" else (0, 0),
        pad_columns if kind != "dense" else (0, 0),
        layer.groups,
        whole,
        bias,
        channel_scale,
        multiplier,
        shift,
    )


def _arranged(layer: FoldedLayer, network: FoldedNetwork) -> tuple[str, np.ndarray]:
    """The weights in the order in which rows, columns, channels meet them."""
    channels, height, width = network.shapes[layer.inputs[0]]
    if layer.kind == "dense":
        weight = layer.weight.reshape(-1, channels, height, width).permute(0, 2, 3, 1)
        return "dense", weight.reshape(len(weight), -1).contiguous().numpy()
    if layer.groups == channels and layer.weight.shape[1] == 1 and channels > 1:
        return "depthwise", layer.weight[:, 0].permute(1, 2, 0).contiguous().numpy()
    return "conv", layer.weight.permute(0, 2, 3, 1).contiguous().numpy()


def weight_scales(largest: np.ndarray, bias: np.ndarray, input_scale: float) -> np.ndarray:
    """A scale for each channel: large enough for its largest weight, and for its bias to be a
    32-bit number."""
    for_weight = largest.astype(np.float64) / HIGH
    for_bias = np.abs(bias.astype(np.float64)) / (input_scale * 2.0**30)
    scale = np.maximum(for_weight, for_bias)
    return np.where(scale > 0, scale, 1.0).astype(np.float32)


def fixed_points(real: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positive factors as multiplier · 2^(shift − 31), the multiplier a whole number with its top
    bit set."""
    pairs = [fixed_point(float(factor)) for factor in np.atleast_1d(real)]
    return np.array([m for m, _ in pairs], np.int32), np.array([s for _, s in pairs], np.int32)


def fixed_point(real: float) -> tuple[int, int]:
    """One factor; see `fixed_points`."""
    fraction, shift = math.frexp(real)
    whole = math.floor(fraction * 2**31 + 0.5)
    if whole == 2**31:
        whole, shift = whole // 2, shift + 1
    if shift < -31:
        return 0, 0
    if shift > 30:
        raise InputError(
            "a layer's output is far too small for its weights to be put in eight bits", field="RUN"
        )
    return whole, shift


def _add_multipliers(first: float, second: float, result: float) -> tuple[np.ndarray, np.ndarray]:
    twice = 2 * max(first, second)
    return fixed_points(
        np.array([first / twice, second / twice, twice / (2.0**ADD_SHIFT * result)])
    )

"""What an eight-bit network computes, to the bit: the C source and TensorFlow Lite Micro's
reference kernels give these numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nestling.export.quantise import ADD_SHIFT, LOW, IntegerOperation, IntegerScale, Quantised

BATCH = 250


def infer(network: Quantised, x: np.ndarray) -> np.ndarray:
    """The int8 logits of int8 inputs (rows, height, width, channels)."""
    return np.concatenate([_infer(network, x[at : at + BATCH]) for at in range(0, len(x), BATCH)])


def _infer(network: Quantised, x: np.ndarray) -> np.ndarray:
    values = {network.input: x}
    for operation in network.operations:
        inputs = [values[value] for value in operation.inputs]
        out = _KINDS[operation.kind](operation, network, inputs)
        values[operation.output] = out.reshape(len(x), *network.shapes[operation.output])
    return values[network.output].reshape(len(x), -1)


def _conv(operation: IntegerOperation, network: Quantised, inputs: list[np.ndarray]) -> np.ndarray:
    zero = network.scales[operation.inputs[0]].zero
    windows = _windows(inputs[0].astype(np.float64) - zero, operation, network, 0)
    rows, height, width = windows.shape[:3]
    out, group = operation.weight.shape[0], operation.weight.shape[3]
    each = out // operation.groups
    sums = np.empty((rows, height, width, out))
    for g in range(operation.groups):
        # As floats of 53 bits the sums are exact, and multiplied by a fast library.
        part = windows[..., g * group : (g + 1) * group].reshape(rows * height * width, -1)
        weight = operation.weight[g * each : (g + 1) * each].reshape(each, -1).astype(np.float64)
        sums[..., g * each : (g + 1) * each] = (part @ weight.T).reshape(rows, height, width, each)
    return _scaled(sums, operation, network)


def _depthwise(
    operation: IntegerOperation, network: Quantised, inputs: list[np.ndarray]
) -> np.ndarray:
    zero = network.scales[operation.inputs[0]].zero
    windows = _windows(inputs[0].astype(np.int32) - zero, operation, network, 0)
    each = operation.weight.shape[2] // windows.shape[-1]
    sums = np.zeros((len(windows), *network.shapes[operation.output]), np.int32)
    for row, column in np.ndindex(operation.kernel):
        sums += np.repeat(windows[:, :, :, row, column], each, axis=-1) * operation.weight[
            row, column
        ].astype(np.int32)
    return _scaled(sums, operation, network)


def _dense(operation: IntegerOperation, network: Quantised, inputs: list[np.ndarray]) -> np.ndarray:
    flat = (
        inputs[0].reshape(len(inputs[0]), -1).astype(np.float64)
        - network.scales[operation.inputs[0]].zero
    )
    return _scaled(flat @ operation.weight.T.astype(np.float64), operation, network)


def _max_pool(
    operation: IntegerOperation, network: Quantised, inputs: list[np.ndarray]
) -> np.ndarray:
    highest = _windows(inputs[0], operation, network, LOW).max(axis=(3, 4))
    return np.clip(highest, operation.low, operation.high)


def _avg_pool(
    operation: IntegerOperation, network: Quantised, inputs: list[np.ndarray]
) -> np.ndarray:
    zero = network.scales[operation.inputs[0]].zero
    sums = _windows(inputs[0].astype(np.int32), operation, network, zero).sum(axis=(3, 4))
    count = operation.kernel[0] * operation.kernel[1]
    mean = np.sign(sums) * ((np.abs(sums) + count // 2) // count)
    return np.clip(mean, operation.low, operation.high).astype(np.int8)


def _add(operation: IntegerOperation, network: Quantised, inputs: list[np.ndarray]) -> np.ndarray:
    total = np.zeros(inputs[0].shape, np.int64)
    for k, x in enumerate(inputs):
        shifted = (x.astype(np.int64) - network.scales[operation.inputs[k]].zero) << ADD_SHIFT
        total += rescaled(shifted, operation.multiplier[k], operation.shift[k])
    out = (
        rescaled(total, operation.multiplier[2], operation.shift[2])
        + network.scales[operation.output].zero
    )
    return np.clip(out, operation.low, operation.high).astype(np.int8)


def _group_norm(
    operation: IntegerOperation, network: Quantised, inputs: list[np.ndarray]
) -> np.ndarray:
    """In float32, in an order that is fixed, since the order of a sum of floats shows in its
    bits."""
    before, after = network.scales[operation.inputs[0]], network.scales[operation.output]
    x = np.float32(before.scale) * (inputs[0].astype(np.int32) - before.zero).astype(np.float32)
    rows, height, width, channels = x.shape
    x = x.reshape(rows, height * width, operation.groups, channels // operation.groups)
    mean = _mean(x)
    square = (x - mean) * (x - mean)
    one_over = np.float32(1) / np.sqrt(_mean(square) + np.float32(operation.eps))
    normal = ((x - mean) * one_over).reshape(rows, height, width, channels)
    return _cut(normal * operation.scale + operation.offset, after, operation)


def _mean(x: np.ndarray) -> np.ndarray:
    """Over the pixels and the channels of each group, summed one number after another."""
    rows, pixels, groups, size = x.shape
    in_turn = x.transpose(0, 2, 1, 3).reshape(rows, groups, pixels * size)
    # unlike sum, from left to right
    total = np.add.accumulate(in_turn, axis=2, dtype=np.float32)[:, :, -1]
    return (total / np.float32(pixels * size))[:, None, :, None]


def _cut(x: np.ndarray, scale: IntegerScale, operation: IntegerOperation) -> np.ndarray:
    exact = x / np.float32(scale.scale)
    whole = np.trunc(exact)
    rounded = whole + np.sign(exact) * (np.abs(exact - whole) >= 0.5)
    return np.clip(rounded + scale.zero, operation.low, operation.high).astype(np.int8)


_KINDS = {
    "conv": _conv,
    "depthwise": _depthwise,
    "dense": _dense,
    "max_pool": _max_pool,
    "avg_pool": _avg_pool,
    "add": _add,
    "group_norm": _group_norm,
}


def _windows(
    x: np.ndarray, operation: IntegerOperation, network: Quantised, padding: int
) -> np.ndarray:
    """(rows, height, width, kernel rows, kernel columns, channels): what each output sees."""
    padded = np.pad(
        x, ((0, 0), operation.pad_rows, operation.pad_columns, (0, 0)), constant_values=padding
    )
    found = np.lib.stride_tricks.sliding_window_view(padded, operation.kernel, axis=(1, 2))
    height, width = network.shapes[operation.output][:2]
    found = found[:, :: operation.stride[0], :: operation.stride[1]][:, :height, :width]
    return found.transpose(0, 1, 2, 4, 5, 3)


def _scaled(sums: np.ndarray, operation: IntegerOperation, network: Quantised) -> np.ndarray:
    total = sums.astype(np.int64) + operation.bias
    out = (
        rescaled(total, operation.multiplier, operation.shift)
        + network.scales[operation.output].zero
    )
    return np.clip(out, operation.low, operation.high).astype(np.int8)


def rescaled(x: np.ndarray, multiplier: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """x · multiplier · 2^(shift − 31), rounded twice: to 32 bits, halves up, and by what is shifted
    out, halves away from zero."""
    left, right = np.maximum(shift, 0).astype(np.int64), np.maximum(-shift, 0).astype(np.int64)
    product = (x.astype(np.int64) << left) * multiplier.astype(np.int64)
    nudged = product + np.where(product >= 0, 1 << 30, 1 - (1 << 30))
    high = np.where(nudged >= 0, nudged >> 31, -((-nudged) >> 31))
    mask = (np.int64(1) << right) - 1
    remainder = high & mask
    return (high >> right) + (remainder > (mask >> 1) + (high < 0))


def outputs(network: Quantised, x: Tensor) -> Tensor:
    """What the eight-bit network says of each row: the numbers that its bytes stand for."""
    last = network.scales[network.output]
    found = torch.from_numpy(infer(network, network.quantise(x)))
    return last.scale * (found.float() - last.zero)

"""An eight-bit network as a .tflite file.

The file is a flatbuffer; of its schema only what these networks need is written here, field by
field with its number. Only built-in operations are used. Padding that TensorFlow Lite's SAME does
not describe becomes an operation of its own, and group normalisation, which is not built in,
becomes the float operations that it consists of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nestling.errors import InputError
from nestling.export.quantise import LOW, IntegerOperation, IntegerScale, Quantised
from nestling.planning.descriptor import LINEAR, RELU, RELU6

# What the schema calls them: (number of the operation, its version for int8, number of its options,
# 0 for none).
ADD = (0, 2, 11)
AVERAGE_POOL_2D = (1, 2, 5)
CONV_2D = (3, 3, 1)
DEPTHWISE_CONV_2D = (4, 3, 2)
DEQUANTIZE = (6, 2, 38)
FULLY_CONNECTED = (9, 4, 8)
MAX_POOL_2D = (17, 2, 5)
MUL = (18, 1, 21)
RESHAPE = (22, 1, 17)
PAD = (34, 2, 22)
MEAN = (40, 1, 27)
SUB = (41, 1, 28)
PADV2 = (60, 2, 43)
RSQRT = (76, 1, 0)
SQUARED_DIFFERENCE = (99, 1, 76)
QUANTIZE = (114, 1, 89)
PER_CHANNEL_DENSE = 12
"""The version of FULLY_CONNECTED in which each output has a scale of its own."""

TYPES = {np.dtype(np.float32): 0, np.dtype(np.int32): 2, np.dtype(np.int8): 9}
ACTIVATIONS = {LINEAR: 0, RELU: 1, RELU6: 3}
SAME, VALID = 0, 1
ALIGNMENT = 16


@dataclass(frozen=True, eq=False)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    type: int
    scale: tuple[float, ...] = ()
    zero: int = 0
    axis: int = 0
    data: bytes = b""


@dataclass(frozen=True)
class _Call:
    """One operation of the file. `options` are (number of the field, kind, value)."""

    code: tuple[int, int, int]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: tuple[tuple[int, str, int], ...] = ()


@dataclass
class _File:
    tensors: list[_Tensor] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    # value of the network -> tensor of the file
    values: dict[int, int] = field(default_factory=dict)

    def tensor(self, name: str, shape: Sequence[int], dtype: Any, **more: Any) -> int:
        self.tensors.append(
            _Tensor(name, tuple(int(size) for size in shape), TYPES[np.dtype(dtype)], **more)
        )
        return len(self.tensors) - 1

    def constant(self, name: str, data: np.ndarray, **more: Any) -> int:
        return self.tensor(
            name, data.shape, data.dtype, data=np.ascontiguousarray(data).tobytes(), **more
        )

    def activation(self, name: str, shape: Sequence[int], scale: IntegerScale) -> int:
        return self.tensor(name, (1, *shape), np.int8, scale=(scale.scale,), zero=scale.zero)

    def call(
        self,
        code: tuple[int, int, int],
        inputs: Sequence[int],
        output: int,
        *options: tuple[int, str, int],
    ) -> int:
        self.calls.append(_Call(code, tuple(inputs), (output,), options))
        return output


def write(network: Quantised, name: str = "model") -> bytes:
    """The file's bytes."""
    file = _File()
    for value in (network.input, *(operation.output for operation in network.operations)):
        flat = value == network.output
        shape = (int(np.prod(network.shapes[value])),) if flat else network.shapes[value]
        file.values[value] = file.activation(_name(value, network), shape, network.scales[value])
    for number, operation in enumerate(network.operations):
        _WRITERS[operation.kind](file, network, operation, f"{operation.kind}_{number}")
    return _serialise(file, file.values[network.input], file.values[network.output], name)


def _name(value: int, network: Quantised) -> str:
    return {network.input: "input", network.output: "output"}.get(value, f"value_{value}")


def _conv(file: _File, network: Quantised, operation: IntegerOperation, name: str) -> None:
    source, padding = _padded(file, network, operation, name)
    depthwise = operation.kind == "depthwise"
    weight = operation.weight[None] if depthwise else operation.weight
    inputs = (source, *_weights(file, network, operation, weight, 3 if depthwise else 0, name))
    down, right = operation.stride
    options = [(0, "Int8", padding), (1, "Int32", right), (2, "Int32", down)]
    if depthwise:
        multiple = operation.weight.shape[-1] // network.shapes[operation.inputs[0]][2]
        options += [
            (3, "Int32", multiple),
            (4, "Int8", ACTIVATIONS[operation.activation]),
            (5, "Int32", 1),
            (6, "Int32", 1),
        ]
    else:
        options += [
            (3, "Int8", ACTIVATIONS[operation.activation]),
            (4, "Int32", 1),
            (5, "Int32", 1),
        ]
    file.call(
        DEPTHWISE_CONV_2D if depthwise else CONV_2D, inputs, file.values[operation.output], *options
    )


def _dense(file: _File, network: Quantised, operation: IntegerOperation, name: str) -> None:
    inputs = (
        file.values[operation.inputs[0]],
        *_weights(file, network, operation, operation.weight, 0, name),
    )
    code = (FULLY_CONNECTED[0], PER_CHANNEL_DENSE, FULLY_CONNECTED[2])
    file.call(
        code, inputs, file.values[operation.output], (0, "Int8", ACTIVATIONS[operation.activation])
    )


def _weights(
    file: _File,
    network: Quantised,
    operation: IntegerOperation,
    weight: np.ndarray,
    axis: int,
    name: str,
) -> tuple[int, int]:
    before = np.float32(network.scales[operation.inputs[0]].scale)
    scales = tuple(float(scale) for scale in operation.channel_scale)
    bias_scales = tuple(float(before * scale) for scale in operation.channel_scale)
    first = file.constant(f"{name}_weight", weight, scale=scales, axis=axis)
    return first, file.constant(f"{name}_bias", operation.bias, scale=bias_scales)


def _pool(file: _File, network: Quantised, operation: IntegerOperation, name: str) -> None:
    source, padding = _padded(file, network, operation, name)
    (down, right), (high, wide) = operation.stride, operation.kernel
    sizes = [(1, "Int32", right), (2, "Int32", down), (3, "Int32", wide), (4, "Int32", high)]
    code = MAX_POOL_2D if operation.kind == "max_pool" else AVERAGE_POOL_2D
    activation = (5, "Int8", ACTIVATIONS[operation.activation])
    file.call(
        code, (source,), file.values[operation.output], (0, "Int8", padding), *sizes, activation
    )


def _padded(
    file: _File, network: Quantised, operation: IntegerOperation, name: str
) -> tuple[int, int]:
    """The tensor to read and how to pad it: as SAME or VALID where that is what is meant, else
    padded beforehand."""
    value = operation.inputs[0]
    source, pads = file.values[value], (operation.pad_rows, operation.pad_columns)
    if not any(pads[0] + pads[1]):
        return source, VALID
    # An average of TensorFlow Lite leaves the padding out of its count; ours, like torch's, does
    # not.
    if operation.kind != "avg_pool" and _is_same(network, operation):
        return source, SAME
    height, width, channels = network.shapes[value]
    scale = network.scales[value]
    shape = (height + sum(pads[0]), width + sum(pads[1]), channels)
    around = file.constant(f"{name}_padding", np.array([(0, 0), *pads, (0, 0)], np.int32))
    padded = file.activation(f"{name}_padded", shape, scale)
    if operation.kind != "max_pool":
        return file.call(PAD, (source, around), padded), VALID
    least = file.constant(
        f"{name}_least", np.array([LOW], np.int8), scale=(scale.scale,), zero=scale.zero
    )
    return file.call(PADV2, (source, around, least), padded), VALID


def _is_same(network: Quantised, operation: IntegerOperation) -> bool:
    before, after = network.shapes[operation.inputs[0]], network.shapes[operation.output]
    pads = (operation.pad_rows, operation.pad_columns)
    for axis in range(2):
        kernel, stride = operation.kernel[axis], operation.stride[axis]
        total = max((after[axis] - 1) * stride + kernel - before[axis], 0)
        if after[axis] != -(-before[axis] // stride) or pads[axis] != (
            total // 2,
            total - total // 2,
        ):
            return False
    return True


def _add(file: _File, _network: Quantised, operation: IntegerOperation, _name: str) -> None:
    inputs = [file.values[value] for value in operation.inputs]
    file.call(
        ADD, inputs, file.values[operation.output], (0, "Int8", ACTIVATIONS[operation.activation])
    )


def _group_norm(file: _File, network: Quantised, operation: IntegerOperation, name: str) -> None:
    """Mean, squared difference, mean, 1 / root, difference, product: each over (pixels, groups,
    channels of a group)."""
    height, width, channels = network.shapes[operation.inputs[0]]
    whole, groups = (1, height, width, channels), operation.groups
    cut, each = (1, height * width, groups, channels // groups), (1, 1, groups, 1)

    def number(step: str, shape: Sequence[int]) -> int:
        return file.tensor(f"{name}_{step}", shape, np.float32)

    def reshaped(source: int, shape: tuple[int, ...], step: str) -> int:
        sizes = file.constant(f"{name}_{step}_shape", np.array(shape, np.int32))
        return file.call(RESHAPE, (source, sizes), number(step, shape))

    plain = (0, "Int8", 0)
    axes = file.constant(f"{name}_axes", np.array([1, 3], np.int32))
    eps = file.constant(f"{name}_eps", np.array([operation.eps], np.float32))
    x = file.call(DEQUANTIZE, (file.values[operation.inputs[0]],), number("float", whole))
    x = reshaped(x, cut, "groups")
    mean = file.call(MEAN, (x, axes), number("mean", each), (0, "Bool", 1))
    square = file.call(SQUARED_DIFFERENCE, (x, mean), number("square", cut))
    variance = file.call(MEAN, (square, axes), number("variance", each), (0, "Bool", 1))
    safe = file.call(ADD, (variance, eps), number("safe", each), plain)
    one_over = file.call(RSQRT, (safe,), number("one_over_deviation", each))
    centred = file.call(SUB, (x, mean), number("centred", cut), plain)
    normal = reshaped(
        file.call(MUL, (centred, one_over), number("normal", cut), plain), whole, "normal_whole"
    )
    gain = file.constant(f"{name}_scale", operation.scale.astype(np.float32))
    scaled = file.call(MUL, (normal, gain), number("scaled", whole), plain)
    offset = file.constant(f"{name}_offset", operation.offset.astype(np.float32))
    shifted = file.call(
        ADD,
        (scaled, offset),
        number("shifted", whole),
        (0, "Int8", ACTIVATIONS[operation.activation]),
    )
    file.call(QUANTIZE, (shifted,), file.values[operation.output])


_WRITERS: dict[str, Callable[[_File, Quantised, IntegerOperation, str], None]] = {
    "conv": _conv,
    "depthwise": _conv,
    "dense": _dense,
    "max_pool": _pool,
    "avg_pool": _pool,
    "add": _add,
    "group_norm": _group_norm,
}


def _serialise(file: _File, source: int, result: int, name: str) -> bytes:
    try:
        import flatbuffers
    except ImportError:
        fix = "pip install 'nestling[export]', or leave tflite out"
        raise InputError(
            "the package flatbuffers is not installed", field="--format", fix=fix
        ) from None
    builder = flatbuffers.Builder(1024)
    codes = sorted({call.code for call in file.calls})
    # Buffer 0 is the empty one, which tensors without data share.
    data = [b"", *(tensor.data for tensor in file.tensors if tensor.data)]
    buffers = _vector(
        builder,
        [_table(builder, 3, [(0, "UOffsetTRelative", _bytes(builder, raw))]) for raw in data],
    )
    tensors = _vector(builder, _tensors(builder, file.tensors))
    calls = _vector(builder, [_operator(builder, call, codes) for call in file.calls])
    graph = _table(
        builder,
        5,
        [
            (0, "UOffsetTRelative", tensors),
            (1, "UOffsetTRelative", _numbers(builder, [source])),
            (2, "UOffsetTRelative", _numbers(builder, [result])),
            (3, "UOffsetTRelative", calls),
            (4, "UOffsetTRelative", builder.CreateString(name)),
        ],
    )
    model = _table(
        builder,
        5,
        [
            (0, "Uint32", 3),
            (1, "UOffsetTRelative", _vector(builder, [_code(builder, code) for code in codes])),
            (2, "UOffsetTRelative", _vector(builder, [graph])),
            (3, "UOffsetTRelative", builder.CreateString("nestling")),
            (4, "UOffsetTRelative", buffers),
        ],
    )
    builder.Finish(model, file_identifier=b"TFL3")
    return bytes(builder.Output())


def _code(builder: Any, code: tuple[int, int, int]) -> int:
    # Readers of the first years look at the eight-bit field, those of today at the other one.
    return _table(builder, 4, [(0, "Int8", code[0]), (2, "Int32", code[1]), (3, "Int32", code[0])])


def _operator(builder: Any, call: _Call, codes: list[tuple[int, int, int]]) -> int:
    fields = [
        (0, "Uint32", codes.index(call.code)),
        (1, "UOffsetTRelative", _numbers(builder, call.inputs)),
        (2, "UOffsetTRelative", _numbers(builder, call.outputs)),
    ]
    if call.code[2]:
        fields += [
            (3, "Uint8", call.code[2]),
            (4, "UOffsetTRelative", _table(builder, 7, call.options)),
        ]
    return _table(builder, 5, fields)


def _tensors(builder: Any, tensors: list[_Tensor]) -> list[int]:
    found, buffer = [], 0
    for tensor in tensors:
        buffer += bool(tensor.data)
        fields = [
            (0, "UOffsetTRelative", _numbers(builder, tensor.shape)),
            (1, "Int8", tensor.type),
            (2, "Uint32", buffer if tensor.data else 0),
            (3, "UOffsetTRelative", builder.CreateString(tensor.name)),
        ]
        if tensor.scale:
            fields.append((4, "UOffsetTRelative", _quantisation(builder, tensor)))
        found.append(_table(builder, 5, fields))
    return found


def _quantisation(builder: Any, tensor: _Tensor) -> int:
    scale = builder.CreateNumpyVector(np.array(tensor.scale, np.float32))
    zero = builder.CreateNumpyVector(np.full(len(tensor.scale), tensor.zero, np.int64))
    return _table(
        builder,
        7,
        [(2, "UOffsetTRelative", scale), (3, "UOffsetTRelative", zero), (6, "Int32", tensor.axis)],
    )


def _table(builder: Any, size: int, fields: Sequence[tuple[int, str, int]]) -> int:
    """A table; zeros are left out, since they are what a missing field means here (activation,
    padding, type, axis)."""
    builder.StartObject(size)
    for number, kind, value in fields:
        getattr(builder, f"Prepend{kind}Slot")(number, value, 0)
    return builder.EndObject()


def _vector(builder: Any, offsets: Sequence[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return builder.EndVector()


def _numbers(builder: Any, numbers: Sequence[int]) -> int:
    return builder.CreateNumpyVector(np.array(numbers, np.int32))


def _bytes(builder: Any, raw: bytes) -> int:
    """Aligned, so that a runtime can use the weights where they lie; 0, no such field, where there
    are none."""
    if not raw:
        return 0
    builder.StartVector(1, len(raw), ALIGNMENT)
    builder.head -= len(raw)
    builder.Bytes[builder.head : builder.head + len(raw)] = raw
    return builder.EndVector()

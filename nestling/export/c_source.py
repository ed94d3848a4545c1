"""An eight-bit network as C99 source: its weights, the operations it needs, and one function that
calls them in order.

The source is complete: it needs <stdint.h> and nothing else, takes no memory from anywhere, and
works in one static arena whose places are shared by values that do not exist at the same time.
"""

from __future__ import annotations

import math
import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from nestling.errors import InputError
from nestling.export.quantise import IntegerOperation, Quantised
from nestling.planning.arena import Buffer, place

WIDTH = 124
PARTS = {
    "conv": ("dot", "window", "conv"),
    "depthwise": ("window", "depthwise"),
    "dense": ("dot", "dense"),
    "max_pool": ("window", "max_pool"),
    "avg_pool": ("window", "avg_pool"),
    "add": ("add",),
    "group_norm": ("group_norm",),
}
"""What of kernels.c each operation needs."""
RESCALES = ("conv", "depthwise", "dense", "add")
IN_PLACE = ("add", "group_norm")


@dataclass(frozen=True)
class Arena:
    """Where each value lies; the input and the output are the caller's."""

    offsets: dict[int, int]
    size: int


def arena_of(network: Quantised) -> Arena:
    """The places of the values between input and output, by when each exists."""
    last = {
        value: step
        for step, operation in enumerate(network.operations)
        for value in operation.inputs
    }
    buffers: list[Buffer] = []
    holds: dict[int, int] = {}
    for step, operation in enumerate(network.operations):
        value = operation.output
        if value == network.output:
            continue
        free = _overwritten(operation, holds, buffers, step)
        if free is None:
            holds[value] = len(buffers)
            buffers.append(Buffer(math.prod(network.shapes[value]), step, last.get(value, step)))
        else:
            holds[value] = free
            buffers[free].end = last.get(value, step)
    offsets, size = place(buffers)
    return Arena({value: offsets[buffer] for value, buffer in holds.items()}, size)


def _overwritten(
    operation: IntegerOperation, holds: dict[int, int], buffers: list[Buffer], step: int
) -> int | None:
    """The buffer of an operand that nobody reads later and that the result may take."""
    if operation.kind not in IN_PLACE:
        return None
    return next(
        (holds[v] for v in operation.inputs if v in holds and buffers[holds[v]].end == step), None
    )


def write(network: Quantised, name: str = "model") -> dict[str, str]:
    """The texts of NAME.h and NAME.c."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise InputError(
            f"{name!r} cannot be a name in C",
            field="--name",
            fix="use letters, digits and underscores",
        )
    arena = arena_of(network)
    return {f"{name}.h": _header(network, arena, name), f"{name}.c": _source(network, arena, name)}


def weight_bytes(network: Quantised) -> int:
    """Bytes of the tables: weights, biases, multipliers and shifts, normalisation."""
    return sum(
        table.nbytes for operation in network.operations for table in _tables(operation).values()
    )


def _header(network: Quantised, arena: Arena, name: str) -> str:
    upper = name.upper()
    before, after = network.scales[network.input], network.scales[network.output]
    rows, columns, channels = network.shapes[network.input]
    lines = [
        f"/* {name}: an int8 network, written by nestling. A number is scale * (byte - zero); "
        "input bytes are",
        "   round(number / scale) + zero, cut to -128..127, in the order rows, columns, "
        "channels. */",
        f"#ifndef {upper}_H",
        f"#define {upper}_H",
        "",
        "#include <stdint.h>",
        "",
        f"#define {upper}_INPUT_ROWS {rows}",
        f"#define {upper}_INPUT_COLUMNS {columns}",
        f"#define {upper}_INPUT_CHANNELS {channels}",
        f"#define {upper}_INPUT_BYTES {rows * columns * channels}",
        f"#define {upper}_INPUT_SCALE {_float(before.scale)}",
        f"#define {upper}_INPUT_ZERO ({before.zero})",
        f"#define {upper}_OUTPUT_BYTES {math.prod(network.shapes[network.output])}",
        f"#define {upper}_OUTPUT_SCALE {_float(after.scale)}",
        f"#define {upper}_OUTPUT_ZERO ({after.zero})",
        "/* Static memory of the function below, beside the caller's input and output. */",
        f"#define {upper}_ARENA_BYTES {arena.size}",
        "",
        "/* One sample. Not to be called again before it has returned. */",
        f"void {name}_infer(const int8_t *input, int8_t *output);",
        "",
        "#endif",
        "",
    ]
    return "\n".join(lines)


def _source(network: Quantised, arena: Arena, name: str) -> str:
    needed = [part for operation in network.operations for part in PARTS[operation.kind]]
    if any(operation.kind in RESCALES for operation in network.operations):
        needed.append("rescaled")
    kernels = [text for part, text in _kernels().items() if part in ("base", *needed)]
    tables = [
        _table_text(number, operation, network)
        for number, operation in enumerate(network.operations)
    ]
    steps = [
        _step(number, operation, network, arena)
        for number, operation in enumerate(network.operations)
    ]
    # A network whose values all lie with the caller has no arena.
    memory = f"static int8_t arena[{name.upper()}_ARENA_BYTES];\n" if arena.size else ""
    body = "\n".join(f"    {step}" for step in steps)
    infer = f"{memory}\nvoid {name}_infer(const int8_t *input, int8_t *output)\n{{\n{body}\n}}\n"
    return "\n".join(
        [
            f'/* Written by nestling; see {name}.h. */\n#include "{name}.h"\n',
            *kernels,
            *tables,
            infer,
        ]
    )


@cache
def _kernels() -> dict[str, str]:
    """The parts of kernels.c by name, in order."""
    text = Path(__file__).with_name("kernels.c").read_text(encoding="utf-8")
    pieces = re.split(r"/\* == (\w+) == \*/\n", text)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def _tables(operation: IntegerOperation) -> dict[str, np.ndarray]:
    if operation.kind == "group_norm":
        return {
            "scale": operation.scale.astype(np.float32),
            "offset": operation.offset.astype(np.float32),
        }
    if not operation.weight.size:
        return {}
    tables = {
        "weight": operation.weight,
        "bias": operation.bias,
        "multiplier": operation.multiplier,
    }
    return {**tables, "shift": operation.shift.astype(np.int8)}


_C_TYPES = {
    "weight": "int8_t",
    "bias": "int32_t",
    "multiplier": "int32_t",
    "shift": "int8_t",
    "scale": "float",
    "offset": "float",
}


def _table_text(number: int, operation: IntegerOperation, network: Quantised) -> str:
    parts = []
    for name, values in _tables(operation).items():
        texts = (
            [_float(v) for v in values.ravel()]
            if _C_TYPES[name] == "float"
            else [_whole(int(v)) for v in values.ravel()]
        )
        parts.append(
            f"static const {_C_TYPES[name]} {name}_{number}[{values.size}] = "
            f"{{\n{_wrapped(texts)}\n}};"
        )
    kind, fields = _settings(operation, network)
    parts.append(f"static const {kind} settings_{number} = {{{fields}}};\n")
    return "\n".join(parts)


def _settings(operation: IntegerOperation, network: Quantised) -> tuple[str, str]:
    """The record that an operation's function is given: its type and its fields in order."""
    before, after = network.shapes[operation.inputs[0]], network.shapes[operation.output]
    zeros = [network.scales[value].zero for value in (*operation.inputs, operation.output)]
    limits = [operation.low, operation.high]
    if operation.kind == "dense":
        return "layer", _joined([math.prod(before), math.prod(after), *zeros, *limits])
    if operation.kind == "add":
        factors = ", ".join(
            f"{{{_joined(part.tolist())}}}" for part in (operation.multiplier, operation.shift)
        )
        return "sum_of_two", f"{_joined([math.prod(after), *zeros, *limits])}, {factors}"
    if operation.kind == "group_norm":
        scales = [network.scales[value].scale for value in (operation.inputs[0], operation.output)]
        numbers = ", ".join(_float(x) for x in (*scales, operation.eps))
        return (
            "normalisation",
            f"{_joined([before[0] * before[1], before[2], operation.groups, *zeros, *limits])}, "
            f"{numbers}",
        )
    places = [
        *operation.kernel,
        *operation.stride,
        operation.pad_rows[0],
        operation.pad_columns[0],
        operation.groups,
    ]
    return "window", _joined([*before, *after, *places, *zeros, *limits])


def _step(number: int, operation: IntegerOperation, network: Quantised, arena: Arena) -> str:
    inputs = [_place(value, network, arena) for value in operation.inputs]
    tables = [f"{name}_{number}" for name in _tables(operation)]
    arguments = [*inputs, _place(operation.output, network, arena), f"&settings_{number}", *tables]
    return f"{operation.kind}({', '.join(arguments)});"


def _place(value: int, network: Quantised, arena: Arena) -> str:
    named = {network.input: "input", network.output: "output"}
    return named[value] if value in named else f"arena + {arena.offsets[value]}"


def _wrapped(texts: list[str]) -> str:
    return textwrap.fill(
        ", ".join(texts),
        WIDTH,
        initial_indent="    ",
        subsequent_indent="    ",
        break_on_hyphens=False,
    )


def _joined(numbers: list[int]) -> str:
    return ", ".join(_whole(int(number)) for number in numbers)


def _whole(number: int) -> str:
    return str(number) if number > -(2**31) else "(-2147483647 - 1)"


def _float(number: float) -> str:
    """The float32 so that a compiler reads it back to the bit."""
    text = f"{float(np.float32(number)):.9g}"
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"

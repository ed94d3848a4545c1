"""The descriptor: a network and its buffer plan as a header and one record per operation,
little-endian, which is all the C runtime is told.

A new view is a new descriptor and never a new firmware. The runtime (`runtime/nestling.h` mirrors
this file) trusts none of it: it checks every field before the first use.

Memory is one arena. Offsets are bytes from its start and multiples of 4; `NONE` says that there is
no such buffer. One sample is worked on at a time, in the order channels, rows, columns; the
gradients of a batch add up.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import astuple, dataclass, fields

MAGIC = 0x4C54534E  # "NSTL"
VERSION = 1
NONE = 0xFFFFFFFF
MOST_OPS = 256

CONV, DENSE, MAX_POOL, AVG_POOL, ADD, GROUP_NORM, AFFINE, ACTIVATION = range(1, 9)
"""Kinds of operations. Depth-wise convolution is CONV with groups = in_channels; a 1-D one has
height 1."""

LINEAR, RELU, RELU6 = range(3)
"""What is applied to an operation's result where it lies."""

TRAINED, INPUT_GRADIENT, ADD_TO_FIRST, ADD_TO_SECOND = 1, 2, 4, 8
"""Flags of an operation. TRAINED: its parameters get gradients. INPUT_GRADIENT: its backward hands
a gradient on to its inputs. ADD_TO_FIRST / ADD_TO_SECOND: that gradient is added to what the buffer
already holds (another reader was there before)."""


@dataclass(frozen=True)
class Op:
    """One operation, a record of 68 bytes: kind, flags and activation a byte each and one byte left
    free; the nine places 32 bits each; the six sizes and `groups` 16 bits, the kernel, stride and
    padding 8 bits; two floats.

    first, second:        where the inputs lie (second: ADD only).
    out:                  where the result goes; an ADD may overwrite one of its inputs, an
                          activation its input.
    first_grad, second_grad, out_grad: the same for gradients. Those of ADD may be the same place as
                                       out_grad.
    aux:                  MAX_POOL: one byte per output, the winner's place in its window;
                          GROUP_NORM: mean, 1/deviation by group.
    weight, bias:         places in the block of parameters, counted in floats (GROUP_NORM, AFFINE:
                          scale and shift per channel).
    scale:                CONV and DENSE: their result is multiplied by it, after the bias and
                          before the activation.
    groups:               of CONV and GROUP_NORM.
    Padding is at the top and left; what is missing at the bottom and right is implied by the
    output's size. AVG_POOL divides by the whole window, padding included.
    """

    kind: int
    flags: int = 0
    activation: int = LINEAR
    first: int = NONE
    second: int = NONE
    out: int = NONE
    first_grad: int = NONE
    second_grad: int = NONE
    out_grad: int = NONE
    aux: int = NONE
    weight: int = NONE
    bias: int = NONE
    in_channels: int = 1
    in_height: int = 1
    in_width: int = 1
    out_channels: int = 1
    out_height: int = 1
    out_width: int = 1
    kernel_height: int = 1
    kernel_width: int = 1
    stride_height: int = 1
    stride_width: int = 1
    pad_top: int = 0
    pad_left: int = 0
    groups: int = 1
    scale: float = 1.0
    eps: float = 0.0


@dataclass(frozen=True)
class Header:
    """What the runtime reads first. `magic`, `version`, `words` (of the whole descriptor) and `crc`
    (CRC-32 of all words after it) come before these fields.

    params, trained:  floats in the block of parameters; the first `trained` of them are trained.
    arena:            bytes of the arena that the plan uses, descriptor not counted.
    weights, grads, momentum, anchor: blocks of `params` (weights) and `trained` floats; momentum
                                      and anchor (what the proximal term pulls towards) may be NONE.
    mask:             a bit for each trained parameter, packed into words, 1 where it may move;
                      NONE: all may.
    input, output, output_grad: buffers of the input and of the logits; output_grad may be the same
                                place as output.
    target:           `classes` floats for a sample's teacher logits or regression target, or NONE.
    present:          `classes` floats that the logits are multiplied by in the cross-entropy, or
                      NONE.
    """

    ops: int
    params: int
    trained: int
    arena: int
    weights: int
    grads: int
    momentum: int
    anchor: int
    mask: int
    input: int
    in_channels: int
    in_height: int
    in_width: int
    output: int
    output_grad: int
    classes: int
    target: int
    present: int


@dataclass(frozen=True)
class DescriptorSettings:
    """How a job trains; travels apart from the descriptor, since it changes from round to round.
    All floats.

    The loss of a sample is ce·CE(logits ∘ present, label) + mse·mean((logits − target)²) +
    kd·τ²·KL(softmax(target/τ) ‖ softmax(logits/τ)), and of a batch its mean, plus mu/2·‖w −
    anchor‖². `inner` is the weight of a second cross-entropy, of the network whose last DENSE sees
    only its first inputs; how many of them is said with every step (0: none). The update is that of
    `nestling.training.optimisers`: clip the joint norm (0: off), add the decay, momentum, step.
    """

    lr: float
    momentum: float = 0.0
    decay: float = 0.0
    clip: float = 0.0
    mu: float = 0.0
    ce: float = 1.0
    mse: float = 0.0
    kd: float = 0.0
    temperature: float = 1.0
    inner: float = 0.0

    def to_bytes(self) -> bytes:
        """The fields in order as little-endian floats."""
        return struct.pack(f"<{len(fields(self))}f", *astuple(self))


_PREFIX = struct.Struct("<4I")
_HEADER = struct.Struct(f"<{len(fields(Header))}I")
# as the C compiler lays the record out, so that it is used where it lies
_OP = struct.Struct("<3Bx9I6H6BH2f")
HEADER_BYTES = _PREFIX.size + _HEADER.size
OP_BYTES = _OP.size


def to_bytes(header: Header, ops: list[Op]) -> bytes:
    """The descriptor."""
    body = _HEADER.pack(*astuple(header)) + b"".join(_OP.pack(*astuple(op)) for op in ops)
    return _PREFIX.pack(MAGIC, VERSION, (_PREFIX.size + len(body)) // 4, zlib.crc32(body)) + body


def from_bytes(data: bytes) -> tuple[Header, list[Op]]:
    """What `to_bytes` wrote."""
    magic, version, words, crc = _PREFIX.unpack_from(data)
    body = data[_PREFIX.size :]
    if magic != MAGIC or version != VERSION or words * 4 != len(data) or crc != zlib.crc32(body):
        raise ValueError("not a descriptor")
    header = Header(*_HEADER.unpack_from(body))
    return header, [
        Op(*_OP.unpack_from(body, _HEADER.size + k * _OP.size)) for k in range(header.ops)
    ]

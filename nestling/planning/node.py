"""One operation of a network, and the error for operations that the C runtime does not have."""

from __future__ import annotations

from dataclasses import dataclass

from nestling.errors import InputError

Shape = tuple[int, int, int]
"""Channels, height, width."""


@dataclass(frozen=True)
class Node:
    """One operation: `kind` is "conv", "dense", "max_pool", "avg_pool", "add", "group_norm",
    "affine" or "activation".

    inputs, output: numbers of values. weight, bias: names in the module's state (GROUP_NORM and
                    AFFINE: scale and shift).
    mean, variance: names of the fixed statistics of a batch norm that became an AFFINE; `affine_of`
                    combines all four.
    activation: one of the descriptor's LINEAR, RELU, RELU6, fused into the operation that it
                follows.
    layer: the module that the operation comes from.
    """

    kind: str
    inputs: tuple[int, ...]
    output: int
    weight: str | None = None
    bias: str | None = None
    activation: int = 0
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    groups: int = 1
    eps: float = 0.0
    mean: str | None = None
    variance: str | None = None
    layer: str = ""


class Unsupported(InputError):
    """A network holds something that the C runtime does not know. `layer` and `operation` say
    what."""

    def __init__(self, layer: str, operation: str, fix: str) -> None:
        """Words the error from the layer's name and the operation that is missing."""
        where = f"layer {layer!r}" if layer else "the network itself"
        super().__init__(f"{where}: the C runtime has no {operation}", field="model", fix=fix)
        self.layer, self.operation = layer, operation


def planar(shape: tuple[int, ...]) -> Shape:
    """A sample's shape as (channels, height, width): a sequence has height 1."""
    if len(shape) == 1:
        return (shape[0], 1, 1)
    if len(shape) == 2:
        return (shape[0], 1, shape[1])
    if len(shape) == 3:
        return (shape[0], shape[1], shape[2])
    fix = "give vectors, sequences (channels, length) or images (channels, height, width)"
    raise InputError(f"samples of shape {shape}", field="shape", fix=fix)

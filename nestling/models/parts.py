"""What the families share: the scaling rule, the input checks, and the one shape all networks
have."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor, nn

from nestling.errors import InputError, unknown
from nestling.models.norm import norm_layer
from nestling.settings import OneOf

STEMS = ("imagenet", "cifar")
Stem = Annotated[str, OneOf(STEMS)]


class Network(nn.Module):
    """stem → stages → neck → head. The head is one linear layer, and its input are the network's
    features.

    A shallower network is the same network with fewer stages, as long as the neck accepts what the
    last one puts out.
    """

    def __init__(
        self, *, stem: nn.Module, stages: Sequence[nn.Module], neck: nn.Module, head: nn.Linear
    ) -> None:
        """Joins the four parts; the stages become one sequence."""
        super().__init__()
        self.stem = stem
        self.stages = nn.Sequential(*stages)
        self.neck = neck
        self.head = head

    def features(self, x: Tensor) -> Tensor:
        """What the head sees: one flat vector per sample."""
        return self.neck(self.stages(self.stem(x)))

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        return self.head(self.features(x))


def scaled(channels: int, width: float) -> int:
    """⌈width · channels⌉, at least 1: the size of a hidden axis at this width."""
    if not (math.isfinite(width) and width > 0):
        raise InputError(
            f"width is {width}",
            field="model.width",
            fix="use a number above 0; 1.0 is the full network",
        )
    if channels < 1:
        raise InputError(
            f"a layer with {channels} channels", field="model.channels", fix="use at least 1"
        )
    # The slack keeps 0.07 · 100 = 7.000000000000001 from becoming 8.
    return max(1, math.ceil(width * channels - 1e-9))


def image(name: str, shape: Sequence[int], *, least: int = 1) -> tuple[int, int, int]:
    """`shape` as (channels, height, width), or an error that says what `name` takes."""
    if len(shape) != 3:
        raise _wrong_input(name, shape, "images, shape (channels, height, width)")
    if min(shape[1:]) < least:
        raise _wrong_input(name, shape, f"images of at least {least}x{least} pixels")
    return shape[0], shape[1], shape[2]


def sequence(name: str, shape: Sequence[int]) -> tuple[int, int]:
    """`shape` as (channels, length), or an error that says what `name` takes."""
    if len(shape) != 2:
        raise _wrong_input(name, shape, "sequences, shape (channels, length)")
    return shape[0], shape[1]


def text(name: str, shape: Sequence[int]) -> int:
    """`shape` as a number of token ids, or an error that says what `name` takes."""
    if len(shape) != 1:
        raise _wrong_input(name, shape, "texts, shape (token ids,)")
    return shape[0]


def _wrong_input(name: str, shape: Sequence[int], takes: str) -> InputError:
    kinds = {1: "mlp", 2: "cnn1d or mlp", 3: "tinycnn, cnn or mlp"}
    fix = (
        f"for this data use {kinds[len(shape)]}"
        if len(shape) in kinds
        else "see the table of models"
    )
    return InputError(
        f"{name} takes {takes}; the data has shape {tuple(shape)}", field="model.name", fix=fix
    )


def check_stem(stem: str) -> str:
    """`stem`, if it is one of `STEMS`."""
    if stem not in STEMS:
        raise unknown("stem", stem, STEMS, field="model.stem")
    return stem


def named(**parts: nn.Module) -> nn.Sequential:
    """A sequence whose steps have names, so that the state reads `stem.conv.weight` and not
    `stem.0.weight`."""
    return nn.Sequential(OrderedDict(parts))


def conv2d(
    before: int,
    after: int,
    kernel: int | tuple[int, int] = 3,
    *,
    stride: int = 1,
    groups: int = 1,
    bias: bool = False,
) -> nn.Conv2d:
    """A convolution that keeps height and width when its stride is 1 and its kernel odd."""
    size = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = ((size[0] - 1) // 2, (size[1] - 1) // 2)
    return nn.Conv2d(before, after, size, stride=stride, padding=padding, groups=groups, bias=bias)


def image_stem(before: int, after: int, *, stem: str, norm: str) -> nn.Sequential:
    """The stock ImageNet stem (7x7 by 2, then pooling by 2: a quarter of the size), or one 3x3
    convolution for small images."""
    bias = norm == "none"
    if check_stem(stem) == "cifar":
        return named(
            conv=conv2d(before, after, bias=bias), norm=norm_layer(norm, after), relu=nn.ReLU()
        )
    conv = conv2d(before, after, 7, stride=2, bias=bias)
    return named(
        conv=conv,
        norm=norm_layer(norm, after),
        relu=nn.ReLU(),
        pool=nn.MaxPool2d(3, stride=2, padding=1),
    )


def pooled() -> nn.Sequential:
    """The usual neck: the mean over all pixels, flat."""
    return named(pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten())


@torch.no_grad()
def he_init(module: nn.Module) -> None:
    """He's normal initialisation of every convolution, so that a network without normalisation
    keeps its signal."""
    for part in module.modules():
        if isinstance(part, (nn.Conv1d, nn.Conv2d)):
            nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)

"""Networks with early exits: every stage has a head of its own, so a prefix of stages and heads is
a smaller network."""

from __future__ import annotations

import copy
from typing import Annotated, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.errors import InputError, unknown
from nestling.models.norm import Norm, norm_layer
from nestling.models.parts import Stem, conv2d, he_init, image, image_stem, named, pooled, scaled
from nestling.models.resnet import basic_stages
from nestling.settings import Count, OneOf, Positive

HEADS = ("plain", "convs", "attention")
INFERENCE = ("last", "mean")
HeadKind = Annotated[str, OneOf(HEADS)]


class ExitNet(nn.Module):
    """stem → stages, and behind each stage a head. Cut both lists to the same length for a
    shallower network.

    A head is a sequence that ends in a linear layer; `head` is the linear layer of the deepest one.
    An identity in place of a head says that this exit is left out. `inference` says what the
    network answers outside training: the "last" exit's logits or the "mean" of all exits'; in
    training it is always the last one's (objectives that want them all ask `all_exits`).
    """

    def __init__(
        self, stem: nn.Module, stages: nn.ModuleList, heads: nn.ModuleList, inference: str = "last"
    ) -> None:
        """Refuses another number of heads than of stages, and an unknown `inference`."""
        if not len(stages) or len(stages) != len(heads):
            raise InputError(
                f"{len(stages)} stages but {len(heads)} heads",
                field="model.name",
                fix="give every stage one head",
            )
        if inference not in INFERENCE:
            raise unknown("inference", inference, INFERENCE, field="model.inference")
        super().__init__()
        self.stem = stem
        self.stages = stages
        self.heads = heads
        self.inference = inference

    @property
    def head(self) -> nn.Linear:
        """The deepest exit's linear layer (its state is `heads.<last>.linear`)."""
        return cast(nn.Linear, self._last()[-1])

    def prefix(self, depth: int) -> ExitNet:
        """The network of the first `depth` stages and heads; it shares this one's weights."""
        if not 1 <= depth <= len(self.stages):
            raise InputError(
                f"no depth {depth}",
                field="model.depth",
                fix=f"use 1 to {len(self.stages)}, the number of stages",
            )
        return ExitNet(self.stem, self.stages[:depth], self.heads[:depth], self.inference)

    def answering(self, inference: str) -> ExitNet:
        """A copy with another kind of inference."""
        twin = copy.deepcopy(self)
        return ExitNet(twin.stem, twin.stages, twin.heads, inference)

    def features(self, x: Tensor) -> Tensor:
        """What the deepest exit's linear layer sees."""
        return self._last()[:-1](self._trunk(x))

    def forward(self, x: Tensor) -> Tensor:
        """The logits of the deepest exit, or outside training what `inference` says."""
        if self.inference == "mean" and not self.training:
            return torch.stack(self.all_exits(x)).mean(0)
        return self._last()(self._trunk(x))

    def all_exits(self, x: Tensor) -> list[Tensor]:
        """The logits of every exit, the shallowest first."""
        x, logits = self.stem(x), []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x)
            if not isinstance(head, nn.Identity):
                logits.append(head(x))
        return logits

    def _trunk(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return x

    def _last(self) -> nn.Sequential:
        return cast(nn.Sequential, self.heads[-1])


class Gate(nn.Module):
    """Weighs every entry of a map by what a coarser look at it says (the attention of DepthFL's
    heads)."""

    def __init__(self, channels: int, norm: str) -> None:
        """Makes the separable convolution that looks at the map at half its size."""
        super().__init__()
        self.look = _separable(channels, channels, norm)

    def forward(self, x: Tensor) -> Tensor:
        """The weighed map."""
        coarse = F.interpolate(self.look(x), size=x.shape[-2:], mode="nearest")
        return torch.sigmoid(coarse) * x


def exitcnn(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: Norm = "group",
    channels: tuple[Count, ...] = (16, 32, 64, 128),
    heads: HeadKind = "plain",
) -> nn.Module:
    """One 3x3 convolution and one exit for every entry of `channels`; strides halve the map from
    the second stage on.

    channels: of every stage.
    heads:    plain (mean over pixels, linear), convs (three convolutions before that, as in
              ScaleFL) or attention (a gate and separable convolutions up to the last stage's width,
              as in DepthFL).
    """
    before, _, _ = image("exitcnn", shape)
    stages: list[nn.Module] = []
    for number, full in enumerate(channels):
        after = scaled(full, width)
        conv = conv2d(before, after, stride=2 if number else 1, bias=norm == "none")
        stages.append(named(conv=conv, norm=norm_layer(norm, after), relu=nn.ReLU()))
        before = after
    sizes = [scaled(full, width) for full in channels]
    return _network(nn.Identity(), stages, _exits(heads, sizes, classes, norm))


def exitresnet(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: Norm = "group",
    blocks: tuple[Count, ...] = (2, 2, 2, 2),
    channels: tuple[Count, ...] = (64, 64, 128, 256, 512),
    stem: Stem = "cifar",
    heads: HeadKind = "plain",
) -> nn.Module:
    """A residual network of basic blocks with an exit behind every stage.

    blocks:   the basic blocks of every stage.
    channels: of the stem, then of every stage.
    stem:     imagenet (7x7 with stride 2, then pooling: a quarter of the size) or cifar (3x3, for
              small images).
    heads:    plain (mean over pixels, linear), convs (three convolutions before that, as in
              ScaleFL) or attention (a gate and separable convolutions up to the last stage's width,
              as in DepthFL).
    """
    before, _, _ = image("exitresnet", shape)
    stages = basic_stages(blocks, channels, width, norm)
    entry = image_stem(before, scaled(channels[0], width), stem=stem, norm=norm)
    sizes = [scaled(full, width) for full in channels[1 : len(blocks) + 1]]
    return _network(entry, stages, _exits(heads, sizes, classes, norm))


def tinyexits(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: Norm = "group",
    channels: tuple[Count, ...] = (12, 24, 48, 48),
) -> nn.Module:
    """A strided 5x5 convolution, then 3x3 ones, with an exit behind each; every other stage halves
    the map. The first stage and its exit train within 64 KB.

    channels: of every stage.
    """
    before, high, wide = image("tinyexits", shape)
    stages: list[nn.Module] = []
    exits: list[nn.Sequential] = []
    for number, full in enumerate(channels):
        after, first = scaled(full, width), number == 0
        conv = conv2d(
            before, after, 5 if first else 3, stride=2 if first else 1, bias=norm == "none"
        )
        parts = {"conv": conv, "norm": norm_layer(norm, after), "relu": nn.ReLU()}
        high, wide = ((high + 1) // 2, (wide + 1) // 2) if first else (high, wide)
        if number % 2 == 0 and min(high, wide) > 3:
            parts["pool"] = nn.MaxPool2d(2)
            high, wide = high // 2, wide // 2
        stages.append(named(**parts))
        coarse = max(1, min(high, wide) // 3)
        linear = nn.Linear(after * (high // coarse) * (wide // coarse), classes)
        exits.append(named(pool=nn.AvgPool2d(coarse), flat=nn.Flatten(), linear=linear))
        before = after
    return _network(nn.Identity(), stages, exits)


def _exits(kind: str, sizes: list[int], classes: int, norm: str) -> list[nn.Sequential]:
    if kind not in HEADS:
        raise unknown("kind of head", kind, HEADS, field="model.heads")
    return [_exit(kind, sizes[number:], classes, norm) for number in range(len(sizes))]


def _exit(kind: str, sizes: list[int], classes: int, norm: str) -> nn.Sequential:
    """The head behind a stage of sizes[0] channels; the other sizes are those of the stages after
    it."""
    parts: dict[str, nn.Module] = {}
    if kind == "convs":
        for number in range(3):
            conv = conv2d(sizes[0], sizes[0], bias=norm == "none")
            parts[f"conv{number}"] = named(
                conv=conv, norm=norm_layer(norm, sizes[0]), relu=nn.ReLU()
            )
    elif kind == "attention" and len(sizes) > 1:
        parts["gate"] = Gate(sizes[0], norm)
        for number, after in enumerate(sizes[1:]):
            parts[f"separable{number}"] = _separable(sizes[number], after, norm)
    last = sizes[-1] if kind == "attention" else sizes[0]
    return named(**parts, **dict(pooled().named_children()), linear=nn.Linear(last, classes))


def _separable(before: int, after: int, norm: str) -> nn.Sequential:
    """A depth-wise convolution that halves the map, and a point-wise one."""
    depthwise = conv2d(before, before, stride=2, groups=before)
    pointwise = conv2d(before, after, 1, bias=norm == "none")
    return named(
        depthwise=depthwise, pointwise=pointwise, norm=norm_layer(norm, after), relu=nn.ReLU()
    )


def _network(stem: nn.Module, stages: list[nn.Module], heads: list[nn.Sequential]) -> ExitNet:
    network = ExitNet(stem, nn.ModuleList(stages), nn.ModuleList(heads))
    he_init(network)
    return network

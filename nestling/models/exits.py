"""Networks with early exits: every stage has a head of its own, so a prefix of stages and heads is a smaller network."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from nestling.errors import InputError
from nestling.models.norm import norm_layer
from nestling.models.parts import conv2d, he_init, image, image_stem, named, pooled, scaled
from nestling.models.resnet import basic_stages


class ExitNet(nn.Module):
    """stem → stages, and behind each stage a head. Cut both lists to the same length for a shallower network.

    A head is a sequence that ends in a linear layer; `head` is the linear layer of the deepest one.
    """

    def __init__(self, stem: nn.Module, stages: nn.ModuleList, heads: nn.ModuleList) -> None:
        if not len(stages) or len(stages) != len(heads):
            raise InputError(f"{len(stages)} stages but {len(heads)} heads", field="model.name", fix="give every stage one head")
        super().__init__()
        self.stem = stem
        self.stages = stages
        self.heads = heads

    @property
    def head(self) -> nn.Linear:
        """The deepest exit's linear layer (its state is `heads.<last>.linear`)."""
        return cast(nn.Linear, self._last()[-1])

    def prefix(self, depth: int) -> ExitNet:
        """The network of the first `depth` stages and heads; it shares this one's weights."""
        if not 1 <= depth <= len(self.stages):
            raise InputError(f"no depth {depth}", field="model.depth", fix=f"use 1 to {len(self.stages)}, the number of stages")
        return ExitNet(self.stem, self.stages[:depth], self.heads[:depth])

    def features(self, x: Tensor) -> Tensor:
        """What the deepest exit's linear layer sees."""
        return self._last()[:-1](self._trunk(x))

    def forward(self, x: Tensor) -> Tensor:
        """The logits of the deepest exit."""
        return self._last()(self._trunk(x))

    def all_exits(self, x: Tensor) -> list[Tensor]:
        """The logits of every exit, the shallowest first."""
        x, logits = self.stem(x), []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x)
            logits.append(head(x))
        return logits

    def _trunk(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return x

    def _last(self) -> nn.Sequential:
        return cast(nn.Sequential, self.heads[-1])


def exitcnn(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: float = 1.0,
    norm: str = "group",
    channels: tuple[int, ...] = (16, 32, 64, 128),
) -> nn.Module:
    """One 3x3 convolution and one exit for every entry of `channels`; strides halve the map from the second stage on."""
    before, _, _ = image("exitcnn", shape)
    stages: list[nn.Module] = []
    for number, full in enumerate(channels):
        after = scaled(full, width)
        conv = conv2d(before, after, stride=2 if number else 1, bias=norm == "none")
        stages.append(named(conv=conv, norm=norm_layer(norm, after), relu=nn.ReLU()))
        before = after
    return _with_exits(nn.Identity(), stages, [scaled(full, width) for full in channels], classes)


def exitresnet(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: float = 1.0,
    norm: str = "group",
    blocks: tuple[int, ...] = (2, 2, 2, 2),
    channels: tuple[int, ...] = (64, 64, 128, 256, 512),
    stem: str = "cifar",
) -> nn.Module:
    """A `resnet` of basic blocks with a plain exit (mean over pixels, linear) behind every stage."""
    before, _, _ = image("exitresnet", shape)
    stages = basic_stages(blocks, channels, width, norm)
    entry = image_stem(before, scaled(channels[0], width), stem=stem, norm=norm)
    return _with_exits(entry, stages, [scaled(full, width) for full in channels[1 : len(blocks) + 1]], classes)


def _with_exits(stem: nn.Module, stages: list[nn.Module], sizes: list[int], classes: int) -> ExitNet:
    heads = [named(**dict(pooled().named_children()), linear=nn.Linear(size, classes)) for size in sizes]
    network = ExitNet(stem, nn.ModuleList(stages), nn.ModuleList(heads))
    he_init(network)
    return network

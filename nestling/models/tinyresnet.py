"""A residual network for microcontrollers, deep enough to be cut in depth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

from torch import nn

from nestling.errors import InputError
from nestling.models.exits import ExitNet
from nestling.models.norm import Norm, norm_layer
from nestling.models.parts import Network, conv2d, he_init, image, named, scaled
from nestling.models.resnet import basic_stages, plan
from nestling.settings import Count, Positive


def tinyresnet(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: Norm = "group",
    blocks: tuple[Count, ...] = (3, 3),
    channels: tuple[Count, ...] = (4, 8, 8),
    exits: tuple[Count, ...] = (),
) -> nn.Module:
    """A stem that quarters the map, `blocks` basic blocks per stage, a coarse mean, the head. With
    one block per stage it trains within 64 KB.

    blocks:   the basic blocks of every stage.
    channels: of the stem, then of every stage.
    exits:    makes it a network with early exits: after so many blocks, counted over all stages,
              there is another neck and head; the last one stands behind the last block.
    """
    before, high, wide = image("tinyresnet", shape, least=4)
    size = scaled(channels[0], width)
    conv = conv2d(before, size, 5, stride=2, bias=norm == "none")
    stem = named(conv=conv, norm=norm_layer(norm, size), relu=nn.ReLU(), pool=nn.MaxPool2d(2))
    stages = basic_stages(blocks, channels, width, norm)
    maps = _maps(blocks, channels, width, ((high + 1) // 4, (wide + 1) // 4))
    if exits:
        network: nn.Module = _with_exits(stem, stages, maps, exits, classes)
    else:
        neck, features = _neck(maps[-1])
        network = Network(stem=stem, stages=stages, neck=neck, head=nn.Linear(features, classes))
    he_init(network)
    return network


def _with_exits(
    stem: nn.Module,
    stages: Sequence[nn.Module],
    maps: Sequence[tuple[int, int, int]],
    exits: Sequence[int],
    classes: int,
) -> ExitNet:
    every = list(chain.from_iterable(stage.children() for stage in stages))
    if list(exits) != sorted(set(exits)) or exits[0] < 1 or exits[-1] != len(every):
        fix = f"give rising numbers of blocks, the last one {len(every)}"
        raise InputError(f"no exits after {list(exits)} blocks", field="model.exits", fix=fix)
    parts = [nn.Sequential(*every[start:end]) for start, end in pairwise((0, *exits))]
    heads = []
    for end in exits:
        neck, features = _neck(maps[end - 1])
        heads.append(named(**dict(neck.named_children()), linear=nn.Linear(features, classes)))
    return ExitNet(stem, nn.ModuleList(parts), nn.ModuleList(heads))


def _maps(
    blocks: Sequence[int], channels: Sequence[int], width: float, size: tuple[int, int]
) -> list[tuple[int, int, int]]:
    """What every block puts out, as (channels, height, width)."""
    (high, wide), found = size, []
    for _, after, stride in chain.from_iterable(plan(blocks, channels)):
        high, wide = (high + stride - 1) // stride, (wide + stride - 1) // stride
        found.append((scaled(after, width), high, wide))
    return found


def _neck(map: tuple[int, int, int]) -> tuple[nn.Sequential, int]:
    """A coarse mean over a map, flat, and how many features that are."""
    channels, high, wide = map
    coarse = max(1, min(high, wide) // 2)
    return named(pool=nn.AvgPool2d(coarse), flat=nn.Flatten()), channels * (high // coarse) * (
        wide // coarse
    )

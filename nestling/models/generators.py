"""Generators: networks that make inputs out of noise, for servers that have no data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.models.parts import named

_CONVS: dict[int, type[nn.Conv1d] | type[nn.Conv2d]] = {1: nn.Conv1d, 2: nn.Conv2d}
_SLOPE = 0.2


def generator(shape: Sequence[int], *, nz: int, channels: int, classes: int = 0) -> nn.Module:
    """A network from codes of `nz` numbers (and one flag per class, see `codes`) to inputs of
    `shape`: for images and sequences a quarter of the size twice doubled with a convolution each
    time, for anything else two linear layers.

    What comes out is normalised over the batch, channel by channel, as data is. It is only ever
    used to make whole batches, so that its norms use the batch at hand and its state has no
    buffers.
    """
    sizes = tuple(shape[1:])
    return (
        Upsampled(shape[0], sizes, nz + classes, channels)
        if len(sizes) in _CONVS
        else Flat(shape, nz + classes, channels)
    )


class Upsampled(nn.Module):
    """Small maps, doubled twice."""

    def __init__(self, after: int, sizes: tuple[int, ...], code: int, channels: int) -> None:
        """For inputs of `after` channels and these sizes, from codes of `code` numbers."""
        super().__init__()
        conv, dims = _CONVS[len(sizes)], len(sizes)
        steps = [tuple(math.ceil(size / part) for size in sizes) for part in (4, 2, 1)]
        self.start = (2 * channels, *steps[0])
        self.linear = nn.Linear(code, math.prod(self.start))
        self.norm = _norm(dims, 2 * channels)
        widths = (2 * channels, 2 * channels, channels)
        blocks = [
            named(
                up=nn.Upsample(size),
                conv=conv(a, b, 3, padding=1, bias=False),
                norm=_norm(dims, b),
                relu=nn.LeakyReLU(_SLOPE),
            )
            for (a, b), size in zip(pairwise(widths), steps[1:], strict=True)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.out = named(
            conv=conv(channels, after, 3, padding=1),
            bound=nn.Tanh(),
            norm=_norm(dims, after, affine=False),
        )

    def forward(self, code: Tensor) -> Tensor:
        """Inputs, one per code."""
        return self.out(self.blocks(self.norm(self.linear(code).unflatten(1, self.start))))


class Flat(nn.Module):
    """Two linear layers, for data without neighbours."""

    def __init__(self, shape: Sequence[int], code: int, channels: int) -> None:
        """For inputs of `shape`, from codes of `code` numbers, with 4 · `channels` hidden units."""
        super().__init__()
        self.shape, hidden = tuple(shape), 4 * channels
        self.hidden = named(
            linear=nn.Linear(code, hidden, bias=False),
            norm=_norm(1, hidden),
            relu=nn.LeakyReLU(_SLOPE),
        )
        size = math.prod(shape)
        self.out = named(
            linear=nn.Linear(hidden, size), bound=nn.Tanh(), norm=_norm(1, size, affine=False)
        )

    def forward(self, code: Tensor) -> Tensor:
        """Inputs, one per code."""
        return self.out(self.hidden(code)).unflatten(1, self.shape)


def codes(noise: Tensor, labels: Tensor, classes: int) -> Tensor:
    """What a generator that knows classes makes an input from: noise, and the flag of the class
    that is wanted."""
    return torch.cat([noise, F.one_hot(labels, classes).to(noise)], dim=1)


def diversity(noise: Tensor, made: Tensor) -> Tensor:
    """exp(−mean over pairs of (noise apart)·(inputs apart)): near 0 where unlike noise makes unlike
    inputs, 1 where all are alike."""
    apart = (noise[:, None] - noise).square().mean(-1)
    flat = made.flatten(1)
    # Two at a time would hold batch² inputs.
    distance = torch.cdist(flat, flat, p=1) / flat.shape[1]
    return torch.exp(-(apart * distance).mean())


def _norm(dims: int, channels: int, affine: bool = True) -> nn.Module:
    kind = nn.BatchNorm1d if dims == 1 else nn.BatchNorm2d
    return kind(channels, affine=affine, track_running_stats=False)

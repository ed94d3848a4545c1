"""A small vision transformer: patches of an image are steps, a token among them sees the whole."""

from __future__ import annotations

from torch import Tensor, nn

from nestling.errors import InputError
from nestling.models.attention import First, Placed, StepNorm, TransformerBlock
from nestling.models.parts import Network, image, named, scaled
from nestling.settings import Count, Positive


class Patches(nn.Module):
    """Squares of an image that do not overlap, each as one vector."""

    def __init__(self, before: int, dim: int, patch: int) -> None:
        """Squares of `patch` by `patch` pixels of `before` channels."""
        super().__init__()
        self.conv = nn.Conv2d(before, dim, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, channels, height, width) to (rows, patches, dim)."""
        return self.conv(x).flatten(2).transpose(1, 2)


def vit(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: StepNorm = "layer",
    patch: Count = 4,
    dim: Count = 64,
    depth: Count = 4,
    heads: Count = 4,
    head_dim: Count = 16,
    hidden: Count = 128,
) -> nn.Module:
    """`depth` blocks over patches; what fills none at the right and lower edge is not seen.

    patch:    pixels of a side of a patch.
    norm:     what normalises each step: layer or none.
    dim:      channels of a step.
    depth:    blocks.
    heads:    of the attention of every block.
    head_dim: channels of a head.
    hidden:   units of the perceptron of every block.
    """
    channels, height, breadth = image("vit", shape)
    if patch > min(height, breadth):
        raise InputError(
            f"patches of {patch} pixels are larger than the images ({height}x{breadth})",
            field="model.patch",
            fix=f"use at most {min(height, breadth)}",
        )
    dim, heads, hidden = (scaled(size, width) for size in (dim, heads, hidden))
    steps = (height // patch) * (breadth // patch)
    return Network(
        stem=named(patches=Patches(channels, dim, patch), placed=Placed(steps, dim)),
        stages=[TransformerBlock(dim, heads, head_dim, hidden, norm) for _ in range(depth)],
        neck=First(dim, norm),
        head=nn.Linear(dim, classes),
    )

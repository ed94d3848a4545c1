"""A small vision transformer: patches of an image are steps, a token among them sees the whole."""

from __future__ import annotations

from torch import Tensor, nn

from nestling.errors import InputError
from nestling.models.attention import Block, First, Placed
from nestling.models.parts import Network, image, named, scaled


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
    width: float = 1.0,
    norm: str = "layer",
    patch: int = 4,
    dim: int = 64,
    depth: int = 4,
    heads: int = 4,
    head_dim: int = 16,
    hidden: int = 128,
) -> nn.Module:
    """`depth` blocks over patches of `patch` pixels a side; what does not fill a patch at the right
    and lower edge is not seen."""
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
        stages=[Block(dim, heads, head_dim, hidden, norm) for _ in range(depth)],
        neck=First(dim, norm),
        head=nn.Linear(dim, classes),
    )

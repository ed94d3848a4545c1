"""The keyword transformer (Berg, O'Connor and Cruz, 2021), small: every frame of a sound is a step.

Takes pictures of one channel, whose columns are the frames (log-mel), and sequences. The paper's
smallest has 12 blocks of one head of 64 and norms behind the sums; here norms stand before them.
"""

from __future__ import annotations

from torch import Tensor, nn

from nestling.models.attention import First, Placed, StepNorm, TransformerBlock
from nestling.models.parts import Network, named, scaled, sequence
from nestling.settings import Count, Positive


class Frames(nn.Module):
    """Every frame as one vector."""

    def __init__(self, bands: int, dim: int) -> None:
        """Frames of so many bands, or channels."""
        super().__init__()
        self.linear = nn.Linear(bands, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, [1,] bands, frames) to (rows, frames, dim)."""
        return self.linear((x[:, 0] if x.dim() == 4 else x).transpose(1, 2))


def kwt(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: StepNorm = "layer",
    dim: Count = 64,
    depth: Count = 4,
    heads: Count = 4,
    head_dim: Count = 16,
    hidden: Count = 128,
) -> nn.Module:
    """`depth` blocks over the frames.

    norm:     what normalises each step: layer or none.
    dim:      channels of a step.
    depth:    blocks.
    heads:    of the attention of every block.
    head_dim: channels of a head.
    hidden:   units of the perceptron of every block.
    """
    one_picture = len(shape) == 3 and shape[0] == 1
    bands, frames = sequence("kwt", shape[1:] if one_picture else shape)
    dim, heads, hidden = (scaled(size, width) for size in (dim, heads, hidden))
    return Network(
        stem=named(frames=Frames(bands, dim), placed=Placed(frames, dim)),
        stages=[TransformerBlock(dim, heads, head_dim, hidden, norm) for _ in range(depth)],
        neck=First(dim, norm),
        head=nn.Linear(dim, classes),
    )

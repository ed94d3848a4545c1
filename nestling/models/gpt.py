"""A small causal transformer over token ids (after GPT-2): at every step it tells the next token,
from that step and those before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nestling.models.attention import StepNorm, TransformerBlock, step_norm
from nestling.models.parts import Network, named, scaled, text
from nestling.settings import Count, Positive


class Positions(nn.Module):
    """Adds where each step stands."""

    def __init__(self, steps: int, dim: int) -> None:
        """For at most so many steps."""
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, steps, dim) / 50)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, steps, dim) to the same."""
        return x + self.positions[:, : x.shape[1]]


def gpt(
    *,
    shape: tuple[int, ...],
    classes: int,
    width: Positive = 1.0,
    norm: StepNorm = "layer",
    dim: Count = 64,
    depth: Count = 4,
    heads: Count = 4,
    head_dim: Count = 16,
    hidden: Count = 256,
) -> nn.Module:
    """`depth` blocks of causal attention; (rows, steps) token ids to (rows, steps, classes), where
    the classes are the vocabulary. Runs for any number of steps up to that of its shape.

    norm:     what normalises each step: layer or none.
    dim:      channels of a step.
    depth:    blocks.
    heads:    of the attention of every block.
    head_dim: channels of a head.
    hidden:   units of the perceptron of every block.
    """
    steps = text("gpt", shape)
    dim, heads, hidden = (scaled(size, width) for size in (dim, heads, hidden))
    words = nn.Embedding(classes, dim)
    nn.init.normal_(words.weight, std=1 / 50)  # as large as the positions that are added to it
    return Network(
        stem=named(words=words, placed=Positions(steps, dim)),
        stages=[
            TransformerBlock(dim, heads, head_dim, hidden, norm, causal=True) for _ in range(depth)
        ],
        neck=named(norm=step_norm(norm, dim)),
        head=nn.Linear(dim, classes),
    )

"""What transformers are made of: attention with heads of a size of their own, and blocks of it.

Heads with a size of their own can be cut one by one, whatever the width of the embedding. Written
out, since torch's fused attention is one client after another in a stack of clients.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.errors import unknown
from nestling.settings import OneOf

NORMS = ("layer", "none")
StepNorm = Annotated[str, OneOf(NORMS)]


class Attention(nn.Module):
    """Every step looks at every other, or at none that comes later."""

    def __init__(self, dim: int, heads: int, head_dim: int, causal: bool = False) -> None:
        """Separate layers for queries, keys and values, so that each has its own rows to cut."""
        super().__init__()
        self.heads, self.head_dim, self.causal = heads, head_dim, causal
        self.q, self.k, self.v = (nn.Linear(dim, heads * head_dim) for _ in range(3))
        self.out = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, steps, dim) to the same."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        likeness = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        if self.causal:
            # Made anew, and not kept: it is no part of the state, and fits any number of steps.
            steps = torch.arange(x.shape[1], device=x.device)
            likeness = likeness.masked_fill(steps > steps[:, None], -math.inf)
        return self.out((likeness.softmax(-1) @ v).transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a shortcut."""

    def __init__(
        self, dim: int, heads: int, head_dim: int, hidden: int, norm: str, causal: bool = False
    ) -> None:
        """`hidden` is the width of the perceptron; in a causal one no step sees a later one."""
        super().__init__()
        self.norm1, self.norm2 = step_norm(norm, dim), step_norm(norm, dim)
        self.attention = Attention(dim, heads, head_dim, causal)
        self.widen, self.narrow = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, steps, dim) to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class Placed(nn.Module):
    """A token of its own in front of the steps, which will be the features, and where each step
    stands."""

    def __init__(self, steps: int, dim: int) -> None:
        """For so many steps, the token not counted."""
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, dim) / 50)
        self.positions = nn.Parameter(torch.randn(1, steps + 1, dim) / 50)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, steps, dim) to (rows, steps + 1, dim)."""
        return torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions


class First(nn.Module):
    """The first step, normalised: what became of the token."""

    def __init__(self, dim: int, norm: str) -> None:
        """For steps of so many channels."""
        super().__init__()
        self.norm = step_norm(norm, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, steps, dim) to (rows, dim)."""
        return self.norm(x[:, 0])


def step_norm(kind: str, dim: int) -> nn.Module:
    """A norm over the channels of each step."""
    if kind not in NORMS:
        raise unknown("norm of a transformer", kind, NORMS, field="model.norm")
    return nn.LayerNorm(dim) if kind == "layer" else nn.Identity()

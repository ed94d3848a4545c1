"""Trainable prototypes of classes (FedTGP)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Prototypes(nn.Module):
    """A vector for every class, through two layers."""

    def __init__(self, classes: int, size: int, hidden: int) -> None:
        """Starts from one random vector of `size` numbers per class."""
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(classes, size))
        self.layers = nn.Sequential(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, size))

    def forward(self) -> Tensor:
        """All prototypes, one row per class."""
        return self.layers(self.embedding)

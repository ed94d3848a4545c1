"""Small networks of every tie: residual, depth-wise, concatenating, flattening, and mixtures of
them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """Identity and projected shortcuts: channels on both sides of an add are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.a = nn.Conv2d(8, 6, 3, padding=1)
        self.b = nn.Conv2d(6, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 12, 1, stride=2)
        self.c = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = x + self.b(F.relu(self.a(x)))
        x = F.relu(self.c(x) + self.down(x))
        return self.head(x.mean((2, 3)))


class Depthwise(nn.Module):
    """Depth-wise convolutions, one of them with two outputs an input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.dw = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.norm = nn.BatchNorm2d(6)
        self.twice = nn.Conv2d(6, 12, 3, padding=1, groups=6)
        self.pw = nn.Conv2d(12, 10, 1)
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.dw(F.relu(self.stem(x)))))
        x = F.relu6(self.pw(self.twice(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Concatenating(nn.Module):
    """Dense connections, pooled and flattened: the reader's inputs come from several axes, each
    channel H×W wide."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.c = nn.Conv2d(12, 4, 1)
        self.fc = nn.Linear(16 * 16, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        ab = torch.cat([a, F.relu(self.b(a))], 1)
        abc = torch.cat([ab, self.c(F.relu(self.norm(ab)))], 1)
        return self.head(F.relu(self.fc(F.max_pool2d(abc, 2).flatten(1))))


class Flattening(nn.Module):
    """Convolutions into fully connected layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 8, 3, stride=2, padding=1)
        self.b = nn.Conv2d(8, 6, 3, padding=1)
        self.fc = nn.Linear(6 * 16, 9)
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.b(F.relu(self.a(x))))
        return self.head(torch.tanh(self.fc(torch.flatten(x, 1))))


class Grouped(nn.Module):
    """Group norm: whole groups of a prefix normalise as in the wide network."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.b = nn.Conv2d(16, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.b(F.relu(self.norm(self.a(x))))).mean((2, 3)))


class Halves(nn.Module):
    """A gate: the halves of one layer's output are tied to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 12)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.a(x.flatten(1)[:, :8]).chunk(2, dim=1)
        return self.head(left * torch.sigmoid(right))


NETWORKS = {c.__name__: c for c in (Residual, Depthwise, Concatenating, Flattening, Grouped)}
SHAPE = (2, 8, 8)

"""Small networks whose cost is known from elsewhere: the prototype's arenas, the published MAC
counts, or a pencil."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


def digits(width: float = 1.0, side: int = 8) -> nn.Sequential:
    """conv8-pool-conv16-pool-fc at a width."""
    a, b = max(1, round(8 * width)), max(1, round(16 * width))
    return nn.Sequential(
        nn.Conv2d(1, a, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(b * (side // 4) ** 2, 10),
    )  # fmt: skip


def ds_cnn(width: float = 1.0) -> nn.Sequential:
    """The key-word network of MLPerf Tiny, norms folded; its input is 1 x 49 x 10."""
    c = round(64 * width)
    layers: list[nn.Module] = [nn.Conv2d(1, c, (10, 4), stride=2, padding=(5, 1)), nn.ReLU()]
    for _ in range(4):
        layers += [
            nn.Conv2d(c, c, 3, padding=1, groups=c),
            nn.ReLU(),
            nn.Conv2d(c, c, 1),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 12))


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inside: int, out: int, stride: int, norm: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(inside, out, 3, stride, 1), nn.Conv2d(out, out, 3, 1, 1)
        self.na, self.nb = (
            (nn.BatchNorm2d(out), nn.BatchNorm2d(out)) if norm else (nn.Identity(), nn.Identity())
        )
        self.short = (
            nn.Conv2d(inside, out, 1, stride) if stride > 1 or inside != out else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.nb(self.b(torch.relu(self.na(self.a(x))))) + self.short(x))


def resnet8() -> nn.Sequential:
    """The image network of MLPerf Tiny, norms folded; its input is 3 x 32 x 32."""
    stages = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), *stages, *head)


def resnet18() -> nn.Sequential:
    """ResNet-18 with batch norm for 3 x 32 x 32."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    inside = 64
    for out, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(inside, out, stride, norm=True), Block(out, out, 1, norm=True)]
        inside = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def auto_encoder() -> nn.Sequential:
    """The anomaly network of MLPerf Tiny, norms folded; its input is 640."""
    sides = [640, 128, 128, 128, 128, 8, 128, 128, 128, 128, 640]
    layers: list[nn.Module] = []
    for a, b in pairwise(sides):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Residual(nn.Module):
    """lin2(h + lin1(h)) with h = lin0(x), all four wide."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h + self.inner(h))


class TwoBranches(nn.Module):
    """Two branches of a 2x2 image, joined along the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Conv2d(1, 2, 1), nn.Conv2d(1, 3, 1), nn.Linear(20, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([self.a(x), self.b(x)], dim=1).flatten(1))

"""The networks of the tasks, as every contestant builds them: stock layers only, so that they
travel to any process."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def cnn9k(shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> nn.Module:
    """Two convolutions of stride 2 and a linear layer: 9098 parameters on 28x28 digits, and little
    arithmetic."""
    channels, high, wide = shape
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * (high // 4) * (wide // 4), classes),
    )


def cifar_cnn(shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """The CIFAR-10 network of pfl-research's benchmarks: two convolutions and two linear layers,
    1.6 M parameters."""
    channels, high, wide = shape
    return nn.Sequential(
        *_convolution(channels, 32),
        *_convolution(32, 64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * ((high - 4) // 2) * ((wide - 4) // 2), 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def vgg16(shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """Nestling's VGG16 for small images: batch norm, two linear layers of 512, no dropout, 15 M
    parameters."""
    from nestling.models import build

    return build(
        "vgg16", shape=shape, classes=classes, norm="batch", hidden=(512, 512), dropout=0.0
    )


def _convolution(before: int, after: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(before, after, 3), nn.ReLU()


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "cnn9k": cnn9k,
    "cifar_cnn": cifar_cnn,
    "vgg16": vgg16,
}
"""The networks that the contestants beside Nestling can build, by name."""

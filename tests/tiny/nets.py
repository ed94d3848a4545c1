"""Networks of every operation that the C runtime has, small enough to train in a test, and torch as
the reference for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.models import build
from nestling.planning.descriptor import DescriptorSettings
from nestling.tiny.runtime.job import Step
from nestling.training.augment import REACH, shift
from nestling.training.objectives import divergence
from nestling.training.optimisers import Buffers, Optim
from nestling.training.optimisers import step as update


class Residual(nn.Module):
    """Around `body`, then ReLU: the value that goes both ways is the result of an activation."""

    def __init__(self, body: nn.Module, after: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.after = body, after or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.body(x))


class Branches(nn.Module):
    """The sum of several branches."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        total = self.branches[0](x)
        for branch in self.branches[1:]:
            total = total + branch(x)
        return total


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


class Small(nn.Module):
    """The study's network: two convolutions with pooling, one dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Linear(784, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        return self.head(F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1))


def head(inputs: int, classes: int = 5) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(inputs, classes)]


def conv(shape: tuple[int, int, int], *layers: nn.Module) -> Callable[[], nn.Module]:
    """Some layers and a dense one on what they give."""

    def made() -> nn.Module:
        body = nn.Sequential(*copy.deepcopy(layers))
        for parameter in body.parameters():
            parameter.data.uniform_(-0.4, 0.4)
        with torch.no_grad():
            inputs = body(torch.zeros(1, *shape)).numel()
        return nn.Sequential(*body, *head(inputs))

    return made


IMAGE, WIDE, COLOUR = (1, 8, 8), (2, 9, 7), (4, 6, 6)

OPERATIONS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "dense": ((12,), lambda: nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 5))),
    "dense without bias": (
        (12,),
        lambda: nn.Sequential(
            nn.Linear(12, 9, bias=False), nn.ReLU6(), nn.Linear(9, 5, bias=False)
        ),
    ),
    "dense of one": ((1,), lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 5))),
    "conv 3x3": (
        IMAGE,
        conv(IMAGE, nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1)),
    ),
    "conv 3x3 no padding": (WIDE, conv(WIDE, nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 4, 3))),
    "conv 3x3 stride 2": (
        WIDE,
        conv(WIDE, nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, 2, 1)),
    ),
    "conv 3x3 padding 2": (
        WIDE,
        conv(WIDE, nn.Conv2d(2, 3, 3, padding=2), nn.ReLU(), nn.Conv2d(3, 2, 3, padding=2)),
    ),
    "conv 3x3 on 1x1": (
        (4, 1, 1),
        conv((4, 1, 1), nn.Conv2d(4, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)),
    ),
    "conv 3x3 on 2x2": (
        (3, 2, 2),
        conv((3, 2, 2), nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 5, 3, padding=1)),
    ),
    "conv 3x3 on one column": (
        (2, 7, 1),
        conv((2, 7, 1), nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)),
    ),
    "conv 5x3 stride 2x1": (
        WIDE,
        conv(
            WIDE, nn.Conv2d(2, 3, (5, 3), (2, 1), (1, 2)), nn.Conv2d(3, 4, (5, 3), (2, 1), (2, 1))
        ),
    ),
    "conv 4x10 stride 2": (
        (1, 21, 10),
        conv((1, 21, 10), nn.Conv2d(1, 3, (10, 4), 2, (5, 1)), nn.Conv2d(3, 3, (4, 2), 2, (2, 1))),
    ),
    "conv 3x5": (
        WIDE,
        conv(
            WIDE,
            nn.Conv2d(2, 3, (3, 5), padding=(1, 2)),
            nn.ReLU(),
            nn.Conv2d(3, 4, (2, 3), padding=(0, 1)),
        ),
    ),
    "conv 1x1": (
        COLOUR,
        conv(
            COLOUR, nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Conv2d(6, 5, 1), nn.ReLU(), nn.Conv2d(5, 3, 1)
        ),
    ),
    "conv 1x1 stride 2": (
        COLOUR,
        conv(COLOUR, nn.Conv2d(4, 6, 1, 2), nn.ReLU(), nn.Conv2d(6, 5, 1, (1, 2))),
    ),
    "conv 1x1 padded": (
        COLOUR,
        conv(COLOUR, nn.Conv2d(4, 3, 1, padding=1), nn.ReLU(), nn.Conv2d(3, 5, 1, padding=2)),
    ),
    "conv in groups": (
        COLOUR,
        conv(COLOUR, nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.Conv2d(6, 9, 1, groups=3)),
    ),
    "conv without bias": (
        COLOUR,
        conv(COLOUR, nn.Conv2d(4, 5, 3, bias=False), nn.ReLU6(), nn.Conv2d(5, 6, 1, bias=False)),
    ),
    "depth-wise": (
        COLOUR,
        conv(
            COLOUR,
            nn.Conv2d(4, 4, 3, padding=1, groups=4),
            nn.ReLU(),
            nn.Conv2d(4, 8, 3, 2, 1, groups=4),
        ),
    ),
    "depth-wise separable": (
        COLOUR,
        conv(
            COLOUR,
            nn.Conv2d(4, 4, 3, padding=1, groups=4),
            nn.ReLU6(),
            nn.Conv2d(4, 7, 1),
            nn.ReLU6(),
        ),
    ),
    "conv 1-D": (
        (3, 20),
        conv(
            (3, 20),
            nn.Conv1d(3, 4, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv1d(4, 5, 3, padding=1),
        ),
    ),
    "max pool": (
        IMAGE,
        conv(IMAGE, nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2)),
    ),
    "max pool 3 stride 2": (
        WIDE,
        conv(WIDE, nn.Conv2d(2, 3, 1), nn.MaxPool2d(3, 2, 1), nn.ReLU6(), nn.Conv2d(3, 4, 2)),
    ),
    "max pool overlapping": (
        WIDE,
        conv(WIDE, nn.Conv2d(2, 3, 1), nn.MaxPool2d((3, 2), 1), nn.Conv2d(3, 4, 2)),
    ),
    "average pool": (
        WIDE,
        conv(WIDE, nn.Conv2d(2, 3, 1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(3, 4, 2)),
    ),
    "average pool padded": (
        WIDE,
        conv(
            WIDE,
            nn.Conv2d(2, 3, 1),
            nn.AvgPool2d((3, 2), (2, 1), (1, 1)),
            nn.ReLU(),
            nn.Conv2d(3, 4, 2),
        ),
    ),
    "global pool": (COLOUR, conv(COLOUR, nn.Conv2d(4, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))),
    "residual": (
        COLOUR,
        conv(
            COLOUR,
            nn.Conv2d(4, 4, 1),
            nn.ReLU(),
            Residual(nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1), nn.ReLU())),
        ),
    ),
    "residual of the input": (
        COLOUR,
        conv(COLOUR, Residual(nn.Conv2d(4, 4, 3, 1, 1), nn.ReLU6()), Residual(nn.Conv2d(4, 4, 1))),
    ),
    "branches": (
        COLOUR,
        conv(
            COLOUR,
            nn.Conv2d(4, 3, 1),
            Branches(*(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()) for _ in range(3))),
            Branches(nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU6()),
        ),
    ),
    "twice the same": (
        COLOUR,
        conv(COLOUR, nn.Conv2d(4, 3, 1), Twice(), nn.ReLU(), Twice(), nn.Conv2d(3, 2, 3)),
    ),
    "group norm": (
        COLOUR,
        conv(
            COLOUR,
            nn.Conv2d(4, 6, 3),
            nn.GroupNorm(3, 6),
            nn.ReLU(),
            nn.Conv2d(6, 4, 3),
            nn.GroupNorm(1, 4),
        ),
    ),
    "group norm without affine": (
        COLOUR,
        conv(COLOUR, nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6, affine=False), nn.ReLU6()),
    ),
    "group norm of the input": (
        COLOUR,
        conv(COLOUR, nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.MaxPool2d(2)),
    ),
    "ends in ReLU": (
        COLOUR,
        lambda: nn.Sequential(nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(48, 5), nn.ReLU()),
    ),
    "ends in a pool": (
        COLOUR,
        lambda: nn.Sequential(nn.Conv2d(4, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    ),
}
"""Sample shape and network by the operation that is tried."""

NETWORKS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "small": ((1, 28, 28), Small),
    "tinycnn": (
        (1, 28, 28),
        lambda: build("tinycnn", shape=(1, 28, 28), classes=10, width=0.5, norm="group"),
    ),
    "autoencoder": (
        (12,),
        lambda: build("autoencoder", shape=(12,), classes=12, hidden=(16, 16), code=4),
    ),
    "dscnn": (
        (1, 49, 10),
        lambda: build("dscnn", shape=(1, 49, 10), classes=12, width=0.25, norm="none"),
    ),
    "resnet8": (
        (3, 32, 32),
        lambda: build("resnet8", shape=(3, 32, 32), classes=10, width=0.25, norm="group"),
    ),
}
"""Whole networks."""


def samples(shape: Sequence[int], classes: int, rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(rows, *shape, generator=source), torch.randint(
        0, classes, (rows,), generator=source
    )


def batches(rows: int, steps: int = 5, size: int = 4, seed: int = 0) -> list[Step]:
    source = np.random.default_rng(seed)
    return [Step(source.permutation(rows)[: size - (k == steps - 1)]) for k in range(steps)]


def train_with_torch(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    steps: Sequence[Step],
    settings: DescriptorSettings,
    *,
    freeze: Sequence[str] = (),
    anchor: Mapping[str, Tensor] | None = None,
    mask: Mapping[str, Tensor] | None = None,
    present: Tensor | None = None,
    targets: Tensor | None = None,
    head: nn.Linear | None = None,
) -> float:
    """What a job asks for, by torch and the project's own optimiser. Gives the summed loss. `head`
    is the layer of the inner loss."""
    params = {
        n: p
        for n, p in net.named_parameters()
        if not any(n == f or n.startswith(f + ".") for f in freeze)
    }
    optim = Optim(
        lr=settings.lr, momentum=settings.momentum, weight_decay=settings.decay, clip=settings.clip
    )
    buffers, total = Buffers(), 0.0
    for step in steps:
        rows = torch.from_numpy(np.asarray(step.rows, np.int64))
        inputs = (
            x[rows]
            if step.shifts is None
            else shift(x[rows], torch.from_numpy(np.asarray(step.shifts, np.int64)) + REACH)
        )
        seen: list[Tensor] = []
        handle = (
            head.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0]))
            if head is not None
            else None
        )
        logits = net(inputs)
        if handle is not None:
            handle.remove()
        loss = settings.ce * F.cross_entropy(
            logits if present is None else logits * present, y[rows]
        )
        if targets is not None:
            loss = loss + settings.mse * F.mse_loss(logits, targets[rows])
            loss = (
                loss + settings.kd * divergence(targets[rows], logits, settings.temperature).mean()
            )
        if head is not None and step.inner:
            inner = F.linear(seen[0][:, : step.inner], head.weight[:, : step.inner], head.bias)
            loss = loss + settings.inner * F.cross_entropy(inner, y[rows])
        if anchor is not None:
            loss = loss + settings.mu / 2 * sum(
                ((p - anchor[n]) ** 2).sum() for n, p in params.items()
            )
        raw = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        grads = [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(params.values(), raw, strict=True)
        ]
        if mask is not None:
            grads = [g * mask[n] if n in mask else g for n, g in zip(params, grads, strict=True)]
        update(optim, list(params.values()), grads, buffers)
        total += float(loss.detach()) * len(rows)
    return total

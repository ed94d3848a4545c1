"""The plain trainer: one client, one phase, one batch after another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from nestling.seeds import stream, torch_seeded
from nestling.training.augment import AUGMENTATIONS
from nestling.training.objectives import Batch, Net
from nestling.training.optimisers import Buffers, step
from nestling.training.phase import Phase

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Trained:
    """What a phase did: mean loss over its samples, steps taken, samples seen."""

    loss: float
    steps: int
    samples: int


def train(module: nn.Module, phase: Phase, x: Tensor, y: Tensor, seed: int, *purpose: str | int) -> Trained:
    """Trains `module` in place. All chance (order of rows, dropout) comes from (seed, purpose)."""
    module.train()
    params = {n: p for n, p in module.named_parameters() if not any(n == f or n.startswith(f + ".") for f in phase.freeze)}
    net, buffers = Net(module, params), Buffers()
    leaves, augmented = list(params.values()), AUGMENTATIONS[phase.augment]
    total, samples = torch.zeros((), device=x.device), 0
    with torch_seeded(seed, "noise", *purpose), _hooked(module, phase):
        for number, rows in enumerate(batches(len(x), phase, module, seed, *purpose)):
            rows = rows.to(x.device)
            loss = phase.objective(net, Batch(augmented(x[rows]), y[rows], rows, number), phase.given)
            raw = torch.autograd.grad(loss, leaves, allow_unused=True)
            grads = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, raw, strict=True)]
            if phase.rule is not None:
                ruled = phase.rule(params, dict(zip(params, grads, strict=True)), phase.given)
                grads = [ruled[name] for name in params]
            step(phase.optim, leaves, grads, buffers)
            total += loss.detach() * len(rows)
            samples += len(rows)
    return Trained(float(total) / max(samples, 1), buffers.steps, samples)


def batches(rows: int, phase: Phase, module: nn.Module, seed: int, *purpose: str | int) -> Iterator[Tensor]:
    """Rows in batches, in an order of its own for every epoch."""
    least = 2 if _needs_two(module) else 1
    done = 0
    for epoch in range(phase.epochs):
        order = torch.from_numpy(stream(seed, "order", *purpose, epoch).permutation(rows).astype(np.int64))
        for start in range(0, rows, phase.batch):
            batch = order[start : start + phase.batch]
            short = len(batch) < min(phase.batch, rows) and phase.drop_last
            if short or len(batch) < least:
                continue
            if phase.steps and done >= phase.steps:
                return
            done += 1
            yield batch


def _needs_two(module: nn.Module) -> bool:
    """Batch statistics of a single sample are undefined where the feature map is 1×1."""
    return any(isinstance(m, _BATCH_NORMS) for m in module.modules())


@contextlib.contextmanager
def _hooked(module: nn.Module, phase: Phase) -> Iterator[None]:
    handles = [
        layer.register_forward_hook(lambda layer, _, out, change=hook.change: change(layer, out))
        for hook in phase.hooks
        for layer in module.modules()
        if isinstance(layer, hook.layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

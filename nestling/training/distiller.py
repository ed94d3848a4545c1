"""Server distillation: what teachers know of some inputs, poured into a student.

One component for every method that distils on the server: teachers' logits are combined into targets once, then the student is
fitted to them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from nestling.seeds import stream, torch_seeded
from nestling.training.objectives import distillation
from nestling.training.optimisers import Buffers, Optim, step
from nestling.views import State

WEIGHTINGS = ("samples", "variance", "uniform")

Forward = Callable[[Mapping[str, Tensor], Tensor, int], Sequence[Tensor]]
"""(student state, inputs, step number) → the student's outputs that are to match the targets."""


@dataclass(frozen=True)
class Distillation:
    """How long and how hard the student is fitted."""

    steps: int = 100
    batch: int = 64
    temperature: float = 3.0
    optim: Optim = field(default_factory=lambda: Optim("adam", 1e-3))


@torch.no_grad()
def logits_of(module: nn.Module, x: Tensor, batch: int = 256) -> Tensor:
    """The outputs of a network in evaluation mode."""
    module.eval()
    return torch.cat([module(part) for part in x.split(batch)])


def combine(logits: Sequence[Tensor], samples: Sequence[int], weighting: str = "samples") -> Tensor:
    """Teachers' logits as one target a sample.

    samples: by the teachers' numbers of training samples; variance: per input, by how far a teacher's logits spread (a sure teacher
    says more); uniform: the plain mean.
    """
    stack = torch.stack(list(logits))
    if weighting == "variance":
        weight = stack.var(dim=-1, keepdim=True)
    else:
        sizes = [float(n) if weighting == "samples" else 1.0 for n in samples]
        weight = torch.tensor(sizes, dtype=stack.dtype, device=stack.device).reshape(-1, 1, 1)
    return (stack * weight).sum(0) / weight.sum(0)


def distil(
    state: State,
    parameters: Collection[str],
    forward: Forward,
    x: Tensor,
    targets: Tensor,
    settings: Distillation,
    seed: int,
    *purpose: str | int,
) -> State:
    """A new state whose outputs on `x` match the targets; the tensors named by `parameters` are trained, the others are buffers."""
    trained = {name: t.detach().clone().requires_grad_(name in parameters) for name, t in state.items()}
    leaves = {name: t for name, t in trained.items() if t.requires_grad}
    buffers = Buffers()
    with torch_seeded(seed, "distil", *purpose):
        for number, rows in enumerate(_rows(len(x), settings, seed, *purpose)):
            outputs = forward(trained, x[rows], number)
            losses = [distillation(targets[rows], out, settings.temperature) for out in outputs]
            loss = torch.stack(losses).mean()
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            filled = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves.values(), grads, strict=True)]
            step(settings.optim, list(leaves.values()), filled, buffers)
    return {name: t.detach() for name, t in trained.items()}


def _rows(count: int, settings: Distillation, seed: int, *purpose: str | int) -> Iterator[Tensor]:
    done = 0
    for epoch in range(settings.steps):
        order = torch.from_numpy(stream(seed, "proxy order", *purpose, epoch).permutation(count).astype(np.int64))
        for rows in order.split(settings.batch):
            if done == settings.steps:
                return
            done += 1
            yield rows

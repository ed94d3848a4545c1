"""Server distillation: what teachers know of some inputs, poured into a student.

One component for every method that distils on the server. A *source* gives batch after batch:
inputs, and what the teachers, combined, say of them. A *student* is a state with the forward pass
that its loss looks at. `distil` fits one to the other for some steps, or until a check no longer
gets better. Methods whose inputs are made by a generator that learns against the student update
both as students, one step at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from nestling.seeds import stream, torch_seeded
from nestling.training.kept import Rate
from nestling.training.objectives import distillation
from nestling.training.optimisers import Buffers, Optim, step
from nestling.views import State

Forward = Callable[[Mapping[str, Tensor], Tensor, int], Any]
"""(student state, inputs, step number) → what the loss compares with the targets: logits, or
several of them. One that does not do the same in every step says after how many it comes round
(`turns`)."""

Loss = Callable[[Any, Any], Tensor]
"""(what the student says, what the teachers said) → what is minimised."""

Source = Iterable[tuple[Tensor, Any]]
"""Inputs and what the teachers say of them, batch after batch, without end."""


class Work(Protocol):
    """Who does a body of work again and again (see `recorder`)."""

    def session(self) -> AbstractContextManager[None]:
        """The block in which work is done."""

    def do(self, kind: Hashable, body: Callable[..., None], *inputs: Tensor) -> None:
        """Does the body with these inputs; bodies of one kind do the same."""


Check = Callable[[State], float]
"""How good a student is; more is better."""


@dataclass(frozen=True)
class Distillation:
    """How long and how hard the student is fitted.

    cosine:   whether the learning rate falls to 0 along a half cosine.
    every:    how many steps lie between two checks (where there is a check).
    patience: after so many steps without a better check it ends (0: never).
    """

    steps: int = 100
    batch: int = 64
    temperature: float = 3.0
    optim: Optim = field(default_factory=lambda: Optim("adam", 1e-3))
    cosine: bool = False
    every: int = 100
    patience: int = 0


class Student:
    """A state that is being fitted: the tensors named by `parameters` are trained, the others are
    buffers. One that is `lasting` never moves, for work that is recorded; it begins anew with
    `begin`."""

    def __init__(
        self,
        state: Mapping[str, Tensor],
        parameters: Collection[str],
        forward: Forward,
        optim: Optim,
        name: Hashable = None,
        lasting: bool = False,
    ) -> None:
        """Starts from a copy of `state`; a lasting one gets its optimiser memory and learning rate
        as tensors now."""
        self.tensors = {
            name: t.detach().clone().requires_grad_(name in parameters) for name, t in state.items()
        }
        self.leaves = {name: t for name, t in self.tensors.items() if t.requires_grad}
        self.forward, self.optim, self.steps, self.name = forward, optim, 0, name
        leaves = list(self.leaves.values())
        self._memory = Buffers.zeros(optim, leaves) if lasting else Buffers()
        self._rate = Rate(leaves[0].device) if lasting else None

    @torch.no_grad()
    def begin(self, state: Mapping[str, Tensor], optim: Optim) -> None:
        """Starts again from a state, with nothing remembered."""
        torch._foreach_copy_(
            [self.tensors[name] for name in state], [t.detach() for t in state.values()]
        )
        torch._foreach_zero_(self._memory.everything())
        self.optim, self.steps = optim, 0
        self.set_rate(optim.lr)

    def set_rate(self, lr: float) -> None:
        """The learning rate from now on."""
        self.optim = replace(self.optim, lr=lr)
        if self._rate is not None:
            self._rate.set(lr)

    def __call__(self, x: Tensor) -> Any:
        """What it says of some inputs."""
        return self.forward(self.tensors, x, self.steps)

    def update(self, loss: Tensor) -> None:
        """One step down the loss."""
        leaves = list(self.leaves.values())
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        filled = [
            torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads, strict=True)
        ]
        step(
            self.optim,
            leaves,
            filled,
            self._memory,
            lr=None if self._rate is None else self._rate.tensor,
        )
        self.steps += 1

    def fit(self, number: int, judge: Loss, x: Tensor, *targets: Tensor) -> None:
        """The step of a number towards what was said of some inputs."""
        self.steps = number
        self.update(judge(self(x), targets[0] if len(targets) == 1 else targets))

    def state(self) -> State:
        """The state as it is now, in tensors of its own."""
        return {name: t.detach().clone() for name, t in self.tensors.items()}


def distil(
    student: Student,
    source: Source,
    settings: Distillation,
    seed: int,
    *purpose: str | int,
    loss: Loss | None = None,
    check: Check | None = None,
    work: Work | None = None,
) -> State:
    """The student's state after distillation; with a check, the best of those that were checked,
    its start among them. Without a loss it is τ²·KL to the teachers' logits, the mean over the
    student's outputs where it has several. `work` is who does the steps (see `recorder`)."""
    judge = loss or _matching(settings.temperature)
    turns = getattr(student.forward, "turns", 1)
    best = None if check is None else student.state()
    value, since = -math.inf if check is None or best is None else check(best), 0
    with torch_seeded(seed, "distil", *purpose), work.session() if work else nullcontext():
        for number, (x, targets) in zip(range(settings.steps), source, strict=False):
            if settings.cosine:
                student.set_rate(
                    settings.optim.lr * (1 + math.cos(math.pi * number / settings.steps)) / 2
                )
            given = (x, targets) if isinstance(targets, Tensor) else (x, *targets)
            turn = number % turns
            if work:
                work.do((student.name, settings, turn), partial(student.fit, turn, judge), *given)
            else:
                student.fit(turn, judge, *given)
            student.steps = number + 1
            if check is not None and (
                (number + 1) % settings.every == 0 or number + 1 == settings.steps
            ):
                now = check(student.state())
                best, value, since = (
                    (student.state(), now, 0)
                    if now > value
                    else (best, value, since + settings.every)
                )
                if settings.patience and since >= settings.patience:
                    break
    return student.state() if best is None else best


def _matching(temperature: float) -> Loss:
    def loss(said: Tensor | Sequence[Tensor], targets: Tensor) -> Tensor:
        outputs = [said] if isinstance(said, Tensor) else said
        return torch.stack([distillation(targets, out, temperature) for out in outputs]).mean()

    return loss


def rows_of(
    count: int, batch: int, seed: int, *purpose: str | int, place: torch.device | None = None
) -> Iterator[Tensor]:
    """Batches of rows without end, every epoch in an order of its own."""
    epoch = 0
    while count:
        order = torch.from_numpy(
            stream(seed, "proxy order", *purpose, epoch).permutation(count).astype(np.int64)
        )
        yield from order.to(place).split(batch)
        epoch += 1


def proxy(
    x: Tensor, targets: Tensor | Sequence[Tensor], batch: int, seed: int, *purpose: str | int
) -> Iterator[tuple[Tensor, Any]]:
    """The source that is a set of inputs, of which the teachers were asked once. Several targets
    come as a tuple."""
    for rows in rows_of(len(x), batch, seed, *purpose, place=x.device):
        yield (
            x[rows],
            targets[rows] if isinstance(targets, Tensor) else tuple(t[rows] for t in targets),
        )


def whole(module: nn.Module, training: bool = True) -> Forward:
    """The forward pass of a network whose state is given from outside."""

    def forward(state: Mapping[str, Tensor], x: Tensor, _number: int) -> Tensor:
        return torch.func.functional_call(module.train(training), dict(state), (x,))

    return forward


@torch.no_grad()
def logits_of(module: nn.Module, x: Tensor, batch: int = 256) -> Tensor:
    """The outputs of a network in evaluation mode."""
    module.eval()
    return torch.cat([module(part) for part in x.split(batch)])


def combine(logits: Sequence[Tensor], samples: Sequence[int], weighting: str = "samples") -> Tensor:
    """Teachers' logits as one target per sample.

    samples: by the teachers' numbers of training samples; variance: per input, by how far a
             teacher's logits spread (a sure teacher
    says more); uniform: the plain mean.
    """
    stack = torch.stack(list(logits))
    weight = teacher_weights(stack, samples, weighting)
    # where nobody says anything all count alike
    weight = torch.where(weight.sum(0) > 0, weight, torch.ones_like(weight))
    return (stack * weight).sum(0) / weight.sum(0)


def teacher_weights(logits: Tensor, samples: Sequence[int], weighting: str) -> Tensor:
    """How much each teacher counts, (teachers, inputs or 1, 1), for logits of shape (teachers,
    inputs, classes)."""
    if weighting == "variance":
        return logits.var(dim=-1, keepdim=True)
    sizes = [float(n) if weighting == "samples" else 1.0 for n in samples]
    return torch.tensor(sizes, dtype=logits.dtype, device=logits.device).reshape(-1, 1, 1)


def teacher_shares(logits: Tensor, samples: Sequence[int], weighting: str) -> Tensor:
    """The same, adding up to 1 over the teachers; where none counts (by variance: nobody says
    anything) all count alike."""
    weight = teacher_weights(logits, samples, weighting)
    total = weight.sum(0)
    return torch.where(total > 0, weight / total, 1 / len(weight))

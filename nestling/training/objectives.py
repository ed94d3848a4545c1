"""Objectives: what a client minimises.

An objective is a pure function of (net, batch, given): it reads the network, one batch and the
tensors that came with the phase, and returns the batch's mean loss. It keeps nothing, so an engine
may run it eagerly, for many clients at once, or elsewhere.

Where an engine fills up a short batch to keep all batches equal, `batch.mask` says which rows
count: an objective that takes its mean with `batch.mean` is then still exact. (One that does not is
noticed, and its short batches run on their own.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.models.taps import logits_and_features
from nestling.tasks import losses
from nestling.tasks.losses import FILLING, mean_over

Given = Mapping[str, Tensor]


@dataclass(eq=False)
class Batch:
    """One batch: inputs, labels, which rows of the phase's data they are, its number in the phase
    (from 0), and where it was filled up, which rows count.

    An engine that records a step and replays it keeps the number on the device, as `at`. An
    objective that asks for it by `turn`, `pick` or `counter` is one recording for all batches; one
    that looks at `number` itself needs a recording for every number.
    """

    x: Tensor
    y: Tensor
    rows: Tensor
    number: int = 0
    mask: Tensor | None = None
    at: Tensor | None = None

    def turn(self, count: int) -> int:
        """Whose turn it is among `count`, batch after batch: 0, 1, …, count − 1, 0, …"""
        return self.number % count

    def pick(self, rows: Tensor) -> Tensor:
        """The row that belongs to this batch, of a tensor with one for each."""
        return rows[self.number] if self.at is None else rows.index_select(0, self.at.reshape(1))[0]

    @property
    def counter(self) -> int | Tensor:
        """The number, to calculate with."""
        return self.number if self.at is None else self.at

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the rows that count; `values` has one entry (or one row) per sample."""
        if self.mask is None:
            return values.mean()
        each = values.reshape(len(values), -1).mean(1)
        return torch.where(self.mask, each, 0.0).sum() / self.mask.sum()


@dataclass(eq=False)
class Net:
    """A network as an objective sees it: callable, with its parameters by name."""

    module: nn.Module
    params: Mapping[str, Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """The network's output under its own parameters."""
        return self.module(x)

    def state(self) -> dict[str, Tensor]:
        """Parameters and buffers by name, as they are now."""
        return {**dict(self.module.named_buffers()), **dict(self.module.named_parameters())}

    def with_weights(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The same network's output under other weights (a teacher, the received model)."""
        return torch.func.functional_call(self.module, dict(weights), (x,))


Objective = Callable[[Net, Batch, Given], Tensor]


def supervised(net: Net, batch: Batch, given: Given) -> Tensor:  # noqa: ARG001 (an objective's signature)
    """Plain supervised training: the loss of the task, by the type of its targets."""
    return batch.mean(losses(net(batch.x), batch.y))


def present_cross_entropy(net: Net, batch: Batch, given: Given) -> Tensor:
    """Cross-entropy with the logits of classes the client does not hold set to 0 (not −∞):
    `given["present"]` flags its classes."""
    return batch.mean(losses(net(batch.x) * given["present"], batch.y))


def proximal(net: Net, batch: Batch, given: Given, *, mu: float) -> Tensor:
    """Cross-entropy and the pull towards the given parameters."""
    distance = sum(
        ((p - given[name]) ** 2).sum() for name, p in net.params.items() if name in given
    )
    return supervised(net, batch, given) + mu / 2 * distance


def with_targets(
    net: Net,
    batch: Batch,
    given: Given,
    *,
    ce: float = 1.0,
    kd: float = 0.0,
    mse: float = 0.0,
    temperature: float = 1.0,
) -> Tensor:
    """Cross-entropy, a pull towards a teacher's logits and a regression, each with its weight.
    `given["targets"]` has a row for every row of the phase's data: the teacher's logits, or what
    the network's outputs are to be."""
    logits, target = net(batch.x), given["targets"][batch.rows]
    each = ce * losses(logits, batch.y) + mse * ((logits - target) ** 2).mean(-1)
    return batch.mean(each + kd * divergence(target, logits, temperature) if kd else each)


def forward_with_features(
    net: Net, x: Tensor, head: str, weights: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """A network's logits and its features, which are what its head is given; its own, or those
    under other weights."""
    return logits_and_features(
        net.module, head, x, net if weights is None else partial(net.with_weights, weights)
    )


def divergence(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """τ²·KL(softmax(teacher/τ) ‖ softmax(student/τ)) of every sample."""
    log_q = F.log_softmax(student / temperature, dim=-1)
    log_p = F.log_softmax(teacher / temperature, dim=-1)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1) * temperature**2


def distillation(
    teacher: Tensor, student: Tensor, temperature: float = 1.0, batch: Batch | None = None
) -> Tensor:
    """The divergence, mean over the batch: the one convention of all distilling methods. Where the
    batch's targets are no classes it is that of the task: of flags between the chances of each, of
    values the squared difference."""
    if batch is None:
        return divergence(teacher, student, temperature).mean()
    if batch.y.is_floating_point():
        real = ~batch.y.isnan()
        return batch.mean(mean_over(torch.where(real, student - teacher, 0.0).square(), real))
    if batch.y.dtype == torch.bool:
        return (
            batch.mean(_flags_apart(teacher / temperature, student / temperature)) * temperature**2
        )
    each = divergence(teacher, student, temperature)
    if batch.y.dim() > 1:  # step by step
        real = batch.y != FILLING
        each = mean_over(torch.where(real, each, 0.0), real)
    return batch.mean(each)


def _flags_apart(teacher: Tensor, student: Tensor) -> Tensor:
    """The divergence between the chances of flags, mean over the flags of a row."""
    yes = teacher.sigmoid()
    true, false = (F.logsigmoid(sign * teacher) - F.logsigmoid(sign * student) for sign in (1, -1))
    return (yes * true + (1 - yes) * false).mean(-1)

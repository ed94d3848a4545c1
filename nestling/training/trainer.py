"""The plain trainer: one client, one phase, one batch after another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from nestling.models.pixels import by_pixel
from nestling.seeds import numbers, torch_seeded
from nestling.training.augment import AUGMENTATIONS
from nestling.training.objectives import Batch, Given, Net
from nestling.training.optimisers import Buffers, step
from nestling.training.order import Schedule, counters, keys, schedule
from nestling.training.phase import Phase

AT_ONCE = 512
"""How many rows are fetched together."""


@dataclass(frozen=True)
class Trained:
    """What a phase did: mean loss over its samples, steps taken, samples seen."""

    loss: float
    steps: int
    samples: int


def train(
    module: nn.Module,
    phase: Phase,
    x: Tensor,
    y: Tensor,
    seed: int,
    client: int = 0,
    round: int = 0,
    number: int = 0,
) -> Trained:
    """Trains `module` in place. All chance (order of rows, augmentation, dropout) comes from (seed,
    client, round, number of phase)."""
    module.train()
    net, buffers = Net(module, trained(module, phase)), Buffers()
    total, samples = torch.zeros((), device=x.device), 0
    with torch_seeded(seed, "noise", client, round, number), hooked(module, phase):
        for batch in _feed(module, phase, x, y, seed, client, round, number):
            total += train_step(net, phase, batch, buffers) * len(batch.rows)
            samples += len(batch.rows)
    return Trained(float(total) / max(samples, 1), int(buffers.steps), samples)


def _feed(
    module: nn.Module,
    phase: Phase,
    x: Tensor,
    y: Tensor,
    seed: int,
    client: int,
    round: int,
    number: int,
) -> Iterator[Batch]:
    """The phase's batches. Rows are fetched and changed for several of them at once: what a small
    batch costs there is the calls."""
    plan = phase_schedule(phase, module, [len(x)], seed, [client], round, number)
    lengths, steps = plan.lengths[0], max(1, AT_ONCE // phase.batch)
    real = np.arange(plan.wide) < lengths[:, None]
    draws = _draws(phase, keys("augment", seed, [client], round, number), plan)
    augment = AUGMENTATIONS[phase.augment]
    for start in range(0, plan.steps, steps):
        some, flags = slice(start, start + steps), real[start : start + steps]
        rows = torch.from_numpy(plan.rows[0, some][flags]).to(x.device)
        inputs = x[rows]
        if augment is not None and draws is not None:
            inputs = augment.change(inputs, torch.from_numpy(draws[some][flags]).to(x.device))
        parts = [t.split(lengths[some].tolist()) for t in (by_pixel(module, inputs), y[rows], rows)]
        for k, (own, labels, which) in enumerate(zip(*parts, strict=True)):
            yield Batch(own, labels, which, start + k)


def _draws(phase: Phase, key: np.ndarray, plan: Schedule) -> np.ndarray | None:
    """(steps, rows, …) what the augmentation draws."""
    augment = AUGMENTATIONS[phase.augment]
    if augment is None:
        return None
    chance = numbers(key, counters(0, plan.steps * phase.batch)).reshape(plan.steps, phase.batch)
    return augment.draws(chance[:, : plan.wide])


def train_step(
    net: Net, phase: Phase, batch: Batch, buffers: Buffers, lr: Tensor | None = None
) -> Tensor:
    """One update of the network on one batch; gives the loss. `lr` stands in for the optimiser's
    own where it must be a tensor."""
    leaves = list(net.params.values())
    loss = phase.objective(net, batch, phase.given)
    grads = _gradients(loss, leaves)
    if phase.rule is not None:
        given = phase.given
        if phase.also is not None:
            second = _gradients(phase.also(net, batch, given), leaves)
            given = with_second(given, dict(zip(net.params, second, strict=True)))
        ruled = phase.rule(net.params, dict(zip(net.params, grads, strict=True)), given)
        grads = [ruled[name] for name in net.params]
    step(phase.optim, leaves, grads, buffers, lr=lr)
    return loss.detach()


def _gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    raw = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, raw, strict=True)]


def with_second(given: Given, second: Mapping[str, Tensor]) -> Given:
    """What a rule is given where its phase has a second objective."""
    return {**given, **{f"also/{name}": grad for name, grad in second.items()}}


def trained(module: nn.Module, phase: Phase) -> dict[str, Tensor]:
    """The parameters that a phase trains."""
    return {
        n: p
        for n, p in module.named_parameters()
        if not any(n == f or n.startswith(f + ".") for f in phase.freeze)
    }


def batches(
    rows: int,
    phase: Phase,
    module: nn.Module,
    seed: int,
    client: int = 0,
    round: int = 0,
    number: int = 0,
) -> Iterator[Tensor]:
    """Rows in batches, in an order of its own for every epoch."""
    plan = phase_schedule(phase, module, [rows], seed, [client], round, number)
    for row, length in zip(plan.rows[0], plan.lengths[0], strict=True):
        yield torch.from_numpy(row[:length])


def phase_schedule(
    phase: Phase,
    module: nn.Module,
    sizes: Sequence[int],
    seed: int,
    clients: Sequence[int],
    round: int,
    number: int,
) -> Schedule:
    """The batches of some clients in a phase."""
    return schedule(
        keys("order", seed, clients, round, number),
        sizes,
        epochs=phase.epochs,
        batch=phase.batch,
        steps=phase.steps,
        drop_last=phase.drop_last,
        least=2 if _needs_two(module) else 1,
    )


_NEEDS_TWO: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def _needs_two(module: nn.Module) -> bool:
    """Batch statistics of a single sample are undefined where the feature map is 1×1."""
    known = _NEEDS_TWO.get(module)
    if known is None:
        known = _NEEDS_TWO[module] = any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()
        )
    return known


@contextlib.contextmanager
def hooked(module: nn.Module, phase: Phase) -> Iterator[None]:
    """The module with the phase's hooks on it inside the block."""
    handles = [
        layer.register_forward_hook(lambda layer, _, out, change=hook.change: change(layer, out))
        for hook in phase.hooks
        for name, layer in module.named_modules()
        if isinstance(layer, hook.layers) and (not hook.names or name in hook.names)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

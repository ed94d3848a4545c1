"""Training several clients as one: their networks stacked along a new first dimension, every
operation done for all at once.

An objective is pure, so `torch.func` can batch it over clients as it is. Clients have unequal
numbers of rows: a short batch is filled up and masked where the objective knows of masks and no
layer mixes rows, and else trained on its own; a client that has no step left sits out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap

from nestling.seeds import numbers
from nestling.training.augment import AUGMENTATIONS
from nestling.training.client import public_of
from nestling.training.objectives import Batch, Net, Objective
from nestling.training.optimisers import Buffers, step
from nestling.training.order import Schedule, counters, keys
from nestling.training.phase import Phase
from nestling.training.stacks.group import Group
from nestling.training.stacks.masked import with_masked_statistics
from nestling.training.stacks.together import Losses
from nestling.training.stacks.traced import replayed
from nestling.training.trainer import hooked, trained, with_second
from nestling.views.flat import FetchedRow, Layout, Stack, flat_of

_BatchNorm = nn.modules.batchnorm._BatchNorm

Tensors = dict[str, Tensor]
Gradients = Callable[..., tuple[Tensors, Tensor, Tensors]]


class CannotStack(Exception):
    """Why some clients cannot be trained together."""


@dataclass
class Stacked:
    """The networks of a group: trained parameters, and the rest (buffers, frozen parameters)."""

    params: Tensors
    rest: Tensors
    moving: tuple[str, ...]  # names of the rest that the network itself changes: running statistics
    given: Tensors
    shared: frozenset[str] = frozenset()  # names of what is given to all alike, and not stacked

    def at(self, which: Tensor | None) -> Stacked:
        """Some of the clients, as copies (None: all of them, as they are)."""
        if which is None:
            return self
        params, rest = ({n: t[which] for n, t in part.items()} for part in (self.params, self.rest))
        given = {n: t if n in self.shared else t[which] for n, t in self.given.items()}
        return Stacked(params, rest, self.moving, given, self.shared)

    def put(self, which: Tensor | None, part: Stacked) -> None:
        """Puts back what `at` gave, after training."""
        if which is not None:
            for name, tensor in self.params.items():
                tensor[which] = part.params[name]
            for name in self.moving:
                self.rest[name][which] = part.rest[name]


def train_stack(group: Group) -> Losses:
    """Trains the group's clients together, step by step."""
    plan, phase, site = group.schedule, group.phase, group.site
    check(group)
    state = load(group)
    leaves = list(state.params.values())
    memory = Buffers.zeros(phase.optim, leaves)
    feed = Feed.of(group)
    maskable, looks = plan.even or honours_masks(group), looks_of(group)
    phase = with_masked_statistics(phase, group.module)
    total = torch.zeros(len(group.clients), device=site.x.device)
    with hooked(group.module, phase):
        for number in range(plan.steps):
            for which, masked in parts(plan.lengths[:, number], plan.wide, maskable):
                some = None if which is None else torch.from_numpy(which).to(site.x.device)
                part = state.at(some)
                batch = feed.batch(number, which, masked)
                batch = replace(
                    batch,
                    number=looks.turn(number),
                    at=looks.at(torch.tensor([number], device=site.x.device)),
                )
                key = (group.key, batch.number)
                loss = stacked_step(
                    group.module,
                    phase,
                    part,
                    batch,
                    memory_at(memory, some, number),
                    some,
                    memory,
                    key,
                )
                state.put(some, part)
                count = torch.tensor(
                    plan.lengths[:, number] if which is None else plan.lengths[which, number]
                )
                weighted = loss * count.to(loss)
                total = total + weighted if some is None else total.index_add(0, some, weighted)
    for client, row in zip(group.clients, unload(group.layout, state).rows(), strict=True):
        client.weights = row
    return losses_of(total, plan)


def losses_of(total: Tensor, plan: Schedule, fetched: FetchedRow | None = None) -> Losses:
    """A group's losses, given the sums over samples."""
    return Losses(total, plan.steps_taken, plan.samples, fetched)


def stacked_step(
    module: nn.Module,
    phase: Phase,
    part: Stacked,
    batch: Batch,
    memory: Buffers,
    which: Tensor | None,
    whole: Buffers,
    key: Hashable = None,
) -> Tensor:
    """One update of some clients on one batch each; gives their losses. `key` is that of the group,
    where the step may be replayed: it does the same in every round."""
    compute = gradients(module, phase, part, masked=batch.mask is not None, number=batch.number)
    args = (part.params, part.rest, batch.x, batch.y, batch.rows, batch.mask, part.given, batch.at)
    # A network that changes itself is not replayed.
    grads, loss, moved = (
        compute(*args)
        if key is None or part.moving
        else replayed((key, part.shared), compute, *args)
    )
    part.rest.update(moved)
    step(
        phase.optim,
        list(part.params.values()),
        [grads[name] for name in part.params],
        memory,
        stacked=True,
    )
    if which is not None:
        for own, new in zip(whole.tensors(), memory.tensors(), strict=True):
            own[which] = new
    return loss.detach()


def memory_at(memory: Buffers, which: Tensor | None, number: int) -> Buffers:
    """The optimiser's memory of some clients before a step; everybody has taken every step before
    it."""
    if which is None:
        return Buffers(number, memory.first, memory.second)
    return Buffers(number, [t[which] for t in memory.first], [t[which] for t in memory.second])


def gradients(
    module: nn.Module,
    phase: Phase,
    part: Stacked,
    *,
    masked: bool,
    number: int,
    noise: str = "error",
) -> Gradients:
    """The function from stacked (params, rest, x, y, rows, mask, given, at) to (gradients, losses,
    what the network changed itself)."""
    inside = _Inside(module)

    def loss_of(objective: Objective) -> Callable[..., Any]:
        def loss(
            params: Tensors,
            rest: Tensors,
            x: Tensor,
            y: Tensor,
            rows: Tensor,
            mask: Any,
            given: Tensors,
            at: Any,
        ) -> Any:
            def run(inner: nn.Module) -> Tensor:
                return objective(Net(inner, params), Batch(x, y, rows, number, mask, at), given)

            tensors = {f"inner.{name}": t for name, t in {**rest, **params}.items()}
            return functional_call(inside, tensors, (run,)), {
                name: rest[name] for name in part.moving
            }

        return loss

    def one(params: Tensors, rest: Tensors, *batch: Any) -> Any:
        grads, (loss, moved) = grad_and_value(loss_of(phase.objective), has_aux=True)(
            params, rest, *batch
        )
        if phase.rule is not None:
            given = batch[-2]
            if phase.also is not None:
                given = with_second(
                    given, grad(loss_of(phase.also), has_aux=True)(params, rest, *batch)[0]
                )
            grads = phase.rule(params, grads, given)
        return grads, loss, moved

    given = {name: None if name in part.shared else 0 for name in part.given}
    return vmap(one, in_dims=(0, 0, 0, 0, 0, 0 if masked else None, given, None), randomness=noise)


class _Inside(nn.Module):
    """Runs any function of a module while `functional_call` has put other tensors into it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, run: Callable[[nn.Module], Tensor]) -> Tensor:
        return run(self.inner)


def check(group: Group) -> None:
    """Refuses what cannot be exact in a stack."""
    if any(
        isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in group.module.modules()
    ):
        raise CannotStack("the network has dropout, whose draws belong to one client at a time")


def load(group: Group) -> Stacked:
    """The clients' starting weights, stacked."""
    layout, clients = group.layout, group.clients
    if layout.all_names != frozenset(clients[0].weights):
        raise CannotStack("the weights a client starts with are not those of its network")
    first = clients[0].weights
    if all(c.weights is first for c in clients):
        flat = flat_of(first, layout)
        copies = flat.expand(len(clients), -1)
        stacked = [t.clone(memory_format=torch.contiguous_format) for t in layout.split(copies)]
        others = {n: torch.stack([first[n]] * len(clients)) for n in layout.others}
    else:
        flat = torch.stack([flat_of(c.weights, layout) for c in clients])
        stacked = [t.contiguous() for t in layout.split(flat)]
        others = {n: torch.stack([c.weights[n] for c in clients]) for n in layout.others}
    state = {**dict(zip(layout.names, stacked, strict=True)), **others}
    train = trained(group.module, group.phase)
    shared = frozenset(name for name in group.phase.given if group.shared(name))
    given = {
        name: group.phase.given[name]
        if name in shared
        else torch.stack([p.given[name] for p in group.phases])
        for name in group.phase.given
    }
    rest = {name: t for name, t in state.items() if name not in train}
    moving = tuple(name for name, _ in group.module.named_buffers() if name in rest)
    return Stacked({name: state[name] for name in train}, rest, moving, given, shared)


def unload(layout: Layout, state: Stacked) -> Stack:
    """The trained states as rows of one fresh matrix."""
    both = {**state.rest, **state.params}
    flat = torch.cat([both[name].reshape(len(both[name]), -1) for name in layout.names], 1)
    return Stack(layout, flat, {name: both[name] for name in layout.others})


def parts(
    lengths: np.ndarray, full: int, maskable: bool
) -> Iterator[tuple[np.ndarray | None, bool]]:
    """Who takes a step together: (which clients, whether with a mask). None stands for
    everybody."""
    if (lengths == full).all():
        yield None, False
    elif maskable:
        yield (None if (lengths > 0).all() else np.flatnonzero(lengths)), True
    else:
        for length in sorted({int(n) for n in lengths if n > 0}):
            yield np.flatnonzero(lengths == length), False


@dataclass
class Feed:
    """The group's data and who reads which of it when."""

    group: Group
    x: Tensor
    y: Tensor | None
    places: np.ndarray  # (clients, steps, batch) rows in `x`
    draws: np.ndarray | None  # what the augmentation drew, one entry per place

    @staticmethod
    def of(group: Group) -> Feed:
        """The feed of a group: the private data of all clients, or the public data where the phase
        trains on that."""
        plan, site, phase = group.schedule, group.site, group.phase
        if phase.source == "private":
            x, y = site.x, site.y
            places = _places([c.rows for c in group.clients], plan.rows)
        else:
            x, y, places = public_of(site), None, _public_places(group)
        return Feed(group, x, y, places, augmentation_draws(group))

    def batch(self, number: int, which: np.ndarray | None, masked: bool) -> Batch:
        """One batch of each of some clients."""
        pick = slice(None) if which is None else which
        lengths = self.group.schedule.lengths[pick, number]
        wide = self.places.shape[2] if masked else int(lengths[0])
        rows = self._tensor(self.group.schedule.rows[pick, number, :wide])
        x, y = self.gather(
            self._tensor(self.places[pick, number, :wide]),
            None if self.draws is None else self._tensor(self.draws[pick, number, :wide]),
        )
        mask = self._tensor(np.arange(wide)[None, :] < lengths[:, None]) if masked else None
        return Batch(x, y, rows, number, mask)

    def gather(self, places: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        """(clients, batch) places → inputs, augmented, and labels."""
        lead = places.shape
        x = self.x[places.reshape(-1)]
        augment = AUGMENTATIONS[self.group.phase.augment]
        if augment is not None and draws is not None:
            x = augment.change(x, draws.reshape(-1, draws.shape[-1]))
        y = torch.zeros_like(places) if self.y is None else self.y[places]
        return x.reshape(*lead, *x.shape[1:]), y

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.x.device)


def _public_places(group: Group) -> np.ndarray:
    """Everybody's rows by their place in the public data."""
    plan = group.schedule.rows
    if group.phase.rows is None:
        return plan
    return np.stack([_numbers(phase)[own] for phase, own in zip(group.phases, plan, strict=True)])


def _numbers(phase: Phase) -> np.ndarray:
    assert phase.rows is not None
    return phase.rows.cpu().numpy()


def _places(own: list[np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Each client's rows by their place in all data."""
    if all(len(o) == len(own[0]) for o in own):
        return np.take_along_axis(np.stack(own), rows.reshape(len(own), -1), 1).reshape(rows.shape)
    return np.stack([o[r] for o, r in zip(own, rows, strict=True)])


def augmentation_draws(group: Group) -> np.ndarray | None:
    """(clients, steps, batch, …) what the augmentation draws, as the plain trainer would draw
    it."""
    augment = AUGMENTATIONS[group.phase.augment]
    if augment is None:
        return None
    plan, batch = group.schedule, group.phase.batch
    own = keys(
        "augment",
        group.site.seed,
        [c.id for c in group.clients],
        group.clients[0].round,
        group.number,
    )
    chance = numbers(own[:, None], counters(0, plan.steps * batch)).reshape(
        len(own), plan.steps, batch
    )[:, :, : plan.wide]
    return augment.draws(chance)


def honours_masks(group: Group) -> bool:
    """Whether a filled-up batch gives the loss of the batch itself: tried out, because a layer or
    an objective may mix rows."""
    return remembered(_HONOURS, group, _try_mask)


@dataclass(frozen=True)
class Looks:
    """How an objective looks at the number of its batch: in `turns`, or at the number itself, which
    is then part of the work."""

    turns: int = 1
    numbered: bool = False

    def turn(self, number: int) -> int:
        """Equal for batches that are the same work."""
        return number if self.numbered else number % self.turns

    def at(self, now: Tensor) -> Tensor | None:
        """The number on the device, unless it is part of the work."""
        return None if self.numbered else now[0]


def looks_of(group: Group) -> Looks:
    """How the group's objective looks at the number of its batch: tried out too."""
    return remembered(_LOOKS, group, _try_number)


_HONOURS: dict[Any, bool] = {}
_LOOKS: dict[Any, Looks] = {}


def remembered(known: dict[Any, Any], group: Group, find: Callable[[Group], Any]) -> Any:
    """What was found out about work of one nature, found out once."""
    if group.nature not in known:
        known[group.nature] = find(group)
        while len(known) > 256:
            known.pop(next(iter(known)))
    return known[group.nature]


def _try_mask(group: Group) -> bool:
    kept = {
        id(t)
        for layer in group.module.modules()
        if isinstance(layer, _BatchNorm)
        for t in layer.buffers()
    }
    if any(id(t) not in kept for t in group.module.buffers()):
        return False  # statistics of another kind would see the filling
    x, y, rows = sample_of(group)
    mask = torch.tensor([True, True, False], device=x.device)
    # a number beyond the last token would be none of the network's
    strange = torch.cat([x[:2], x[2:] * 3 + 1 if x.is_floating_point() else x[2:]])
    whole = objective_on(group, Batch(strange, y, rows, 0, mask))
    short = objective_on(group, Batch(x[:2], y[:2], rows[:2], 0))
    return bool(torch.allclose(whole, short, rtol=1e-4, atol=1e-6))


def _try_number(group: Group) -> Looks:
    batch = _Watched(*sample_of(group), 0)
    objective_on(group, batch)
    return Looks(batch.turns, batch.looked)


class _Watched(Batch):
    """A batch that notices how somebody looks at its number."""

    turns, looked = 1, False

    def __getattribute__(self, name: str) -> Any:
        if name == "number":
            self.looked = True
        return super().__getattribute__(name)

    def turn(self, count: int) -> int:
        self.turns = math.lcm(self.turns, count)
        return 0

    def pick(self, rows: Tensor) -> Tensor:
        return rows[0]

    @property
    def counter(self) -> int:
        return 0


def sample_of(group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Three rows of the first client (fewer would be repeated): inputs, labels, numbers of the
    rows."""
    first = group.part(0, 1)
    feed = Feed.of(first)
    rows = np.arange(3) % max(first.sizes[0], 1)
    places = first.clients[0].rows[rows] if group.phase.source == "private" else rows
    x, y = feed.gather(torch.from_numpy(places).to(feed.x.device), None)
    return x, y, torch.from_numpy(rows).to(feed.x.device)


def objective_on(
    group: Group, batch: Batch, change: Callable[[nn.Module], Any] | None = None
) -> Tensor:
    """The losses of the first client's network on a batch, of the network as it is or changed."""
    client = group.clients[0]
    module = copy.deepcopy(client.reference.network(client.view, client.weights)).train()
    if change is not None:
        change(module)
    phase = with_masked_statistics(group.phase, module)
    # A look must not move what training draws from.
    devices = [batch.x.device] if batch.x.is_cuda else []
    with torch.random.fork_rng(devices), torch.no_grad(), hooked(module, phase):
        net = Net(module, trained(module, phase))
        both = [phase.objective, *([] if phase.also is None else [phase.also])]
        return torch.stack([objective(net, batch, phase.given) for objective in both])

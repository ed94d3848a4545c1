"""A stack: many clients of one form trained as one network with a dimension more, by recorded
steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from nestling.engines.cuda.compiled import compiled
from nestling.engines.cuda.cuda_settings import CudaSettings
from nestling.engines.cuda.job import LaneJob, zero
from nestling.engines.cuda.matrix_conv import use_matrices
from nestling.engines.cuda.orders import WHOLE, DrawnOrder, RowOrder, drawn_on_device
from nestling.engines.cuda.spare_bias import may_spare_biases, spare_biases
from nestling.training.kept import Kept, Rate
from nestling.training.lane import Lane
from nestling.training.optimisers import Buffers, step
from nestling.training.stacks.group import Group
from nestling.training.stacks.masked import with_masked_statistics
from nestling.training.stacks.stacked import Feed, check, gradients, load, looks_of
from nestling.training.trainer import hooked
from nestling.views.flat import flat_of


class StackProgram:
    """`height` clients as one stack; with `matrices` its convolutions are matrix products. Clients
    short of a full batch are masked. Places without a client, and clients that have no step left,
    train on anything: what a client learned is taken out after its last step."""

    def __init__(
        self, group: Group, height: int, settings: CudaSettings, matrices: bool = False
    ) -> None:
        """Makes a stack of `height` networks and every tensor that its recorded steps read or
        write."""
        check(group)
        device = group.site.x.device
        self.lane, self.layout, self.height = Lane(device), group.layout, height
        self.even, self.together = (
            group.schedule.even and group.schedule.wide == group.width,
            starts_together(group),
        )
        self.looks, self.wide = looks_of(group), group.width
        self.module = copy.deepcopy(group.module)
        if may_spare_biases(group):
            spare_biases(self.module)
        self.phase = settings.apply(with_masked_statistics(group.phase, self.module))
        if matrices:
            use_matrices(self.module)
        filled = Group(
            group.key,
            (group.clients * height)[:height],
            (group.phases * height)[:height],
            group.number,
        )
        self.state = load(filled)
        self.given = Kept(self.state.given)
        self.state.given = self.given.tensors
        self.flat = torch.zeros(1 if self.together else height, self.layout.numel, device=device)
        self.feed = Feed.of(group.part(0, 1))
        self.drawn = self.even and drawn_on_device(group)
        self.order = (
            DrawnOrder(group, height, self.wide)
            if self.drawn
            else RowOrder(group, height, self.wide)
        )
        self.memory = Buffers.zeros(self.phase.optim, list(self.state.params.values()))
        self.lr, self.losses = Rate(device), torch.zeros(height, device=device)
        self.ends = torch.zeros(height, dtype=torch.int64, device=device)
        # What clients with fewer steps than others have learned; of even ones it is what the
        # network holds at the end.
        self.out = torch.zeros(height, 0 if self.even else self.layout.numel, device=device)
        self.others = (
            {}
            if self.even
            else {name: self.state.rest[name].clone() for name in self.layout.others}
        )
        self.parts = self._parts(height)
        self.compute = self._gradients(0)
        if settings.compile:
            self.compute = compiled(self.compute)

    def fits(self, job: LaneJob) -> bool:
        """Whether it can train such clients."""
        group = job.group
        shared = self.state.shared == frozenset(n for n in group.phase.given if group.shared(n))
        steps = group.schedule.steps
        room = (
            self.order.taken == steps
            if isinstance(self.order, DrawnOrder)
            else self.order.steps >= steps
        )
        # In a stack of more than twice the height most places would train for nothing.
        high = self.height // 2 <= len(group.clients) <= self.height
        even = group.schedule.even and group.schedule.wide == self.wide
        same = self.together == starts_together(group) and (
            not self.drawn or drawn_on_device(group)
        )
        return high and room and shared and same and (even or not self.even)

    def work(self, job: LaneJob) -> Iterator[None]:
        """Trains the job's clients, a step at a time; even short phases as a whole."""
        plan, count = job.group.schedule, len(job.group.clients)
        self._take(job)
        if self.even and plan.steps <= WHOLE:
            self.lane.do(("phase", plan.steps), partial(self._phase, plan.steps))
            yield
        else:
            self.lane.do("load", self._spread)
            ends = set() if self.even else set(plan.steps_taken)
            for number in range(plan.steps):
                turn = self.looks.turn(number)
                self.lane.do(("step", turn), partial(self._step, turn))
                if number + 1 in ends:
                    self.lane.do("store", self._collect)
                yield
        self._hand_over(job, count)

    def _take(self, job: LaneJob) -> None:
        group, count = job.group, len(job.group.clients)
        if self.together:
            self.flat[0].copy_(flat_of(group.clients[0].weights, self.layout))
        else:
            torch.stack(
                [flat_of(client.weights, self.layout) for client in group.clients],
                out=self.flat[:count],
            )
        for name in self.layout.others:
            self.state.rest[name][:count].copy_(
                torch.stack([client.weights[name] for client in group.clients])
            )
        self.given.take({n: group.phase.given[n] for n in self.state.shared})
        for name in self.given.tensors:
            if name not in self.state.shared:
                torch.stack(
                    [p.given[name] for p in group.phases], out=self.given.tensors[name][:count]
                )
        if isinstance(self.order, DrawnOrder):
            self.order.take_clients(group)
        else:
            self.order.take(job.table)
            # The last column holds the lengths of a client's batches.
            self.ends[:count] = (job.table[:, :, -1] > 0).sum(1)
        self.lr.set(group.phase.optim.lr)

    @torch.no_grad()
    def _spread(self) -> None:
        """From the matrix of states into the network's own tensors; everything else back to its
        start."""
        both = {**self.state.rest, **self.state.params}
        for name, part in zip(self.layout.names, self.layout.split(self.flat), strict=True):
            both[name].copy_(part.expand_as(both[name]))
        zero(self.memory, self.losses, self.order.now)

    @torch.no_grad()
    def _collect(self) -> None:
        """Keeps the states of the clients that have just taken their last step."""
        done = self.ends == self.order.now
        self.out.copy_(torch.where(done[:, None], torch.cat(self.parts, 1), self.out))
        for name, kept in self.others.items():
            kept.copy_(
                torch.where(done.reshape(-1, *[1] * (kept.dim() - 1)), self.state.rest[name], kept)
            )

    @torch.no_grad()
    def _hand_over(self, job: LaneJob, count: int) -> None:
        if self.even:
            torch.cat(self.parts if count == self.height else self._parts(count), 1, out=job.out)
        else:
            job.out.copy_(self.out[:count])
        job.losses.copy_(self.losses[:count])
        for name, tensor in job.others.items():
            tensor.copy_((self.state.rest if self.even else self.others)[name][:count])

    def _parts(self, count: int) -> list[Tensor]:
        """The first clients' tensors, one row each, in the order of the layout."""
        both = {**self.state.rest, **self.state.params}
        return [both[name][:count].reshape(count, -1) for name in self.layout.names]

    def _phase(self, steps: int) -> None:
        self._spread()
        self.order.draw()
        for number in range(steps):
            self._step(self.looks.turn(number))

    def _gradients(
        self, number: int
    ) -> Callable[..., tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]]:
        return gradients(
            self.module,
            self.phase,
            self.state,
            masked=not self.even,
            number=number,
            noise="different",
        )

    def _step(self, number: int) -> None:
        state, order = self.state, self.order
        places, rows, draws, mask, lengths = order.current()
        x, y = self.feed.gather(places, draws)
        compute = self._gradients(number) if number else self.compute
        shown = None if self.even else mask
        with hooked(self.module, self.phase):
            grads, loss, moved = compute(
                state.params, state.rest, x, y, rows, shown, state.given, self.looks.at(order.now)
            )
        params = list(state.params.values())
        step(
            self.phase.optim,
            params,
            [grads[n] for n in state.params],
            self.memory,
            lr=self.lr.tensor,
            stacked=True,
        )
        for name, tensor in moved.items():
            state.rest[name].copy_(tensor)
        self.losses += (
            loss * lengths if self.even else torch.where(lengths > 0, loss * lengths, 0.0)
        )
        order.now += 1


def starts_together(group: Group) -> bool:
    """Whether all clients start from the same weights."""
    first = group.clients[0].weights
    return all(client.weights is first for client in group.clients)

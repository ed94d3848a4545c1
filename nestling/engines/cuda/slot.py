"""A slot: a place where one client at a time is trained by recorded steps. Several slots work side
by side, each on a lane of its own, whatever their clients' networks are."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import partial

import torch

from nestling.engines.cuda.cuda_settings import CudaSettings
from nestling.engines.cuda.job import LaneJob, zero
from nestling.engines.cuda.orders import RowOrder
from nestling.engines.cuda.spare_bias import may_spare_biases, spare_biases
from nestling.training.kept import Kept, Rate
from nestling.training.lane import Lane
from nestling.training.objectives import Batch, Net
from nestling.training.optimisers import Buffers
from nestling.training.stacks.group import Group
from nestling.training.stacks.masked import with_masked_statistics
from nestling.training.stacks.stacked import Feed, honours_masks, looks_of
from nestling.training.trainer import hooked, train_step, trained
from nestling.views.flat import flat_of


class Slot:
    """One client's network and optimiser state in tensors that never move, and the graphs of a
    step: one for full batches, one for short ones (one for every length where neither the network
    nor the objective honours a mask), times the objective's turns."""

    def __init__(self, group: Group, settings: CudaSettings, channels_last: bool) -> None:
        """Copies the group's network and makes every tensor that its recorded steps read or
        write."""
        device = group.site.x.device
        self.lane, self.layout, self.channels_last = Lane(device), group.layout, channels_last
        self.looks, self.maskable = looks_of(group), honours_masks(group)
        self.wide = group.width
        self.module = copy.deepcopy(group.module).train()
        if may_spare_biases(group):
            spare_biases(self.module)
        if channels_last:
            self.module = self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.given = Kept(group.phase.given)
        phase = settings.apply(with_masked_statistics(group.phase, self.module))
        self.phase = replace(phase, given=self.given.tensors)
        self.net = Net(self.module, trained(self.module, self.phase))
        self.memory = Buffers.zeros(self.phase.optim, list(self.net.params.values()))
        self.feed = Feed.of(group.part(0, 1))
        self.order = RowOrder(group, 1, self.wide)
        self.lr, self.losses = Rate(device), torch.zeros((), device=device)
        self.flat = torch.zeros(self.layout.numel, device=device)
        self.state = self.module.state_dict()

    def fits(self, job: LaneJob) -> bool:
        """Whether it can train such clients: it cannot where they take more steps than there is
        room for."""
        return self.order.steps >= job.group.schedule.steps

    def work(self, job: LaneJob) -> Iterator[None]:
        """Trains the one client of the job, a step at a time."""
        self._take(job)
        self.lane.do("load", self._spread)
        for number, length in enumerate(job.group.schedule.lengths[0]):
            if length:
                kind, action = self._step(number, int(length))
                self.lane.do(kind, action)
                yield
        self.lane.do("store", self._collect)
        job.out[0].copy_(self.flat)
        job.losses[0].copy_(self.losses)
        for name, tensor in job.others.items():
            tensor[0].copy_(self.state[name])

    def _take(self, job: LaneJob) -> None:
        client, phase = job.group.clients[0], job.group.phase
        self.flat.copy_(flat_of(client.weights, self.layout))
        for name in self.layout.others:
            self.state[name].copy_(client.weights[name])
        self.given.take(phase.given)
        self.order.take(job.table)
        self.lr.set(phase.optim.lr)

    @torch.no_grad()
    def _spread(self) -> None:
        torch._foreach_copy_(
            [self.state[name] for name in self.layout.names], self.layout.split(self.flat)
        )
        zero(self.memory, self.losses, self.order.now)

    @torch.no_grad()
    def _collect(self) -> None:
        torch.cat([self.state[name].reshape(-1) for name in self.layout.names], out=self.flat)

    def _step(self, number: int, length: int) -> tuple[Hashable, partial[None]]:
        turn = self.looks.turn(number)
        # A full batch needs no mask; short ones share one recording where masks are honoured.
        shown = None if length < self.wide and self.maskable else length
        return ("step", turn, shown), partial(self._train, turn, shown)

    def _train(self, number: int, length: int | None) -> None:
        places, rows, draws, mask, lengths = self.order.current()
        shown = self.wide if length is None else length
        x, y = self.feed.gather(places[0, :shown], None if draws is None else draws[0, :shown])
        if self.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        batch = Batch(
            x,
            y,
            rows[0, :shown],
            number,
            mask[0] if length is None else None,
            self.looks.at(self.order.now),
        )
        with hooked(self.module, self.phase):
            loss = train_step(self.net, self.phase, batch, self.memory, lr=self.lr.tensor)
        self.losses += loss * lengths[0]
        self.order.now += 1

"""The order of batches on the device: tables in tensors that never move, and a counter that says
which line is next."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nestling.training.augment import AUGMENTATIONS
from nestling.training.device_order import orders
from nestling.training.stacks.group import Group
from nestling.training.stacks.stacked import Feed

STAGES = 4
"""How many rounds may be on their way to the device at once; more than an engine ever starts
ahead."""

WHOLE = 32
"""A phase of up to so many steps is recorded as a whole."""


def host_table(group: Group, wide: int) -> Tensor:
    """(clients, steps, columns): every client's places in the data, rows, draws of the
    augmentation, and the length of each batch, to be sent; batches are `wide`, the missing places
    0."""
    feed, plan = Feed.of(group), group.schedule
    clients, steps = plan.lengths.shape
    parts = [feed.places, plan.rows, *([] if feed.draws is None else [feed.draws])]
    blocks = [_widened(part, wide).reshape(clients, steps, -1) for part in parts]
    table = torch.from_numpy(np.concatenate([*blocks, plan.lengths[:, :, None]], 2))
    return table.pin_memory() if group.site.x.is_cuda else table


def _widened(part: np.ndarray, wide: int) -> np.ndarray:
    missing = wide - part.shape[2]
    return (
        np.pad(part, [(0, 0), (0, 0), (0, missing), *[(0, 0)] * (part.ndim - 3)])
        if missing
        else part
    )


def drawn_numbers(group: Group) -> int:
    """How many numbers the augmentation draws for a row."""
    augment = AUGMENTATIONS[group.phase.augment]
    return 0 if augment is None else augment.draws(np.zeros(1, dtype=np.uint64)).shape[-1]


class RowOrder:
    """The batches of `height` clients, at most `steps` of them."""

    def __init__(self, group: Group, height: int, wide: int) -> None:
        """Makes an empty table on the device with room for the most steps that any client takes,
        and the counter."""
        self.device, self.wide, self.height = group.site.x.device, wide, height
        self.each = drawn_numbers(group)
        self.now = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.columns = wide * (2 + self.each) + 1
        self.steps = longest(group)
        self.table = torch.zeros(
            self.steps, height, self.columns, dtype=torch.int64, device=self.device
        )

    def take(self, table: Tensor) -> None:
        """Takes (clients, steps, columns); places beyond the clients hold batches of no row."""
        clients, steps = table.shape[:2]
        if clients < self.height:
            self.table[:steps, clients:, -1].zero_()
        self.table[:steps, :clients].copy_(table.transpose(0, 1), non_blocking=True)

    def draw(self) -> None:
        """The order is there already."""

    def current(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """places, rows, draws, mask, lengths of the step that the counter points at, one line per
        client."""
        line = self.table.index_select(0, self.now)[0]
        places, rows = line[:, : self.wide], line[:, self.wide : 2 * self.wide]
        draws = (
            line[:, 2 * self.wide : -1].reshape(self.height, self.wide, self.each)
            if self.each
            else None
        )
        lengths = line[:, -1]
        mask = torch.arange(self.wide, device=line.device) < lengths[:, None].clamp(min=1)
        return places, rows, draws, mask, lengths


def longest(group: Group) -> int:
    """The most steps that any client of the federation takes in such a phase, as far as that is
    known without asking all of them: a program that is made for it never has to be made again for a
    client with more rows."""
    steps, phase = group.schedule.steps, group.phase
    if phase.source != "private":
        return max(steps, 1)
    rows = group.site.most_rows
    known = phase.epochs * -(-rows // phase.batch)
    return max(steps, min(known, phase.steps) if phase.steps else known, 1)


def drawn_on_device(group: Group) -> bool:
    """Whether the device can draw the order of batches itself, inside the graph of a whole
    phase."""
    plan, phase = group.schedule, group.phase
    simple = phase.source == "private" and AUGMENTATIONS[phase.augment] is None
    return simple and plan.keys is not None and 0 < plan.steps <= WHOLE


class DrawnOrder(RowOrder):
    """The order of batches where the device draws it: only the clients' rows and the keys of their
    orders go there."""

    def __init__(self, group: Group, height: int, wide: int) -> None:
        """Makes room for the clients' own rows and keys, and the host's stages from which they are
        sent."""
        super().__init__(group, height, wide)
        self.taken, self.epochs = group.schedule.steps, group.phase.epochs
        self.size = self.taken * wide // self.epochs
        self.own = torch.zeros(height, self.size + 1, dtype=torch.int64, device=self.device)
        self.table[:, :, -1] = wide
        self._stages = [_Stage(self.own) for _ in range(STAGES)]

    def take_clients(self, group: Group) -> None:
        """Takes the clients' rows and keys."""
        stage = self._stages[0]
        self._stages = [*self._stages[1:], stage]
        stage.wait()
        np.stack(
            [client.rows for client in group.clients], out=stage.array[: len(group.clients), :-1]
        )
        assert group.schedule.keys is not None
        stage.array[: len(group.clients), -1] = group.schedule.keys.view(np.int64)
        stage.send(self.own)

    def draw(self) -> None:
        """Fills the table on the device: for every epoch the rows in an order drawn by the keys."""
        own, keys = self.own[:, :-1], self.own[:, -1:]
        count = self.taken // self.epochs
        for epoch in range(self.epochs):
            order = orders(keys, epoch, self.size)
            lines = self.table[epoch * count : (epoch + 1) * count]
            for k, part in enumerate((own.gather(1, order), order)):
                lines[:, :, k * self.wide : (k + 1) * self.wide] = part.view(
                    self.height, count, self.wide
                ).transpose(0, 1)


class _Stage:
    """A place on the host from which tensors of one form go to the device; it is written to again
    only after they have left."""

    def __init__(self, like: Tensor) -> None:
        self.tensor = torch.zeros(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        self.array = self.tensor.numpy()
        self._event = torch.cuda.Event() if like.is_cuda else None

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def send(self, to: Tensor) -> None:
        to.copy_(self.tensor, non_blocking=True)
        if self._event is not None:
            self._event.record()

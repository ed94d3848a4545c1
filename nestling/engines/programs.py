"""Client training recorded once and replayed, as CUDA graphs.

Launching the kernels of a small step costs far more than running them. A program keeps weights, optimiser state and the order of
batches in tensors that never move, records one training step on them (or a short phase as a whole) as a CUDA graph, and replays it
as often as clients have steps; the graph itself gathers each batch by index from the data on the device. There are two kinds:
`StackProgram` trains K clients as one stack of networks, `StreamsProgram` trains each client for itself, several at a time on streams
of their own.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from nestling.engines.matrix_conv import use_matrices
from nestling.training.augment import AUGMENTATIONS
from nestling.training.device_order import orders
from nestling.training.group import Group
from nestling.training.objectives import Batch, Given, Net
from nestling.training.optimisers import Buffers, step
from nestling.training.order import Schedule
from nestling.training.phase import Phase
from nestling.training.stacked import Feed, gradients, honours_masks, load, losses_of, reads_number
from nestling.training.together import Losses
from nestling.training.trainer import hooked, train_step, trained
from nestling.views.flat import Fetched, Stack, flat_of

WARM_UPS = 2
WHOLE = 32
"""A phase of up to so many steps is recorded as a whole."""

STAGES = 4
"""How many rounds may be on their way to the device at once; more than an engine ever starts ahead."""

MANY_NUMBERS = 64
"""The most graphs that are kept for an objective that looks at the number of the batch."""


@dataclass(frozen=True)
class Settings:
    """How programs compute: precision "float32", "tf32" or "bf16"; `compile` lets torch.compile fuse the stacked step."""

    precision: str = "tf32"
    compile: bool = False


class StackProgram:
    """`height` clients as one stack; with `matrices` its convolutions are matrix products. Clients short of a full batch or of a step
    are masked; idle places train on anything and are not read."""

    def __init__(self, group: Group, height: int, settings: Settings, matrices: bool = False) -> None:
        self.height, self.layout = height, group.layout
        self.even, self.together = group.schedule.even, _together(group)
        self.phase = _in_precision(group.phase, settings)
        self.drawn = _drawn(group)
        self.module = copy.deepcopy(group.module)
        if matrices:
            use_matrices(self.module)
        filled = Group(group.key, (group.clients * height)[:height], (group.phases * height)[:height], group.number)
        self.state = load(filled)
        self.state.given = {name: t.clone() for name, t in self.state.given.items()}
        device = group.site.x.device
        self.flat = torch.zeros(1 if self.together else height, self.layout.numel, device=device)
        self.feed = Feed.of(group.part(0, 1))
        self.plan = _DrawnPlan(group, height) if self.drawn else _Plan(group, height)
        self.memory = Buffers.zeros(self.phase.optim, list(self.state.params.values()))
        self.lr, self.losses = _Rate(device), torch.zeros(height, device=device)
        self.out, self.told = torch.zeros(height, self.layout.numel, device=device), torch.zeros(2, height, device=device)
        self._compute = self._gradients(0)
        if settings.compile:
            self._compute = torch.compile(self._compute)
        self._numbered = reads_number(group)
        self._steps: dict[int, Callable[[], None]] = {}
        self._wholes: dict[int, Callable[[], None]] = {}
        self._load, self._store = (_recorded(f, group.module, self.phase) for f in (self._spread, self._collect))

    def fits(self, group: Group) -> bool:
        """Whether the program can train this group."""
        same = self.plan.steps >= group.schedule.steps and self.plan.wide == group.schedule.wide
        same = same and self.together == _together(group)
        if self.drawn:
            same = same and _drawn(group) and self.plan.steps == group.schedule.steps
        shared = self.state.shared == frozenset(n for n in group.phase.given if group.shared(n))
        # In a stack of more than twice the height most places would train for nothing.
        high = self.height // 2 <= len(group.clients) <= self.height
        return high and same and shared and (group.schedule.even or not self.even)

    def run(self, group: Group) -> Losses:
        count = len(group.clients)
        self._take(group)
        steps = group.schedule.steps
        if self.even and steps <= WHOLE:
            self._whole(steps)()
        else:
            self._load()
            for number in range(steps):
                self._step(number)()
            self._store()
        # What one round's clients got must outlast the next round, which writes over the program's tensors.
        others = {n: self.state.rest[n][:count].clone() for n in self.layout.others}
        told = Fetched(self.told[:, :count].clone())
        stack = Stack(self.layout, self.out[:count].clone(), others, told.row(1))
        for client, row in zip(group.clients, stack.rows(), strict=True):
            client.weights = row
        return losses_of(told.tensor[0], group.schedule, told.row(0))

    def _take(self, group: Group) -> None:
        if self.together:
            self.flat[0].copy_(flat_of(group.clients[0].weights, self.layout))
        else:
            for k, client in enumerate(group.clients):
                self.flat[k].copy_(flat_of(client.weights, self.layout))
        for name in self.layout.others:
            for k, client in enumerate(group.clients):
                self.state.rest[name][k].copy_(client.weights[name])
        for name, kept in self.state.given.items():
            if name in self.state.shared:
                kept.copy_(group.phase.given[name])
            else:
                kept[: len(group.clients)].copy_(torch.stack([p.given[name] for p in group.phases]))
        self.plan.take(group)
        self.lr.set(group.phase.optim.lr)

    def _spread(self) -> None:
        """From the matrix of states into the network's own tensors; everything else back to its start."""
        both = {**self.state.rest, **self.state.params}
        for name, part in zip(self.layout.names, self.layout.split(self.flat), strict=True):
            both[name].copy_(part.expand_as(both[name]))
        _zero(self.memory, self.losses, self.plan.now)

    def _collect(self) -> None:
        """The trained states as one matrix; losses and whether states are finite as another, so that one copy tells both."""
        both = {**self.state.rest, **self.state.params}
        self.out.copy_(torch.cat([both[name].reshape(self.height, -1) for name in self.layout.names], 1))
        self.told[0].copy_(self.losses)
        self.told[1].copy_(torch.isfinite(self.out.sum(1)))

    def _whole(self, steps: int) -> Callable[[], None]:
        """The whole phase in one graph, for phases of few steps."""
        if steps not in self._wholes:
            self._wholes[steps] = _recorded(partial(self._phase, steps), self.module, self.phase)
        return self._wholes[steps]

    def _phase(self, steps: int) -> None:
        self._spread()
        self.plan.draw()
        for number in range(steps):
            self._train(number)
        self._collect()

    def _gradients(self, number: int) -> Callable[..., tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]]:
        return gradients(self.module, self.phase, self.state, masked=not self.even, number=number, noise="different")

    def _step(self, number: int) -> Callable[[], None]:
        """The recorded step; one for every number of a batch where the objective looks at it, else one for all."""
        number = number if self._numbered else 0
        if number not in self._steps:
            if len(self._steps) >= MANY_NUMBERS:
                return partial(self._train, number)
            self._steps[number] = _recorded(partial(self._train, number), self.module, self.phase, self._snapshot())
        return self._steps[number]

    def _train(self, number: int) -> None:
        plan, state = self.plan, self.state
        places, rows, draws, mask, lengths = plan.current()
        x, y = self.feed.gather(places, draws)
        compute = self._gradients(number) if self._numbered else self._compute
        grads, loss, moved = compute(state.params, state.rest, x, y, rows, None if self.even else mask, state.given)
        params = list(state.params.values())
        before = None if self.even else [t.clone() for t in (*params, *self.memory.tensors())]
        step(self.phase.optim, params, [grads[n] for n in state.params], self.memory, lr=self.lr.tensor, stacked=True)
        for name, tensor in moved.items():
            state.rest[name].copy_(tensor)
        if before is not None:
            active = lengths > 0
            for own, old in zip((*params, *self.memory.tensors()), before, strict=True):
                own.copy_(torch.where(active.reshape(-1, *[1] * (own.dim() - 1)), own, old))
            loss = torch.where(active, loss, 0.0)
        self.losses += loss * lengths
        plan.now += 1

    def _snapshot(self) -> list[Tensor]:
        """What warming up changes and must be put back."""
        state = self.state
        return [
            *state.params.values(),
            *state.rest.values(),
            *self.memory.everything(),
            self.losses,
            self.plan.now,
        ]


def _together(group: Group) -> bool:
    """Whether all clients start from the same weights."""
    first = group.clients[0].weights
    return all(c.weights is first for c in group.clients)


class StreamsProgram:
    """Clients one by one, each with tensors and graphs of its own, for several streams to run at once."""

    def __init__(self, group: Group, settings: Settings, channels_last: bool = False) -> None:
        self.settings, self.channels_last = settings, channels_last
        self.layout = group.layout
        self.slots: list[_Slot] = []

    def fits(self, group: Group) -> bool:
        return all(slot.plan.steps >= group.schedule.steps and slot.plan.wide == group.schedule.wide for slot in self.slots)

    def run(self, group: Group) -> Losses:
        return run_streams([(self, group)])[0]

    def prepare(self, group: Group) -> None:
        """Everything that must be done before several streams are busy: weights in place, steps recorded."""
        while len(self.slots) < len(group.clients):
            self.slots.append(_Slot(group, self.settings, self.channels_last))
        for k in range(len(group.clients)):
            self.slots[k].take(group.part(k, k + 1))
            self.slots[k].ready(group.schedule.lengths[k])

    def finish(self, group: Group) -> Losses:
        """Takes the results out of the slots."""
        used = self.slots[: len(group.clients)]
        others = {name: torch.stack([slot.buffers[name] for slot in used]) for name in self.layout.others}
        stack = Stack(self.layout, torch.stack([slot.flat for slot in used]), others)
        for client, row in zip(group.clients, stack.rows(), strict=True):
            client.weights = row
        return losses_of(torch.stack([slot.losses for slot in used]), group.schedule)


def run_streams(work: list[tuple[StreamsProgram, Group]]) -> list[Losses]:
    """Some groups at once: every client on its slot's stream, whatever its group."""
    for program, group in work:
        program.prepare(group)
    seats = [(program.slots[k], group.schedule.lengths[k]) for program, group in work for k in range(len(group.clients))]
    # The longest first, so that no stream is left alone with one at the end.
    seats.sort(key=lambda seat: -seat[0].flat.numel() * int(seat[1].sum()))
    for slot, _ in seats:
        slot.lane.begin()
    # Everybody's first step, then everybody's second: launching costs about as much as running, so that a client launched as a whole
    # would be done before the next one began.
    for number in range(max((len(lengths) for _, lengths in seats), default=0)):
        for slot, lengths in seats:
            if number < len(lengths) and lengths[number]:
                with slot.lane.on():
                    slot.step(int(lengths[number]), number)
    for slot, _ in seats:
        with slot.lane.on():
            slot.collect()
        slot.lane.end()
    return [program.finish(group) for program, group in work]


class _Slot:
    """One client's place: a network, its optimiser state, and the graphs of a step, one for every length of a batch."""

    def __init__(self, group: Group, settings: Settings, channels_last: bool) -> None:
        device = group.site.x.device
        self.module = copy.deepcopy(group.module).train()
        self.channels_last = channels_last
        if channels_last:
            self.module = self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.given = {name: t.clone() for name, t in group.phase.given.items()}
        self.phase = replace(_in_precision(group.phase, settings), given=self.given)
        self.layout = group.layout
        self.net = Net(self.module, trained(self.module, self.phase))
        self.memory = Buffers.zeros(self.phase.optim, list(self.net.params.values()))
        self.feed = Feed.of(group.part(0, 1))
        self.plan = _Plan(group, 1)
        self.flat = torch.zeros(self.layout.numel, device=device)
        self.lr, self.losses = _Rate(device), torch.zeros((), device=device)
        self.buffers = dict(self.module.named_buffers())
        self._numbered = reads_number(group)
        self._steps: dict[tuple[int, int], Callable[[], None]] = {}
        self.lane = _Lane()
        self._load = _recorded(self._spread, self.module, self.phase)
        self.collect = _recorded(self._collect, self.module, self.phase, lane=self.lane)

    def take(self, group: Group) -> None:
        client = group.clients[0]
        self.flat.copy_(flat_of(client.weights, self.layout))
        for name in self.layout.others:
            self.buffers[name].copy_(client.weights[name])
        for name, kept in self.given.items():
            kept.copy_(group.phase.given[name])
        self.plan.take(group)
        self.lr.set(group.phase.optim.lr)
        self._load()

    @torch.no_grad()
    def _spread(self) -> None:
        state = self.module.state_dict()
        for name, part in zip(self.layout.names, self.layout.split(self.flat), strict=True):
            state[name].copy_(part)
        _zero(self.memory, self.losses, self.plan.now)

    @torch.no_grad()
    def _collect(self) -> None:
        state = self.module.state_dict()
        self.flat.copy_(torch.cat([state[name].reshape(-1) for name in self.layout.names]))

    def ready(self, lengths: np.ndarray) -> None:
        """Records what the coming steps need, before several streams are busy."""
        for number, length in enumerate(lengths):
            if length:
                self._recorded_step(int(length), number)

    def step(self, length: int, number: int) -> None:
        self._recorded_step(length, number)()

    def _recorded_step(self, length: int, number: int) -> Callable[[], None]:
        key = (length, number if self._numbered else 0)
        if key not in self._steps:
            if len(self._steps) >= MANY_NUMBERS:
                return partial(self._train, length, number)
            keep = [*self.module.state_dict().values(), *self.memory.everything(), self.losses, self.plan.now]
            self._steps[key] = _recorded(partial(self._train, length, number), self.module, self.phase, keep, self.lane)
        return self._steps[key]

    def _train(self, length: int, number: int) -> None:
        places, rows, draws, _, lengths = self.plan.current()
        x, y = self.feed.gather(places[0, :length], None if draws is None else draws[0, :length])
        if self.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        loss = train_step(self.net, self.phase, Batch(x, y, rows[0, :length], number), self.memory, lr=self.lr.tensor)
        self.losses += loss * lengths[0]
        self.plan.now += 1


class _Plan:
    """The order of batches on the device, in tensors that never move, and a counter that says which one is next."""

    def __init__(self, group: Group, height: int) -> None:
        device = group.site.x.device
        self.steps, self.wide, self.height = group.schedule.steps, group.schedule.wide, height
        self.now = torch.zeros(1, dtype=torch.int64, device=device)
        drawn = Feed.of(group.part(0, 1)).draws
        self.each = 0 if drawn is None else drawn.shape[-1]
        # One buffer for everything, so that a round costs one copy: places, rows, draws, lengths.
        self.columns = height * self.wide * (2 + self.each) + height
        self.table = torch.zeros(self.steps, self.columns, dtype=torch.int64, device=device)

    def take(self, group: Group) -> None:
        feed, plan = Feed.of(group), group.schedule
        parts = [feed.places, plan.rows, *([] if feed.draws is None else [feed.draws]), plan.lengths]
        table = self._table(plan, parts) if len(group.clients) < self.height or plan.wide < self.wide else None
        if table is None:
            table = np.concatenate([np.moveaxis(part, 1, 0).reshape(plan.steps, -1) for part in parts], 1)
        ready = torch.from_numpy(table)
        self.table[: plan.steps].copy_(ready.pin_memory() if self.table.is_cuda else ready, non_blocking=True)

    def draw(self) -> None:
        """The order is there already."""

    def _table(self, plan: Schedule, parts: list[np.ndarray]) -> np.ndarray:
        """The table where not all places are taken."""
        clients = len(plan.rows)
        table = np.zeros((plan.steps, self.columns), dtype=np.int64)
        column = 0
        for part in parts:
            by_step = np.moveaxis(part, 1, 0).reshape(plan.steps, clients, -1)
            each = by_step.shape[2] if part is plan.lengths else by_step.shape[2] // plan.wide * self.wide
            block = table[:, column : column + self.height * each].reshape(plan.steps, self.height, each)
            block[:, :clients, : by_step.shape[2]] = by_step
            table[:, column : column + self.height * each] = block.reshape(plan.steps, -1)
            column += self.height * each
        return table

    def current(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """places, rows, draws, mask, lengths of the step that the counter points at."""
        line = self.table.index_select(0, self.now)[0]
        size = self.height * self.wide
        places, rows = (line[k * size : (k + 1) * size].view(self.height, self.wide) for k in range(2))
        draws = line[2 * size : (2 + self.each) * size].view(self.height, self.wide, self.each) if self.each else None
        lengths = line[-self.height :]
        mask = torch.arange(self.wide, device=line.device) < lengths[:, None].clamp(min=1)
        return places, rows, draws, mask, lengths


def _drawn(group: Group) -> bool:
    """Whether the device can draw the order of batches itself, inside the graph of a whole phase."""
    plan, phase = group.schedule, group.phase
    simple = phase.source == "private" and AUGMENTATIONS[phase.augment] is None
    return simple and plan.keys is not None and 0 < plan.steps <= WHOLE


class _DrawnPlan(_Plan):
    """The order of batches where the device draws it: only the clients' rows and the keys of their orders go there."""

    def __init__(self, group: Group, height: int) -> None:
        super().__init__(group, height)
        self.epochs = group.phase.epochs
        self.size = self.steps * self.wide // self.epochs
        device = group.site.x.device
        self.own = torch.zeros(height, self.size + 1, dtype=torch.int64, device=device)
        self.table[:, -height:] = self.wide
        self._stages = [_Stage(self.own) for _ in range(STAGES)]

    def take(self, group: Group) -> None:
        stage = self._stages[0]
        self._stages = [*self._stages[1:], stage]
        stage.wait()
        for line, client in zip(stage.array, group.clients, strict=False):
            line[:-1] = client.rows
        assert group.schedule.keys is not None
        stage.array[: len(group.clients), -1] = group.schedule.keys.view(np.int64)
        stage.send(self.own)

    def draw(self) -> None:
        own, keys = self.own[:, :-1], self.own[:, -1:]
        size = self.height * self.wide
        count = self.steps // self.epochs
        for epoch in range(self.epochs):
            order = orders(keys, epoch, self.size)
            lines = self.table[epoch * count : (epoch + 1) * count]
            for k, part in enumerate((own.gather(1, order), order)):
                lines[:, k * size : (k + 1) * size] = (
                    part.view(self.height, count, self.wide).transpose(0, 1).reshape(count, size)
                )


class _Stage:
    """A place on the host from which tensors of one form go to the device; it is written to again only after they have left."""

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


class _Rate:
    """A learning rate on the device, sent only when it changes."""

    def __init__(self, device: torch.device) -> None:
        self.tensor, self._value = torch.zeros((), device=device), 0.0

    def set(self, value: float) -> None:
        if value != self._value:
            self.tensor.fill_(value)
            self._value = value


def _recorded(
    action: Callable[[], None], module: nn.Module, phase: Phase, keep: list[Tensor] | None = None, lane: _Lane | None = None
) -> Callable[[], None]:
    """The action as a CUDA graph. It runs a few times first, as recording demands; what that changes in `keep` is put back. Without
    CUDA it is the action itself: slow, but the same arithmetic, which is how tests reach it."""
    if not torch.cuda.is_available():
        return partial(_with_hooks, action, module, phase)
    saved = [t.clone() for t in keep or ()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with hooked(module, phase):
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                action()
                for own, old in zip(keep or (), saved, strict=True):
                    own.data.copy_(old)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=lane.stream if lane else None):
            action()
    return graph.replay


def _with_hooks(action: Callable[[], None], module: nn.Module, phase: Phase) -> None:
    with hooked(module, phase):
        action()


class _Lane:
    """A stream beside the current one: work on it starts after what was queued here before, and is waited for at the end.

    A slot records on its lane and replays there and nowhere else. Matrix products keep counters in a workspace that belongs to the
    stream they were recorded on, so two graphs recorded on one stream and replayed side by side spoil each other's, up to never
    ending.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def on(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def begin(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def end(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


def _zero(memory: Buffers, *tensors: Tensor) -> None:
    for tensor in (*memory.everything(), *tensors):
        tensor.zero_()


def _in_precision(phase: Phase, settings: Settings) -> Phase:
    if settings.precision != "bf16":
        return phase
    also = None if phase.also is None else partial(_autocast, objective=phase.also)
    return replace(phase, objective=partial(_autocast, objective=phase.objective), also=also)


def _autocast(net: Net, batch: Batch, given: Given, *, objective: Callable[[Net, Batch, Given], Tensor]) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        return objective(net, batch, given)


def program_makers(group: Group, settings: Settings) -> dict[str, Callable[[], StackProgram | StreamsProgram]]:
    """The ways to train a group, by name. Layers that mix rows cannot be filled up, so ragged stacks of them are left out."""
    ways: dict[str, Callable[[], StackProgram | StreamsProgram]] = {
        "streams": lambda: StreamsProgram(group, settings),
        "streams, channels last": lambda: StreamsProgram(group, settings, channels_last=True),
    }
    if len(group.clients) > 1 and (group.schedule.even or honours_masks(group)):
        height = len(group.clients)
        stacks: dict[str, Callable[[], StackProgram | StreamsProgram]] = {
            "stack": lambda: StackProgram(group, height, settings),
            "stack of matrices": lambda: StackProgram(group, height, settings, matrices=True),
        }
        ways = {**stacks, **ways}
    if not any(isinstance(m, nn.Conv2d) for m in group.module.modules()):
        ways = {name: make for name, make in ways.items() if name in ("stack", "streams")}
    return ways

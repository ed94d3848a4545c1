"""The cohort engine on a CUDA device.

All data and weights live on the device. Work is known by its form: networks of the same shapes with
the same phase are the same work, in every round and whichever channels they hold, so that it is
recorded once and replayed (see `lane`). All groups of a round are trained side by side. Nothing
here waits for the device: replies and losses are tensors that it may still be computing. What does
not fit into memory at once is trained in parts, and what cannot be recorded runs plainly; `notes`
says what and why.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestling.engines.cuda import ways
from nestling.engines.cuda.cuda_settings import CudaSettings
from nestling.engines.cuda.job import LaneJob, side_by_side
from nestling.engines.cuda.orders import drawn_on_device, host_table
from nestling.engines.cuda.slot import Slot
from nestling.engines.cuda.stack import StackProgram
from nestling.engines.engine import Engine, blame
from nestling.engines.precision import allow
from nestling.training.client import ClientSide, Errand, Outcome, Site
from nestling.training.lane import Lane, first_line
from nestling.training.stacks.group import Group
from nestling.training.stacks.stacked import losses_of
from nestling.training.stacks.together import Losses, train_one_by_one, work_together
from nestling.views.flat import Fetched, Stack
from nestling.where import Where

Program = Slot | StackProgram
TRIALS = 3
MOST_SLOTS = 32
"""How many clients of one kind are trained side by side; more take turns."""

MOST_LARGE = 6
"""How many clients with large networks are: so many fill the device, and more push one another out
of its caches."""

GROWTH = 4
"""How many times as many slots a kind may have as in the round before. It begins with one:
recording a slot takes about as long as training a client in one that is there, and some kinds of
work never come back."""

MOST_HIGH = 512
"""The most clients in one stack."""

MADE_TO_MEASURE = 4
"""How many stacks of one kind are as high as the number of clients at hand; further ones have one
of few heights, or every number of clients would be recorded."""

MOST_KINDS = 128
"""How many kinds of work keep their programs; those that were used last."""


@dataclass(eq=False)
class WorkKind:
    """What is known of one kind of work: its programs by way, and how many of its clients fit into
    memory at once."""

    name: str
    programs: dict[str, list[Program]] = field(default_factory=dict)
    most: int = MOST_HIGH
    room: int = 1  # how many slots it may have now
    way: dict[int, str] = field(default_factory=dict)  # by the number of clients, rounded up
    plain: str = ""  # why it is trained one by one
    unstacked: str = ""  # why it is never a stack

    def all(self) -> Iterator[Program]:
        """All its programs."""
        for own in self.programs.values():
            yield from own


class CudaCohort(Engine):
    """Everything of a round on one CUDA device."""

    name, lookahead = "cohort", 1

    def __init__(
        self,
        where: Where,
        settings: CudaSettings | None = None,
        decisions: ways.Decisions | None = None,
    ) -> None:
        """Starts without any program; `decisions` are the ways that earlier trials found to be
        fastest."""
        self.where, self.settings = where, settings or CudaSettings(where.precision)
        self.decisions = decisions or ways.Decisions()
        self.notes: list[str] = []
        self._put_back: Callable[[], None] = lambda: None
        self._kinds: OrderedDict[Hashable, WorkKind] = OrderedDict()
        self._graphs = self._recorded = self._plain = 0

    def open(self, method: ClientSide, site: Site) -> None:
        """Sets how the device may round, and seeds its generator for dropout."""
        self.where.require(site.x, "the clients' data")
        self._method, self._site = method, site
        self._put_back = allow(self.settings.precision)
        if self.where.device.type == "cuda":
            # Dropout draws from the device's own generator here.
            torch.cuda.manual_seed(site.seed)

    def run(self, errands: Sequence[Errand]) -> Iterator[Outcome]:
        """Trains the clients of all errands side by side."""
        yield from work_together(self._method, errands, self._site, self._train, blame)

    def close(self) -> None:
        """Counts what was recorded, forgets all programs, and puts the rounding switches back."""
        self._count()
        self._kinds.clear()
        self._put_back()

    def recorded(self) -> dict[str, object]:
        """How many kinds of work were recorded as graphs so far, and how many were not."""
        self._count()
        return {
            "kinds_recorded": self._recorded,
            "kinds_not_recorded": self._plain,
            "graphs": self._graphs,
        }

    def _count(self) -> None:
        kinds = list(self._kinds.values())
        if kinds:
            refused = [k for k in kinds if k.plain or any(p.lane.refusal for p in k.all())]
            self._graphs = sum(p.lane.graphs for k in kinds for p in k.all())
            self._plain, self._recorded = len(refused), len(kinds) - len(refused)

    # -- training ----------------------------------------------------------------------------------

    def _train(self, found: list[Group]) -> list[Losses]:
        """All groups side by side; again with fewer clients at once where memory is too small."""
        while True:
            try:
                return self._train_all(found)
            except torch.OutOfMemoryError:  # noqa: PERF203 (every try may run out of memory)
                self._make_room(found)
            except Exception as error:
                if not self._unstack(found, error):
                    raise

    def _train_all(self, found: list[Group]) -> list[Losses]:
        work: list[tuple[Lane, Iterator[None]]] = []
        results: list[_Result | None] = []
        for group in found:
            kind = self._kind(group)
            way = self._way(kind, group)
            if way == ways.PLAIN:
                results.append(None)
                continue
            result = _Result.of(
                group, with_table=way not in ways.STACKS or not drawn_on_device(group)
            )
            results.append(result)
            work += self._work(kind, way, result)
        side_by_side(work)
        # Clients get their new weights only now: had there been too little memory, they would begin
        # again.
        return [
            train_one_by_one(group) if result is None else result.finish()
            for group, result in zip(found, results, strict=True)
        ]

    def _kind(self, group: Group) -> WorkKind:
        if group.key not in self._kinds:
            client = group.clients[0]
            share = client.view.keep.mean() if client.view.keep.size else 1.0
            self._kinds[group.key] = WorkKind(
                f"{client.reference.name} (width {share:.2f}, batch {group.phase.batch})"
            )
            while len(self._kinds) > MOST_KINDS:
                self._wait()
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(group.key)
        return self._kinds[group.key]

    def _work(self, kind: WorkKind, way: str, result: _Result) -> list[tuple[Lane, Iterator[None]]]:
        """The steps of a group's clients, lane by lane."""
        count = len(result.group.clients)
        if way in ways.STACKS:
            high = min(kind.most, MOST_HIGH)
            parts = [result.part(k, min(k + high, count)) for k in range(0, count, high)]
            programs = [self._stack(kind, way, part) for part in parts]
            found: dict[int, tuple[StackProgram, list[LaneJob]]] = {}
            for program, part in zip(programs, parts, strict=True):
                found.setdefault(id(program), (program, []))[1].append(part)
            return [(program.lane, _in_turn(program, own)) for program, own in found.values()]
        queues = _queues(
            result.group,
            min(kind.most, kind.room, MOST_LARGE if way == ways.SLOTS_LAST else MOST_SLOTS),
        )
        kind.room = min(kind.room * GROWTH, MOST_SLOTS)
        slots = self._slots(kind, way, result, len(queues))
        return [
            (slot.lane, _in_turn(slot, [result.part(k, k + 1) for k in queue]))
            for slot, queue in zip(slots, queues, strict=True)
        ]

    def _slots(self, kind: WorkKind, way: str, result: _Result, count: int) -> list[Program]:
        whole = result.part(0, len(result.group.clients))
        own = kind.programs[way] = [slot for slot in kind.programs.get(way, []) if slot.fits(whole)]
        while len(own) < count:
            own.append(Slot(result.group, self.settings, way == ways.SLOTS_LAST))
        return own[:count]

    def _stack(self, kind: WorkKind, way: str, job: LaneJob) -> StackProgram:
        own, count = kind.programs.setdefault(way, []), len(job.group.clients)
        fitting = [p for p in own if isinstance(p, StackProgram) and p.fits(job)]
        best = min(fitting, key=lambda p: p.height) if fitting else None
        # A place without a client costs as much as one with a client, so the first heights are made
        # to measure.
        if best is None or (best.height > count and len(own) < MADE_TO_MEASURE):
            high = count if len(own) < MADE_TO_MEASURE else min(height_for(count), kind.most)
            best = StackProgram(job.group, high, self.settings, way == ways.MATRICES)
            own.append(best)
        return best

    def _unstack(self, found: list[Group], error: Exception) -> bool:
        """From now on trains in slots what failed as a stack; False where nothing was a stack."""
        stacked = [
            kind
            for kind in map(self._kind, found)
            if not kind.unstacked and set(kind.programs) & set(ways.STACKS)
        ]
        for kind in stacked:
            kind.unstacked = first_line(error)
            kind.programs.clear()
            self._note(f"{kind.name}: not stacked ({kind.unstacked})")
        return bool(stacked)

    def _make_room(self, found: list[Group]) -> None:
        """Forgets all programs, and takes at most half as many clients of the kind that needs most
        at once."""
        largest = max(found, key=lambda g: min(len(g.clients), self._kind(g).most) * g.layout.numel)
        kind = self._kind(largest)
        now = min(len(largest.clients), kind.most)
        if now == 1:
            raise torch.OutOfMemoryError(
                f"one client of {kind.name} does not fit into the memory of {self.where.device}"
            )
        kind.most = (now + 1) // 2
        self._wait()  # what still runs must not lose its memory
        for other in self._kinds.values():
            other.programs.clear()
        self._note(
            f"{kind.name}: {now} clients at once do not fit into the device's memory: "
            f"{kind.most} at a time"
        )
        if self.where.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- how ---------------------------------------------------------------------------------------

    def _way(self, kind: WorkKind, group: Group) -> str:
        if kind.plain:
            return ways.PLAIN
        height = height_for(len(group.clients))
        if kind.unstacked:
            kind.way[height] = ways.single(group)
        elif height not in kind.way:
            kind.way[height] = self._decide(kind, group)
            self._note(f"{kind.name}, {len(group.clients)} clients: {kind.way[height]}")
        for program in kind.all():
            if program.lane.refusal:
                kind.plain = program.lane.refusal
                self._note(f"NOT RECORDED, {kind.name}: {kind.plain}")
                return ways.PLAIN
        return kind.way[height]

    def _decide(self, kind: WorkKind, group: Group) -> str:
        likely = ways.candidates(group, self.settings)
        if len(likely) == 1:
            return likely[0]
        what = ways.description(group, self.settings)
        known = self.decisions.get(what)
        if known in likely:
            return known
        times = {way: self._measure(kind, group, way) for way in likely}
        best = min(times, key=lambda way: times[way])
        self._note(
            f"{kind.name}: tried {', '.join(f'{way} {1e3 * t:.2f} ms' for way, t in times.items())}"
        )
        for way in likely:
            if way != best:
                kind.programs.pop(way, None)
        self.decisions.put(what, best)
        return best

    def _measure(self, kind: WorkKind, group: Group, way: str) -> float:
        """Seconds of the group's phase; what comes of it is thrown away."""
        taken = []
        try:
            for _ in range(TRIALS + 2):
                result = _Result.of(
                    group, with_table=way not in ways.STACKS or not drawn_on_device(group)
                )
                self._wait()
                began = time.perf_counter()
                side_by_side(self._work(kind, way, result))
                self._wait()
                taken.append(time.perf_counter() - began)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._note(f"{kind.name}: not as {way} ({first_line(error)})")
            return float("inf")
        return min(taken[2:])

    def _wait(self) -> None:
        if self.where.device.type == "cuda":
            torch.cuda.synchronize()

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


@dataclass(eq=False)
class _Result:
    """Where the results of a group go: one row per client."""

    group: Group
    table: Tensor
    out: Tensor
    losses: Tensor
    others: dict[str, Tensor]

    @staticmethod
    def of(group: Group, with_table: bool) -> _Result:
        device, count, layout = group.site.x.device, len(group.clients), group.layout
        weights = group.clients[0].weights
        table = (
            host_table(group, group.width).to(device, non_blocking=True)
            if with_table
            else torch.empty(count, 0, 0)
        )
        others = {
            name: torch.empty(
                (count, *weights[name].shape), dtype=weights[name].dtype, device=device
            )
            for name in layout.others
        }
        return _Result(
            group,
            table,
            torch.empty(count, layout.numel, device=device),
            torch.empty(count, device=device),
            others,
        )

    def part(self, start: int, end: int) -> LaneJob:
        """The share of some of the clients."""
        pick = slice(start, end)
        others = {name: t[pick] for name, t in self.others.items()}
        return LaneJob(
            self.group.part(start, end), self.table[pick], self.out[pick], self.losses[pick], others
        )

    def finish(self) -> Losses:
        """Gives the clients their new weights. Losses and the norms that tell whether states are
        finite go to the host in one copy."""
        told = Fetched(torch.stack([self.losses, torch.linalg.vector_norm(self.out, dim=1)]))
        stack = Stack(self.group.layout, self.out, self.others, told.row(1))
        for client, row in zip(self.group.clients, stack.rows(), strict=True):
            client.weights = row
        return losses_of(told.tensor[0], self.group.schedule, told.row(0))


def _in_turn(program: Program, jobs: Sequence[LaneJob]) -> Iterator[None]:
    for job in jobs:
        yield from program.work(job)


def _queues(group: Group, slots: int) -> list[list[int]]:
    """Which clients each slot trains: the longest first, each to the slot that has least to do."""
    samples = group.schedule.samples
    order = sorted(range(len(group.clients)), key=lambda k: -samples[k])
    turns = -(-len(order) // slots)
    queues: list[list[int]] = [[] for _ in range(-(-len(order) // turns))]
    load = [0] * len(queues)
    for k in order:
        least = load.index(min(load))
        queues[least].append(k)
        load[least] += samples[k]
    return queues


def height_for(clients: int) -> int:
    """The height of a stack for so many clients: one of few, so that few are recorded."""
    power = 1 << max(0, clients - 1).bit_length()
    return clients if clients <= 4 else 3 * power // 4 if clients <= 3 * power // 4 else power

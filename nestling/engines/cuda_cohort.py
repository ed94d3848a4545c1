"""The cohort engine on a CUDA device.

All data and weights live on the device. The first time a kind of work appears it runs step by step; when it comes again, the ways
to record it (see `programs`) are tried on it, and the fastest is remembered. Nothing here waits for the device: replies and losses
are tensors that it may still be computing. A stack that does not fit into memory is cut, and what can be neither stacked nor
recorded runs plainly, client by client; `notes` says what and why.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from nestling.engines.engine import blame
from nestling.engines.precision import allow
from nestling.engines.programs import Settings, StackProgram, StreamsProgram, program_makers, run_streams
from nestling.training.client import ClientSide, Outcome, Site, Task
from nestling.training.group import Group
from nestling.training.stacked import CannotStack, train_stack
from nestling.training.together import Losses, train_one_by_one, work_together

Program = StackProgram | StreamsProgram
PLAIN, STEP_BY_STEP = "one by one", "step by step"
TRIALS = 3
MOST_PROGRAMS = 4
"""How many programs of one kind of work are kept: for other heights, and for other numbers of steps."""


class CudaCohort:
    """Everything of a round on one CUDA device."""

    lookahead = 1

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.notes: list[str] = []
        self._put_back: Callable[[], None] = lambda: None
        self._sights: Counter[Hashable] = Counter()
        self._ways: dict[Hashable, str] = {}
        self._programs: dict[Hashable, list[Program]] = {}
        self._heights: dict[Hashable, int] = {}

    def open(self, method: ClientSide, site: Site) -> None:
        self._method, self._site = method, site
        # Shapes never change in a program, so the fastest kernel for each is worth finding; it may differ from run to run.
        self._put_back = allow(self.settings.precision, search=self.settings.precision != "float32")

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        yield from work_together(self._method, tasks, self._site, self._train, blame)

    def close(self) -> None:
        self._programs.clear()
        self._put_back()

    def _train(self, found: list[Group]) -> list[Losses]:
        """All groups; those that are spread over streams at once, the others one after another."""
        starts = [[client.weights for client in group.clients] for group in found]
        ways = [self._way(group) for group in found]
        spread = [k for k, way in enumerate(ways) if way.startswith("streams") and not self._cut(found[k])]
        done: dict[int, Losses] = {}
        try:
            work = [(self._program(found[k], ways[k]), found[k]) for k in spread]
            done = dict(zip(spread, run_streams(work), strict=True)) if work else {}  # type: ignore[arg-type]
        except torch.OutOfMemoryError:
            self._make_room([found[k] for k in spread], [starts[k] for k in spread])
        return [done[k] if k in done else self._train_group(group, ways[k]) for k, group in enumerate(found)]

    def _train_group(self, group: Group, way: str) -> Losses:
        height = self._heights.get(group.key, len(group.clients))
        if height < len(group.clients):
            parts = [group.part(k, k + height) for k in range(0, len(group.clients), height)]
            return joined([self._train_group(part, way) for part in parts])
        starts = [client.weights for client in group.clients]
        try:
            if way == STEP_BY_STEP:
                return self._step_by_step(group)
            return train_one_by_one(group) if way == PLAIN else self._program(group, way).run(group)
        except torch.OutOfMemoryError:
            if height == 1:
                raise
            self._make_room([group], [starts])
            self._halved(group)
            return self._train_group(group, way)

    def _halved(self, group: Group) -> Group:
        """Half of the clients, and no more of their kind at once from now on."""
        half = (len(group.clients) + 1) // 2
        self._heights[group.key] = half
        self._note(group, f"so many at once do not fit into the device's memory: {half} are trained at a time")
        return group.part(0, half)

    def _cut(self, group: Group) -> bool:
        return self._heights.get(group.key, len(group.clients)) < len(group.clients)

    def _make_room(self, found: list[Group], starts: list[list[Any]]) -> None:
        """Forgets all programs and puts the clients back to their start."""
        for group, weights in zip(found, starts, strict=True):
            for client, own in zip(group.clients, weights, strict=True):
                client.weights = own
        self._programs.clear()
        torch.cuda.empty_cache()

    def _way(self, group: Group) -> str:
        self._sights[group.key] += 1
        if group.key not in self._ways:
            if self._sights[group.key] == 1:
                return STEP_BY_STEP
            self._ways[group.key] = self._fastest(group)
        return self._ways[group.key]

    def _step_by_step(self, group: Group) -> Losses:
        if len(group.clients) > 1:
            try:
                return train_stack(group)
            except CannotStack:
                pass
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self._note(group, f"not stacked ({_first_line(error)})")
        return train_one_by_one(group)

    def _program(self, group: Group, way: str) -> Program:
        for program in self._programs.setdefault(group.key, []):
            if program.fits(group):
                return program
        made = program_makers(group, self.settings).get(way) or program_makers(group, self.settings)["streams"]
        self._programs[group.key] = [*self._programs[group.key], made()][-MOST_PROGRAMS:]
        return self._programs[group.key][-1]

    def _fastest(self, group: Group) -> str:
        """Tries every way once on the group at hand."""
        times: dict[str, float] = {}
        made: dict[str, Program] = {}
        full = False
        starts = [client.weights for client in group.clients]
        for way, make in program_makers(group, self.settings).items():
            try:
                made[way], times[way] = self._measure(group, make)
            except torch.OutOfMemoryError:
                full = True
                made.clear()
                torch.cuda.empty_cache()
            except Exception as error:
                self._note(group, f"not as {way} ({_first_line(error)})")
            for client, weights in zip(group.clients, starts, strict=True):
                client.weights = weights
        if not times and full and len(group.clients) > 1:
            return self._fastest(self._halved(group))
        if not times:
            self._note(group, "trained one by one")
            return PLAIN
        best = min(times, key=lambda way: times[way])
        self._programs[group.key] = [made[best]] if best in made else []
        self._note(group, f"{best} ({', '.join(f'{way} {1e3 * t:.2f} ms' for way, t in times.items())})")
        return best

    def _measure(self, group: Group, make: Callable[[], Program]) -> tuple[Program, float]:
        program = make()
        starts = [client.weights for client in group.clients]
        taken = []
        for _ in range(TRIALS):
            for client, weights in zip(group.clients, starts, strict=True):
                client.weights = weights
            _wait()
            began = time.perf_counter()
            program.run(group)
            _wait()
            taken.append(time.perf_counter() - began)
        return program, min(taken)

    def _note(self, group: Group, text: str) -> None:
        client = group.clients[0]
        share = client.view.keep.mean() if client.view.keep.size else 1.0
        note = f"{client.reference.name} (width {share:.2f}, {len(group.clients)} clients): {text}"
        if note not in self.notes:
            self.notes.append(note)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def joined(parts: Sequence[Losses]) -> Losses:
    """The losses of a group that was trained in parts."""
    return Losses(
        torch.cat([p.total.reshape(-1) for p in parts]),
        [steps for p in parts for steps in p.steps],
        [samples for p in parts for samples in p.samples],
    )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]

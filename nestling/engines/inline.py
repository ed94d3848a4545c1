"""The in-process engine: one client after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from nestling.engines.allocator import keep_freed_memory
from nestling.engines.engine import Engine, failed
from nestling.engines.precision import allow
from nestling.training.client import ClientSide, Outcome, Site, Task, work
from nestling.where import CPU, Where


class Inline(Engine):
    """Runs every task where it stands. The plainest engine, and the one that all others must equal."""

    name = "inline"

    def __init__(self, where: Where = CPU) -> None:
        self.where = where
        self.notes: list[str] = []
        self._put_back: Callable[[], None] = lambda: None

    def open(self, method: ClientSide, site: Site) -> None:
        self.where.require(site.x, "the clients' data")
        keep_freed_memory()
        self._put_back = allow(self.where.precision)
        self.method, self.site = method, site

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        for task in tasks:
            try:
                yield work(self.method, task, self.site)
            except Exception as error:
                raise failed(task, f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        self._put_back()

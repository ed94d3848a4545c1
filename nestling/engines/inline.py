"""The in-process engine: one client after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from nestling.engines.allocator import keep_freed_memory
from nestling.engines.engine import Engine, failed
from nestling.engines.precision import allow
from nestling.training.client import ClientSide, Errand, Outcome, Site, work
from nestling.where import CPU, Where


class Inline(Engine):
    """Runs every errand where it stands. The plainest engine, and the one that all others must
    equal."""

    name = "inline"

    def __init__(self, where: Where = CPU) -> None:
        """Computes on `where`, the CPU unless told otherwise."""
        self.where = where
        self.notes: list[str] = []
        self._put_back: Callable[[], None] = lambda: None

    def open(self, method: ClientSide, site: Site) -> None:
        """Refuses data on another device, and sets how this process keeps memory and rounds."""
        self.where.require(site.x, "the clients' data")
        keep_freed_memory()
        self._put_back = allow(self.where.precision)
        self.method, self.site = method, site

    def run(self, errands: Sequence[Errand]) -> Iterator[Outcome]:
        """Does one errand after another; an error names its client."""
        for errand in errands:
            try:
                yield work(self.method, errand, self.site)
            except Exception as error:  # noqa: PERF203 (the error names its own errand)
                raise failed(errand, f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Puts the rounding switches back."""
        self._put_back()

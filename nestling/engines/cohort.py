"""The cohort engine: clients that do the same are trained as one.

The clients of a round are grouped by network and phase, and each group is trained as a stack of
networks. On a CPU that pays for small networks only, so a rule by arithmetic decides (a rule and
not a stop-watch, so that a command gives the same bits twice). How high a stack is changes no bit
of a client's result, as long as it is higher than one: a group may be shared out between any number
of workers, in parts of two or more. What cannot be stacked runs one by one. Against the in-process
engine results differ by rounding only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from nestling.engines.allocator import keep_freed_memory
from nestling.engines.engine import Engine, blame
from nestling.engines.pool import Pool
from nestling.training.client import ClientSide, Errand, Outcome, Site
from nestling.training.stacks.group import Group
from nestling.training.stacks.stacked import CannotStack, train_stack
from nestling.training.stacks.together import Losses, train_one_by_one, work_together
from nestling.views import Reference, View
from nestling.world import Piece, piece_cost

HEIGHT = 32
"""The most clients in one stack on a CPU."""

SMALL_STEP = 1.5e7
"""Multiply-accumulates of a forward pass over one batch up to which a stack beats the plain loop on
a CPU core."""


class Cohort(Engine):
    """Stacks on the CPU, over `workers` processes (1: in this one)."""

    name = "cohort"

    def __init__(self, workers: int = 1) -> None:
        """With more than one worker, makes a pool whose chunks are stacks."""
        self.workers, self.notes = workers, list[str]()
        self._pool = (
            Pool(workers, do=work_chunk, chunks=partial(chunks, workers=workers))
            if workers > 1
            else None
        )

    def open(self, method: ClientSide, site: Site) -> None:
        """Opens the pool, or readies this process where there is none."""
        self.where.require(site.x, "the clients' data")
        self._method, self._site = method, site
        if self._pool is not None:
            self._pool.open(method, site)
        else:
            keep_freed_memory()

    def run(self, errands: Sequence[Errand]) -> Iterator[Outcome]:
        """Trains the round's chunks in the pool, or one after another in this process."""
        if self._pool is not None:
            yield from self._pool.run(errands)
        else:
            for chunk in chunks(errands, self._site):
                yield from work_chunk(self._method, chunk, self._site)

    def close(self) -> None:
        """Ends the pool, if there is one."""
        if self._pool is not None:
            self._pool.close()


def chunks(errands: Sequence[Errand], site: Site, workers: int = 1) -> list[list[Errand]]:
    """The errands by network and view, shared out between the workers; where stacks would not pay,
    each for itself."""
    kinds: dict[tuple[str, bytes], list[Errand]] = {}
    for errand in errands:
        reference = site.references[errand.network]
        kinds.setdefault((errand.network, reference.view(errand.spec).form()), []).append(errand)
    found = []
    for (network, _), own in kinds.items():
        reference = site.references[network]
        small = macs_of(reference, reference.view(own[0].spec)) * site.train.batch <= SMALL_STEP
        found += _parts(
            own, max(-(-len(own) // HEIGHT), min(workers, len(own) // 2), 1) if small else len(own)
        )
    return found


def _parts(own: list[Errand], count: int) -> list[list[Errand]]:
    """The errands in so many parts of nearly the same size."""
    ends = [round(len(own) * k / count) for k in range(count + 1)]
    return [own[start:end] for start, end in pairwise(ends)]


def work_chunk(method: ClientSide, errands: Sequence[Errand], site: Site) -> list[Outcome]:
    """A chunk of errands, stacked where that pays."""
    return work_together(method, errands, site, _train, blame)


def _train(found: list[Group]) -> list[Losses]:
    return [_train_group(group) for group in found]


def _train_group(group: Group) -> Losses:
    client = group.clients[0]
    if (
        len(group.clients) > 1
        and macs_of(client.reference, client.view) * group.phase.batch <= SMALL_STEP
    ):
        with contextlib.suppress(CannotStack):
            return train_stack(group)
    return train_one_by_one(group)


def macs_of(reference: Reference, view: View) -> int:
    """Multiply-accumulates of one sample's forward pass."""
    return piece_cost(Piece(reference, view)).macs

"""Everything a run needs, put together, and what adds up over it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nestling.attacks import Attack
from nestling.engines import Engine
from nestling.errors import InputError
from nestling.methods import Method
from nestling.methods.server import KEPT, Kept, Server, shown
from nestling.runs.coverage import Coverage
from nestling.runs.evaluation import Bench
from nestling.training.client import Outcome
from nestling.views import State
from nestling.world import World

Metrics = dict[str, Any]

MOST_DECLARED = 2**20
"""On a fleet of real devices, whose rows nobody else can count: what a client counts as at most,
where the experiment does not say. Far above what devices have, so that it changes no honest run;
who wants more than a backstop sets `server.most_rows` near to what clients really have."""

MOST_SHARE, MOST_STEP = 0.5, 10.0
"""On a fleet of real devices, where the experiment does not say: what share of an entry's weight
one client may have, and how many times the median step its own may be long."""


@dataclass
class Totals:
    """What adds up over a run; part of every checkpoint."""

    round: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    refused: int = 0
    late: int = 0
    dropped: int = 0
    clock_seconds: float = 0.0
    energy_joules: float = 0.0
    # who trained which channel, as of the last checkpoint; a run without a folder has none
    coverage: dict[str, Any] = field(default_factory=dict, compare=False)


@dataclass
class Federation:
    """Everything a run needs."""

    world: World
    method: Method
    engine: Engine
    bench: Bench
    rounds: int
    participants: int
    evaluate_every: int
    server: Server = field(default_factory=Server)
    attack: Attack = field(default_factory=Attack)
    attackers: frozenset[int] = frozenset()  # who lies
    kept: Kept = field(default_factory=dict)  # what the server's own optimiser and mean go by
    totals: Totals = field(default_factory=Totals)
    # who trained which channel; not counted where no weights are shared
    coverage: Coverage = field(default_factory=Coverage)
    on_client: Callable[[int, int], None] = lambda *_: None
    on_refusal: Callable[[int, int, str], None] = lambda *_: None
    on_clipped: Callable[[int, int, str], None] = lambda *_: None
    on_board: Callable[[Mapping[str, Any]], None] = lambda _: None
    # a round stands: its number, its outcomes, and as how many rows those that count did
    on_merged: Callable[[int, Mapping[int, Outcome], Mapping[int, int]], None] = lambda *_: None
    ahead: int = 0  # rounds that the method's state is ahead of `totals`
    stateful: bool = False  # whether any client has kept anything
    notes: list[str] = field(default_factory=list)  # what a run should tell its user beside results
    reading: Mapping[str, Any] = field(default_factory=dict)  # what was read as its data

    def __post_init__(self) -> None:
        """Gives the method the server's way to merge, and draws who lies where anybody does."""
        self.method.robust = self.server.robust
        if self.server.gate and self.world.public_labels is None:
            raise InputError(
                "there are no labelled public rows to test the global model on",
                field="server.gate",
                fix="set the share of rows that are public, e.g. split.public = 0.02",
            )
        if self.attack.on:
            self.attackers = self.attack.attackers(len(self.world.fleet), self.world.seed)

    @property
    def doubts(self) -> bool:
        """Whether clients may lie, so that also what a merge makes of finite replies is looked at:
        clients that are simulated say what they computed."""
        return self.world.fleet.live or bool(self.attackers)

    @cached_property
    def shrinks(self) -> bool:
        """Whether devices may have room for less than at rest: only then a round says how much each
        client trained."""
        return any(self.world.varies(plan) for plan in self.world.plans.values())

    @property
    def most_rows(self) -> int:
        """As how many rows a client counts at most; 0: as many as it has."""
        return self.server.most_rows or (MOST_DECLARED if self.world.fleet.live else 0)

    @property
    def most_share(self) -> float:
        """Of an entry's weight that one client may have in a mean; 1: any."""
        return self.server.most_share or (MOST_SHARE if self.world.fleet.live else 1.0)

    @property
    def most_step(self) -> float:
        """How many times the median step a client's own may be long."""
        return self.server.most_step or (MOST_STEP if self.world.fleet.live else math.inf)

    @property
    def shown(self) -> Method:
        """The method whose models are tested, reported and exported."""
        return shown(self.server, self.method, self.kept)

    def state(self) -> dict[str, State]:
        """The server's state by name: the method's and its own."""
        return {**self.method.state(), **self.kept}

    def restore(self, state: Mapping[str, State]) -> None:
        """Puts back what `state` gave."""
        self.kept = {name: part for name, part in state.items() if name.startswith(KEPT)}
        self.method.restore({name: part for name, part in state.items() if name not in self.kept})

    def roll_back(self, round: int, state: Mapping[str, State]) -> None:
        """Undoes a round and those begun after it: the server's state, what clients keep, and what
        is written down of them."""
        self.world.store.undo(round)
        self.restore(state)

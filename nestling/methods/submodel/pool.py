"""A pool of nested models: which of them a device holds, now or at rest, and which one the server gives to whom."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nestling.methods.allocation import Ladder
from nestling.methods.api import Device, Piece, World
from nestling.seeds import stream
from nestling.world import Plan


@dataclass(frozen=True, eq=False)
class Rung:
    """One model of a pool: its size as a share of the whole (the nominal one where it was asked for), and whether the server
    dispatches it; the others exist for devices that are short of memory."""

    size: float
    piece: Piece
    level: bool = True


@dataclass(frozen=True, eq=False)
class ModelPool:
    """Models from small to large, each inside the next."""

    world: World
    rungs: Sequence[Rung]

    def __post_init__(self) -> None:
        """Refuses at once a device that cannot train even the smallest model."""
        for tier, plan in self.world.plans.items():
            if plan.fit is not None:
                self._ladder.at_rest(tier)

    @cached_property
    def _ladder(self) -> Ladder:
        return Ladder(self.world, [rung.piece for rung in self.rungs])

    @cached_property
    def levels(self) -> list[int]:
        """The numbers of the models that are dispatched."""
        return [k for k, rung in enumerate(self.rungs) if rung.level]

    def held(self, tier: str, device: Device | None = None, round: int = 0) -> int:
        """The number of the largest model that fits: a tier at rest, or one of its devices in a round. The smallest always does where
        a tier is only a number."""
        plan = self.world.plans[tier]
        if plan.fit is not None:
            return self._ladder.at_rest(tier) if device is None else self._ladder.rung(device, round)
        # Not `plan.fits`: in the paper a model fits by its nominal size, in whatever memory is free, without steps.
        free = plan.tier.memory_mean if device is None else self.world.fleet.free_memory(device.id, round)
        most = room(self.world, plan, free) + 1e-9
        return max((k for k, rung in enumerate(self.rungs) if rung.size <= most), default=0)

    def most(self, tier: str) -> int:
        """The number of the largest model that may be dispatched to a tier."""
        held = self.held(tier)
        return max((k for k in self.levels if k <= held), default=self.levels[0])

    def slots(self, round: int, clients: int) -> dict[int, int]:
        """Client → the number of the model that it is given. Every slot draws a level, then one of the reachable devices of the tiers
        that can hold it, none of them twice; where no such device is left it takes the next smaller level."""
        fleet, rng, chosen = self.world.fleet, stream(self.world.seed, "levels", round), dict[int, int]()
        urns = {tier: _Urn(fleet.count_of(tier)) for tier in self.world.plans}
        able = {level: [tier for tier in urns if self.most(tier) >= level] for level in self.levels}
        for _ in range(clients):
            slot = int(rng.integers(len(self.levels)))
            for level in self.levels[slot::-1]:
                found = self._draw({tier: urns[tier] for tier in able[level]}, rng, round)
                if found is not None:
                    chosen[found] = level
                    break
        return chosen

    def _draw(self, urns: Mapping[str, _Urn], rng: np.random.Generator, round: int) -> int | None:
        """A reachable device from any of the urns; all that are left in them are equally likely."""
        fleet = self.world.fleet
        while left := sum(urn.left for urn in urns.values()):
            place = int(rng.integers(left))
            for tier, urn in urns.items():
                if place < urn.left:
                    client = fleet.member(tier, urn.draw(rng))
                    break
                place -= urn.left
            if fleet.available(client, round):
                return client
        return None


class _Urn:
    """Numbers 0 … size − 1, drawn without putting back; only those that were touched exist."""

    def __init__(self, size: int) -> None:
        self.left, self._moved = size, dict[int, int]()

    def draw(self, rng: np.random.Generator) -> int:
        place = int(rng.integers(self.left))
        self.left -= 1
        drawn = self._moved.get(place, place)
        self._moved[place] = self._moved.pop(self.left, self.left)
        return drawn


def room(world: World, plan: Plan, free: float) -> float:
    """The share of the whole model that a tier without a device can hold: what its width has, and what is free (in percent)."""
    return min(plan.cost.params / whole(world) if plan.ratio < 1 else math.inf, free / 100)


def whole(world: World) -> int:
    """The parameters of the whole model."""
    return world.cost(Piece(world.main, world.main.full)).params


def params(piece: Piece) -> int:
    """The parameters of a piece."""
    return sum(math.prod(piece.view.shape(name)) for name in piece.reference.parameters)

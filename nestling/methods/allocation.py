"""Which piece a device trains, for methods that cut the network in their own way.

A method lists its pieces from small to large; a device gets the largest that fits its budget, which is the same for every method:
RAM, flash and time of the tier's device, or the size of the tier's ratio where it names no device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from nestling.devices.fit import exceeded
from nestling.errors import InputError
from nestling.views import Reference, View
from nestling.world import MEMORY_STEPS, Device, Piece, Plan, World


@dataclass
class Ladder:
    """Pieces from small to large. A device takes the largest that fits it, now or at rest (round 0)."""

    world: World
    pieces: list[Piece]
    _known: dict[tuple[str, int], int] = field(default_factory=dict, init=False, repr=False)

    def rung(self, device: Device, round: int = 0) -> int:
        """The number of the device's piece."""
        plan = self.world.plans[device.tier]
        return self._rung(plan, self._free_steps(plan, device, round))

    def of(self, device: Device, round: int = 0) -> Piece:
        """The device's piece."""
        return self.pieces[self.rung(device, round)]

    def at_rest(self, tier: str) -> int:
        """The number of the piece that a tier's devices take when nothing else uses their memory."""
        return self._rung(self.world.plans[tier], MEMORY_STEPS)

    def _free_steps(self, plan: Plan, device: Device, round: int) -> int:
        if not round or not (plan.tier.memory_mean < 100 or any(plan.tier.memory_std)):
            return MEMORY_STEPS
        return max(0, min(MEMORY_STEPS, int(self.world.fleet.free_memory(device.id, round) / 100 * MEMORY_STEPS)))

    def _rung(self, plan: Plan, steps: int) -> int:
        key = (plan.tier.name, steps)
        if key not in self._known:
            fitting = [k for k, piece in enumerate(self.pieces) if self._fits(plan, piece, steps / MEMORY_STEPS)]
            if not fitting and plan.fit is not None and steps == MEMORY_STEPS:
                raise _nothing_fits(plan, self.pieces[0], self.world)
            # A device that is short of memory for a while, or a tier that is only a number, trains the smallest piece.
            self._known[key] = max(fitting, default=0)
        return self._known[key]

    def _fits(self, plan: Plan, piece: Piece, share: float) -> bool:
        cost = self.world.cost(piece)
        if plan.fit is not None:
            return not exceeded(plan.profile, cost, replace(plan.budget, ram_share=min(share, plan.tier.memory_mean / 100)))
        whole = self.world.cost(Piece(self.world.main, self.world.main.full)).params
        return cost.params <= min(plan.cost.params, share * whole if share < 1 else whole)


def ladder(world: World, reference: Reference, views: Iterable[View]) -> Ladder:
    """The ladder of some views of one network, sorted by their size."""
    pieces = [Piece(reference, view) for view in views]
    return Ladder(world, sorted(pieces, key=lambda piece: world.cost(piece).params))


def _nothing_fits(plan: Plan, smallest: Piece, world: World) -> InputError:
    limit = exceeded(plan.profile, world.cost(smallest), plan.budget)
    return InputError(
        f"not even the smallest piece ({world.cost(smallest).params} parameters) trains on {plan.profile.name}: too little {limit}",
        field=f"fleet.tiers ({plan.tier.name})",
        fix="take a larger device, a smaller network, a smaller batch or the plain sgd optimiser (train.momentum = 0)",
    )

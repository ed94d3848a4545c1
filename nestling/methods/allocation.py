"""Which piece a device trains, for methods that cut the network in their own way.

A method lists its pieces from small to large; a device gets the largest that fits its budget, which is the same for every method:
RAM, flash and time of the tier's device, or the size of the tier's ratio where it names no device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from nestling.methods.api import Device, InputError, Piece, Reference, View, World
from nestling.world import Plan


@dataclass
class Ladder:
    """Pieces from small to large. A device takes the largest that fits it, now or at rest (round 0)."""

    world: World
    pieces: list[Piece]
    _known: dict[tuple[str, float], int] = field(default_factory=dict, init=False, repr=False)

    def rung(self, device: Device, round: int = 0) -> int:
        """The number of the device's piece."""
        return self._rung(self.world.plans[device.tier], self.world.free_share(device.id, round))

    def of(self, device: Device, round: int = 0) -> Piece:
        """The device's piece."""
        return self.pieces[self.rung(device, round)]

    def at_rest(self, tier: str) -> int:
        """The number of the piece that a tier's devices take when nothing else uses their memory."""
        return self._rung(self.world.plans[tier], 1.0)

    def _rung(self, plan: Plan, share: float) -> int:
        key = (plan.tier.name, share)
        if key not in self._known:
            fitting = [k for k, piece in enumerate(self.pieces) if plan.fits(self.world.cost(piece), share)]
            if not fitting and plan.fit is not None and share == 1:
                raise _nothing_fits(plan, self.pieces[0], self.world)
            # A device that is short of memory for a while, or a tier that is only a number, trains the smallest piece.
            self._known[key] = max(fitting, default=0)
        return self._known[key]


def ladder(world: World, reference: Reference, views: Iterable[View]) -> Ladder:
    """The ladder of some views of one network, sorted by their size."""
    pieces = [Piece(reference, view) for view in views]
    return Ladder(world, sorted(pieces, key=lambda piece: world.cost(piece).params))


def _nothing_fits(plan: Plan, smallest: Piece, world: World) -> InputError:
    limit = plan.too_little(world.cost(smallest))
    return InputError(
        f"not even the smallest piece ({world.cost(smallest).params} parameters) trains on {plan.profile.name}: too little {limit}",
        field=f"fleet.tiers ({plan.tier.name})",
        fix="take a larger device, a smaller network, a smaller batch or the plain sgd optimiser (train.momentum = 0)",
    )

"""What a device says of its free memory settles what it trains in the next round, whatever the
method."""

from __future__ import annotations

from typing import Any

import pytest

from nestling import FleetConfig, Named, Tier
from nestling.fleet.protocol.wire import Member
from nestling.fleet.server.roster import LiveFleet, Roster
from nestling.methods import METHODS
from nestling.runs.assemble import assemble
from nestling.runs.federation import Federation
from tests.small import NETWORKS, small

# The whole network trains on both devices; the third tier is there so that methods with one model a
# tier have a smaller one.
TIERS = (
    Tier(name="pi", device="raspberry-pi-zero-2w", count=1),
    Tier(name="box", device="gpu-box", count=1),
    Tier(name="part", ratio=0.5, count=2),
)
PLENTY, LITTLE = 2**33, 3_000_000

KEEPS = "its clients keep a network of their own, which is settled at rest"
STAYS = {
    "all-large": "everybody trains the full model, whether or not it fits: an upper bound, not a "
    "way to train",
    "decoupled": "a tier averages its own network with nobody else's, and a smaller one would be "
    "another tier's",
    "fedavg": "everybody trains the part that the smallest tier can",
    "fedet": "every tier has an architecture of its own with the common head; a part of it has "
    "other features",
    "fedzkt": KEEPS,
    "hafl-ghn": "what travels is the hyper-network, which is the same for everybody",
    "hermes": "its clients keep the channels that they have pruned to, with weights of their own",
    **dict.fromkeys(
        (
            "draftfed",
            "fd",
            "fedcma",
            "fedgh",
            "fedhenn",
            "fedhkd",
            "fedkd",
            "fedmd",
            "fedproto",
            "fedtgp",
        ),
        KEEPS,
    ),
    **dict.fromkeys(("fml", "kt-pfl", "lg-fedavg", "local"), KEEPS),
}
"""Methods whose clients train the same whatever is free, and why."""

SHRINKS: list[Any] = [name for name in METHODS if name not in STAYS]
OTHERWISE = [  # set so, they take their pieces from elsewhere
    Named("fedhkd", {"variant": "weights"}),
    Named("fedper", {"cut": "depth"}),
    Named("heteroavg", {"cut": "depth"}),
]


def live(method: Any) -> tuple[Federation, Roster, int]:
    """A federation whose devices are real, as far as it can know, and the client of the smaller
    device."""
    by_depth = isinstance(method, Named) and method.options.get("cut") == "depth"
    network = {"model": NETWORKS["tinyresnet"]} if by_depth else {}
    _, federation = assemble(small(method, fleet=FleetConfig(tiers=TIERS), **network))
    world = federation.world
    roster, pi = Roster(world.fleet), world.fleet.member("pi", 0)
    roster.admit(1, "1" * 32, Member("kitchen", client=pi, free=PLENTY))
    world.use_fleet(LiveFleet(world.fleet, roster), world.split)
    return federation, roster, pi


def trained(federation: Federation, client: int, round: int) -> float:
    """How much a client trains in a round: parameters, or the share of the arithmetic where that is
    what it is told."""
    world, method = federation.world, federation.method
    device = world.device(client, round)
    piece = method.piece(device, round)
    told = method.send(device, piece, round).facts
    # FlexFL: the device cuts the largest model that it holds out of what was sent
    if "fits" in told:
        piece = method.pool.rungs[told["fits"]].piece  # type: ignore[attr-defined]
    # DISTREAL: every batch uses a share of the whole
    return float(told.get("budget", world.cost(piece).params))


def over_time(method: Any) -> list[float]:
    """What the device trains while it has plenty of memory, next to none, and plenty again."""
    federation, roster, pi = live(method)
    found = []
    for round, free in enumerate((PLENTY, LITTLE, PLENTY), 1):
        roster.report("kitchen", free)
        found.append(trained(federation, pi, round))
    return found


@pytest.mark.parametrize("method", [*SHRINKS, *OTHERWISE], ids=lambda m: getattr(m, "name", m))
def test_a_device_short_of_memory_trains_less(method: Any) -> None:
    before, short, after = over_time(method)
    assert short < before == after


@pytest.mark.parametrize("method", STAYS)
def test_what_cannot_shrink_stays(method: str) -> None:
    assert len(set(over_time(method))) == 1

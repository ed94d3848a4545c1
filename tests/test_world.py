"""What a world knows of networks: what follows from a network's form is found out once for all
networks of its kind."""

from __future__ import annotations

from typing import Any

import pytest

from nestling import FleetConfig, Tier
from nestling.devices.fit import exceeded
from nestling.methods.allocation import Ladder
from nestling.models import MODELS, build
from nestling.runs.assemble import assemble, reference_network
from nestling.views import Reference, prefix
from nestling.world import Piece, World, piece_cost
from tests.small import NETWORKS, small

SHAPE = (1, 28, 28)


def _network(name: str, seed: int = 0, classes: int = 10, **options: Any) -> Reference:
    return reference_network(name, options, SHAPE, classes, seed, f"network {seed}")


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_networks_built_alike_cost_what_each_costs_by_itself(ratio: float) -> None:
    for options in ({}, {"channels": [8, 16, 16]}, {"norm": "none"}):
        known = [_network("tinycnn", seed, **options) for seed in range(2)]
        alone = Reference("alone", build("tinycnn", shape=SHAPE, classes=10, **options), SHAPE)
        costs = [piece_cost(Piece(r, prefix(r.axes, ratio))) for r in (*known, alone)]
        assert costs[0] is costs[1] and costs[0] == costs[2]
        assert known[0].axes is known[1].axes is not alone.axes


def test_networks_built_otherwise_share_nothing() -> None:
    first = _network("tinycnn")
    for other in (
        _network("tinycnn", norm="none"),
        _network("tinycnn", classes=7),
        _network("mlp"),
    ):
        costs = [piece_cost(Piece(r, r.full)) for r in (first, other)]
        assert other.axes is not first.axes and costs[0] != costs[1]


def test_a_network_of_the_users_own_is_looked_at_each_time() -> None:
    first, second = (
        reference_network("tests.test_world:growing", {}, SHAPE, 10, 0, "own") for _ in range(2)
    )
    assert (
        piece_cost(Piece(first, first.full)).params < piece_cost(Piece(second, second.full)).params
    )


_BUILT: list[int] = []


def growing(shape: tuple[int, ...], classes: int) -> Any:
    """Another network at every call."""
    _BUILT.append(8 * (1 + len(_BUILT)))
    return MODELS["mlp"].build(shape=shape, classes=classes, hidden=[_BUILT[-1]])


BUSY = Tier(device="stm32f405", count=1, memory_mean=60.0, memory_std=(40.0,))
SIZED = Tier(name="sized", ratio=0.5, count=1, memory_std=(60.0,))
CUT = Tier(name="cut", ratio=0.8, cut="depth", count=1, memory_std=(60.0,))


def _world(*tiers: Tier) -> World:
    settings = {
        "model": NETWORKS["tinyresnet"],
        "fleet": FleetConfig(tiers=tiers),
        "participants": 0,
    }
    return assemble(small("shared-average", **settings))[1].world


@pytest.mark.parametrize("tier", [BUSY, SIZED, CUT], ids=lambda tier: tier.name)
def test_what_fits_a_tier_is_what_its_devices_get(tier: Tier) -> None:
    world = _world(tier)
    plan, rounds = world.plans[tier.name], range(40)
    shares = [world.free_share(0, round) for round in rounds]
    pieces = [world.device(0, round).piece for round in rounds]
    assert shares[0] == 1 and len(set(shares)) > 5 and pieces[0] is plan.piece
    smallest = min(pieces, key=lambda piece: world.cost(piece).params)
    # A ladder of the same pieces, which methods that cut the network in their own way would make,
    # gives the same.
    own = Ladder(world, sorted(pieces, key=lambda piece: world.cost(piece).params))
    for round in rounds:
        assert (
            plan.fits(world.cost(pieces[round]), shares[round])
            or pieces[round].view.key() == smallest.view.key()
        )
        assert own.of(world.device(0, round), round).view.key() == pieces[round].view.key()


def test_a_piece_that_does_not_fit_says_what_there_is_too_little_of() -> None:
    world = _world(BUSY, SIZED)
    whole, plan = piece_cost(Piece(world.main, world.main.full)), world.plans[BUSY.name]
    assert [plan.too_little(whole) for plan in world.plans.values()] == ["ram", "size"]
    # All of the memory would do: it is what is free at rest that there is too little of.
    assert not exceeded(plan.profile, whole, plan.budget)

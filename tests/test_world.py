"""What a world knows of networks: what follows from a network's form is found out once for all networks of its kind."""

from __future__ import annotations

from typing import Any

import pytest

from nestling.assemble import reference_network
from nestling.models import MODELS, build
from nestling.views import Reference, prefix
from nestling.world import Piece, piece_cost

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
    for other in (_network("tinycnn", norm="none"), _network("tinycnn", classes=7), _network("mlp")):
        costs = [piece_cost(Piece(r, r.full)) for r in (first, other)]
        assert other.axes is not first.axes and costs[0] != costs[1]


def test_a_network_of_the_users_own_is_looked_at_each_time() -> None:
    first, second = (reference_network("tests.test_world:growing", {}, SHAPE, 10, 0, "own") for _ in range(2))
    assert piece_cost(Piece(first, first.full)).params < piece_cost(Piece(second, second.full)).params


_BUILT: list[int] = []


def growing(shape: tuple[int, ...], classes: int) -> Any:
    """Another network at every call."""
    _BUILT.append(8 * (1 + len(_BUILT)))
    return MODELS["mlp"].build(shape=shape, classes=classes, hidden=[_BUILT[-1]])

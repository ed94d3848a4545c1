"""The models of a pool: one of every level, slightly smaller ones beside them, and what they begin with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from nestling.methods.api import Piece, State, View, World, pack
from nestling.methods.submodel.apoz import WidthScale
from nestling.methods.submodel.pool import Rung, params, whole
from nestling.seeds import torch_seeded
from nestling.world import Plan


def with_smaller(levels: Sequence[Rung], adapt: float, of_size: Callable[[float], Rung]) -> list[Rung]:
    """M1 ⊂ M2' ⊂ M2 ⊂ M3' ⊂ M3: the levels, and beside each but the first the one that is a little smaller."""
    rungs = list(levels[:1])
    for rung in levels[1:]:
        size = rung.size - adapt
        if adapt and size > rungs[-1].size:
            smaller = replace(of_size(size), level=False)
            if params(rungs[-1].piece) < params(smaller.piece) < params(rung.piece):
                rungs.append(smaller)
        rungs.append(rung)
    return rungs


def fitted(world: World, scale: WidthScale) -> list[Rung]:
    """One model per tier, the largest that it trains."""
    views = [scale.largest(partial(trains, world, plan)) for plan in world.plans.values()]
    pieces = [Piece(world.main, view) for view in {view.key(): view for view in views}.values()]
    return [Rung(params(piece) / whole(world), piece) for piece in sorted(pieces, key=params)]


def trains(world: World, plan: Plan, view: View) -> bool:
    """Whether a tier's devices train a view in the memory that they usually have free."""
    return plan.fits(world.cost(Piece(world.main, view)), plan.tier.memory_mean / 100)


def anew(piece: Piece, seed: int, number: int) -> State:
    """Weights for a network of a piece's sizes as torch's layers draw them, which is how the released networks begin; what a network of
    ours does to its weights beyond that is not repeated."""
    network = copy.deepcopy(piece.reference.network(piece.view))
    place = next(network.parameters()).device
    network.cpu()
    with torch_seeded(seed, "level", number):
        for layer in network.modules():
            if callable(born := getattr(layer, "reset_parameters", None)):
                born()
    return pack({name: tensor.to(place) for name, tensor in network.state_dict().items()})

"""What the low-rank methods share: one dense global network, clients that train factors of it, and who can."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from nestling.methods.allocation import Ladder
from nestling.methods.api import Client, InputError, Message, Phases, Reference, SharedWeights, State, View, made, pack, require
from nestling.models.factorised import factorable, factorise, frobenius_decay, to_factors
from nestling.seeds import stream
from nestling.settings import NotNegative, Whole
from nestling.views import by_index
from nestling.world import Device, Model, Piece, World

FACTORS = "main/factors"
"""The reference whose views are the clients' networks of factors: the components of a layer are an axis like any other."""

Shapes = dict[str, tuple[int, ...]]
"""Layers that may be factorised and the shapes of their weights."""


@dataclass
class Factored(SharedWeights):
    """Base of the methods that keep a dense network on the server and let clients train factors of its layers.

    The state of the server is dense; `factors` is the same network with the chosen layers as two, and a client's part is a view of
    it: some of the components of every layer, the rest whole.
    """

    decay: NotNegative = 1e-4
    dense: Whole = 1
    pointwise: bool = False
    linear: bool = False
    leave_out: bool = True

    factors: Reference = made()
    ladder: Ladder = made()
    able: frozenset[str] = made()
    _factors: tuple[State, State] | None = made()  # the weights as they were when they were decomposed, and what came of it

    form: ClassVar[str]

    def setup(self, world: World) -> None:
        """Makes the network of factors and the ladder of its pieces, and finds the tiers that can train one of them."""
        super().setup(world)
        self._factors = None
        shapes = factorable(world.main.module, dense=self.dense, pointwise=self.pointwise, linear=self.linear)
        fix = "take a network with more convolutions, or set method.dense = 0, method.pointwise or method.linear"
        require(bool(shapes), f"{self.info.title} finds no layer to factorise in this network", "model.name", fix)
        self.factors = Reference(FACTORS, factorise(world.main.module, self.ranks(shapes), self.form), world.main.shape)
        self.factors.to(world.place)
        world.references[FACTORS] = self.factors
        self.ladder = Ladder(world, sorted(self.pieces(shapes), key=lambda piece: world.cost(piece).params))
        self.able = able_tiers(dict.fromkeys(world.plans, self.ladder), self.leave_out)

    def ranks(self, shapes: Shapes) -> dict[str, int]:
        """The number of components of each layer that any client may hold."""
        raise NotImplementedError

    def pieces(self, shapes: Shapes) -> list[Piece]:
        """What clients may train."""
        raise NotImplementedError

    def first(self, counts: dict[str, int]) -> View:
        """The view of the first components of every layer, those with the largest singular values."""
        return by_index(self.factors.axes, {f"{layer}.v": range(count) for layer, count in counts.items()})

    def choose(self, round: int, clients: int) -> list[int]:
        """Reachable devices at random, of the tiers that can train a piece."""
        return choose_among(self.world, self.able, round, clients)

    def piece(self, device: Device, round: int) -> Piece:
        """The largest piece that fits; the smallest for devices of tiers that are left out."""
        return self.ladder.of(device, round) if device.tier in self.able else self.ladder.pieces[0]

    def factor_state(self) -> State:
        """The global weights as factors; decomposed once, until they change."""
        if self._factors is None or self._factors[0] is not self.weights:
            ranks = {layer: self.factors.axes.shapes[f"{layer}.v.weight"][0] for layer in layers_of(self.factors)}
            self._factors = (self.weights, pack(to_factors(self.weights, ranks, self.form)))
        return self._factors[1]

    def weights_for(self, piece: Piece) -> State:
        """A piece of the global weights, or of their factors."""
        return piece.view.extract(self.weights if piece.reference is self.world.main else self.factor_state())

    def model_for(self, device: Device) -> Model:
        """The device's piece at rest, of the global weights or of their factors."""
        piece = self.piece(device, 0)
        return Model(piece.reference, piece.view, self.weights_for(piece))

    def phases(self, client: Client, received: Message) -> Phases:
        """One training phase; on factors the decay of their products replaces weight decay."""
        phase = client.train.phase(client.round)
        if client.reference.name != FACTORS:
            return [phase]
        decayed = partial(frobenius_decay, layers=layers_of(client.reference), weight=self.decay, plain=phase.optim.weight_decay)
        return [replace(phase, rule=decayed, optim=replace(phase.optim, weight_decay=0.0))]


def key_of(piece: Piece) -> tuple[str, bytes]:
    """Equal for equal pieces of one network."""
    return piece.reference.name, piece.view.key()


def layers_of(reference: Reference) -> tuple[str, ...]:
    """The layers that are a pair of factors in a network of factors."""
    names = reference.axes.shapes
    found = [name.removesuffix(".v.weight") for name in names if name.endswith(".v.weight")]
    return tuple(layer for layer in found if f"{layer}.u.weight" in names)


def able_tiers(ladders: Mapping[str, Ladder], leave_out: bool) -> frozenset[str]:
    """The tiers whose devices can train the smallest piece of their ladder. The others are left out, or an error where that is not
    wanted or nobody remains."""
    able, refused = set(), None
    for tier, ladder in ladders.items():
        try:
            ladder.at_rest(tier)
            able.add(tier)
        except InputError as error:  # noqa: PERF203 (each tier may fail by itself)
            refused = error
    if refused is not None and not (leave_out and able):
        raise refused
    return frozenset(able)


def choose_among(world: World, able: frozenset[str], round: int, clients: int) -> list[int]:
    """Reachable devices at random, of some tiers only."""
    fleet = world.fleet
    possible = sum(fleet.count_of(tier) for tier in able)
    if possible == len(fleet):
        return fleet.choose(round, clients)
    # So many that, except in a rare round, enough remain once the others are left out.
    asked = min(len(fleet), 2 * math.ceil(clients * len(fleet) / possible) + 8)
    found = [client for client in fleet.choose(round, asked) if fleet.tier_of(client).name in able]
    if len(found) <= clients:
        return found
    picked = stream(world.seed, "able", round).choice(len(found), clients, replace=False)
    return [found[k] for k in sorted(picked)]

"""Decoupled: one FedAvg for every level."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nestling.devices.fit import exceeded
from nestling.methods.api import Contribution, Device, Info, Method, Model, Piece, Replies, Reply, State, World, kept, made
from nestling.seeds import stream
from nestling.world import Plan


@dataclass
class Decoupled(Method):
    """Decoupled (the baseline of FlexFL's tables: Chen et al., "FlexFL", 2024).

    Idea: every level, which is what a tier's devices can hold, has a FedAvg of its own among the devices that can hold it; levels never
    exchange anything.
    Loss: cross-entropy. Travels: the level's network down and up. Merge: mean weighted by n_k, level by level. The model of the
    largest level stands for the global one.
    Differs from the released code: the clients of a round are shared out between the levels as evenly as they can be, each client for
    one; the released code trains a full set of clients for every level, three times the work of the methods it is compared with.

    holders: who trains a level: all devices that are "able" to hold it, or those of its "own" tier only.
    """

    holders: Literal["able", "own"] = "able"

    world: World = made()
    weights: dict[str, State] = kept()
    level: dict[str, str] = made()
    _plans: dict[str, Plan] = made()  # the levels' plans by name, the largest first
    _levels: dict[tuple[str, bytes], str] = made()  # their names, by what is held
    _able: dict[str, list[str]] = made()
    _given: tuple[int, dict[int, str]] = made()

    info = Info(
        "baseline",
        "any: levels never meet",
        "official code read",
        "A",
        own_networks=True,
        paper="Chen et al. (FlexFL), 2024",
        any_task=True,
    )

    def setup(self, world: World) -> None:
        """Makes a level of all tiers that hold the same, with initial weights of its own, and finds out who can train which."""
        self.world, self._levels, self._given = world, {}, (0, {})
        # Tiers that hold the same are one level, named after the first of them.
        self.level = {tier: self._levels.setdefault(_what(plan.piece), tier) for tier, plan in world.plans.items()}
        levels = {name: world.plans[name] for name in self._levels.values()}
        self._plans = dict(sorted(levels.items(), key=lambda item: -item[1].cost.params))
        self._able = {tier: [name for name in self._plans if self._can(tier, name)] for tier in world.plans}
        self.weights = {name: plan.piece.view.extract(plan.piece.reference.initial) for name, plan in self._plans.items()}

    def _can(self, tier: str, level: str) -> bool:
        """Whether a tier's devices can train a level."""
        own, other = self.world.plans[tier], self.world.plans[level]
        if self.level[tier] == level or self.holders == "own":
            return self.level[tier] == level
        if own.piece.reference is other.piece.reference:
            return own.piece.view.contains(other.piece.view)
        # Not `own.fits`: a network of a tier's own has all of its device's memory, whatever the tier has free, as its plan does.
        return own.fit is not None and not exceeded(own.profile, other.cost, own.budget)

    def choose(self, round: int, clients: int) -> list[int]:
        """Reachable devices at random, to whom the levels are then shared out."""
        chosen = super().choose(round, clients)
        self._given = (round, self._shared_out(chosen, round))
        return chosen

    def _shared_out(self, chosen: Sequence[int], round: int) -> dict[int, str]:
        """A level for every client: from the largest level down, each gets its share of those who are left and able."""
        waiting = stream(self.world.seed, "level", round).permutation(sorted(chosen)).tolist()
        able = {client: self._able[self.world.fleet.tier_of(client).name] for client in waiting}
        given: dict[int, str] = {}
        for number, level in enumerate(self._plans):
            share = -(-len(waiting) // (len(self._plans) - number))
            # Clients that can hold nothing smaller have no other level.
            last = [c for c in waiting if able[c][-1] == level]
            others = [c for c in waiting if level in able[c] and c not in last]
            taken = [*last, *others[: max(share - len(last), 0)]]
            given.update(dict.fromkeys(taken, level))
            waiting = [c for c in waiting if c not in given]
        return given

    def piece(self, device: Device, round: int) -> Piece:
        """The piece of the level that the device was given this round, or else of its own tier's level."""
        given = self._given[1] if self._given[0] == round else {}
        return self.world.plans[given.get(device.id, self.level[device.tier])].piece

    def weights_for(self, piece: Piece) -> State:
        """The weights of the piece's level."""
        return self.weights[self._level_of(piece)]

    def _level_of(self, piece: Piece) -> str:
        return self._levels[_what(piece)]

    def merge(self, replies: Replies, round: int) -> None:
        """The mean by samples among the replies of each level; a level without replies stays as it is."""
        by_level: dict[str, list[Reply]] = defaultdict(list)
        for reply in replies:
            by_level[self._level_of(reply.piece)].append(reply)
        for level, own in by_level.items():
            piece = self._plans[level].piece
            whole = piece.view.scatter(piece.reference.initial, self.weights[level])
            given = [Contribution(piece.view, r.message["weights"], float(r.samples), client=r.device.id) for r in own]
            merged = self.mean(whole, given)
            self.weights[level] = piece.view.extract(merged)

    def model_for(self, device: Device) -> Model:
        """The model of the level that the device's tier belongs to."""
        return self._model(self.level[device.tier])

    def global_model(self) -> Model:
        """The model of the largest level."""
        return self._model(next(iter(self._plans)))

    def _model(self, level: str) -> Model:
        piece = self._plans[level].piece
        return Model(piece.reference, piece.view, self.weights[level])


def _what(piece: Piece) -> tuple[str, bytes]:
    return piece.reference.name, piece.view.key()

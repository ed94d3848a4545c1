"""What a method may know of the federation: the networks, the fleet, and what each device can
train.

`plan_tiers` brings devices and networks together: for every tier the largest piece that fits, with
the numbers that prove it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from nestling.data.split import Split
from nestling.devices import (
    Budget,
    Cost,
    Fit,
    Fleet,
    Profile,
    Tier,
    Timing,
    cost_of,
    fit,
    round_time,
)
from nestling.devices.fit import RATIOS, exceeded
from nestling.errors import InputError
from nestling.store import ClientStore
from nestling.tasks import Classification, Task
from nestling.training.phase import Train
from nestling.training.recorder import Recorder
from nestling.views import Reference, State, View, prefix, to_spec
from nestling.views.cutting import cutting
from nestling.views.depth import depth_views
from nestling.where import CPU, Where

MEMORY_STEPS = 32
"""Free memory is rounded down to this many steps, so that a fleet whose memory changes meets few
different pieces."""


@dataclass(frozen=True)
class Piece:
    """A part of a network: which reference, which view of it."""

    reference: Reference
    view: View

    def spec(self) -> dict[str, object]:
        """The view as plain data, the same object every time."""
        return self._spec

    @cached_property
    def _spec(self) -> dict[str, object]:
        return to_spec(self.view)


@dataclass(frozen=True)
class Model:
    """A piece with weights."""

    reference: Reference
    view: View
    state: State


@dataclass(frozen=True)
class Plan:
    """What a tier trains and why it fits. `ratio` is the tier's or that of the width that fits (1
    for a network of its own)."""

    tier: Tier
    profile: Profile
    piece: Piece
    ratio: float
    cost: Cost
    fit: Fit | None
    budget: Budget

    def fits(self, cost: Cost, share: float = 1.0) -> bool:
        """Whether something of this cost trains on the tier's devices while a share of their memory
        is free."""
        return not self.too_little(cost, share)

    def too_little(self, cost: Cost, share: float = 1.0) -> str:
        """What there is too little of for something of this cost, or nothing where it fits: "ram",
        "flash" or "time" of the device, or, where the tier is only a number, "size": its own, and
        that share of the whole network's."""
        if self.fit is not None:
            return exceeded(self.profile, cost, while_free(self.tier, self.budget, share))
        room = min(self.cost.params, share * ratio_cost(self.piece.reference, 1.0).params)
        return "" if cost.params <= room else "size"


@dataclass(frozen=True)
class Device:
    """One client as the server knows it."""

    id: int
    tier: str
    piece: Piece
    samples: int


@dataclass
class World:
    """The federation, as methods see it."""

    references: dict[str, Reference]
    main: Reference
    fleet: Fleet
    split: Split
    plans: dict[str, Plan]
    classes: int  # outputs of a network: classes, or what else the task has
    train: Train
    seed: int
    class_names: tuple[str, ...] = ()  # of outputs, where the task gives them names
    kind_names: tuple[str, ...] = ()  # of what the split counts rows by
    task: Task = field(default_factory=lambda: Classification(2))
    public: Tensor | None = None
    # for methods whose auxiliary data is labelled, and nobody else
    public_labels: Tensor | None = None
    rounds: int = 0  # how many the run is to have, for methods that change something on the way
    store: ClientStore = field(default_factory=ClientStore)
    where: Where = CPU
    fingerprint: dict[str, Any] = field(default_factory=dict)  # of data, split and networks
    _recorder: Recorder | None = field(default=None, init=False, repr=False)
    _pieces: dict[tuple[str, float], Piece] = field(default_factory=dict, init=False, repr=False)
    _devices: dict[int, Device] = field(default_factory=dict, init=False, repr=False)
    _timings: dict[Hashable, Timing] = field(default_factory=dict, init=False, repr=False)

    def varies(self, plan: Plan) -> bool:
        """Whether what fits a tier's devices changes from round to round."""
        return self.fleet.live or plan.tier.memory_mean < 100 or any(plan.tier.memory_std)

    def free_share(self, client: int, round: int) -> float:
        """The share of a client's memory that is free in a round, drawn or as its device says; all
        of it at rest (round 0). Whoever asks what a device can train now asks here."""
        if not round or not self.varies(self.plans[self.fleet.tier_of(client).name]):
            return 1.0
        steps = math.floor(self.fleet.free_memory(client, round) / 100 * MEMORY_STEPS)
        return max(0, min(MEMORY_STEPS, steps)) / MEMORY_STEPS

    def device(self, client: int, round: int = 0) -> Device:
        """A client in a round; its piece shrinks with its free memory. Round 0 is its piece at
        rest."""
        known = self._devices.get(client)
        if known is not None:
            return known
        plan = self.plans[self.fleet.tier_of(client).name]
        piece = self._piece_in(plan, self.free_share(client, round))
        device = Device(client, plan.tier.name, piece, self.split.size(client))
        # A real device may come back with other rows.
        if not self.varies(plan) and not self.fleet.live and len(self._devices) < 2**16:
            self._devices[client] = device
        return device

    def _piece_in(self, plan: Plan, share: float) -> Piece:
        if share == 1:
            return plan.piece
        key = (plan.tier.name, share)
        if key not in self._pieces:
            self._pieces[key] = _largest_in(plan, share)
        return self._pieces[key]

    def use_fleet(self, fleet: Fleet, split: Split) -> None:
        """Takes another fleet of the same tiers, and another division of rows: those of real
        devices."""
        self.fleet, self.split = fleet, split
        self._devices.clear()

    @property
    def place(self) -> torch.device:
        """The device that weights and data live on; what a method makes itself must be there
        too."""
        return self.where.device

    @property
    def recorder(self) -> Recorder:
        """Who does the server's own training."""
        if self._recorder is None:
            self._recorder = Recorder(self.where)
        return self._recorder

    def add_network(self, name: str, module: nn.Module) -> Reference:
        """A network that a method has made itself, for clients to train."""
        found = Reference(name, module, self.main.shape)
        _ = found.axes  # traced where the network was made
        found.to(self.place)
        self.references[name] = found
        return found

    def cost(self, piece: Piece) -> Cost:
        """What a piece costs."""
        return piece_cost(piece)

    def timing(
        self, tier: str, piece: Piece, samples: int, down: int, up: int, slowdown: float
    ) -> Timing:
        """What a round takes on a tier's device that trains on so many samples and moves so many
        bytes, remembered."""
        key = (tier, piece.reference.name, piece.view.form(), samples, down, up, slowdown)
        if key not in self._timings:
            if len(self._timings) >= 4096:
                self._timings.clear()
            plan = self.plans[tier]
            budget = Budget(
                batch=self.train.batch, samples=samples, epochs=1, optimizer=plan.budget.optimizer
            )
            self._timings[key] = round_time(
                plan.profile, self.cost(piece), budget, down, up, slowdown
            )
        return self._timings[key]

    def refuse_own_networks(self, method: str) -> None:
        """For methods that merge weights: every tier must hold a view of the one network."""
        for number, plan in enumerate(self.plans.values()):
            if plan.piece.reference is not self.main:
                raise InputError(
                    f"{method} merges views of one network, and tier {plan.tier.name!r} brings "
                    f"its own ({plan.tier.model})",
                    field=f"fleet.tiers[{number}].model",
                    fix="leave it out, or use a method that fuses unlike networks, e.g. "
                    "shared-distill",
                )

    @cached_property
    def smallest(self) -> Piece:
        """The largest piece of the main network that every tier can train: the common part of all
        their views."""
        views = [p.piece.view for p in self.plans.values() if p.piece.reference is self.main]
        keep = views[0].keep.copy()
        for view in views[1:]:
            keep &= view.keep
        dropped = frozenset().union(*(v.dropped for v in views))
        return Piece(self.main, View(self.main.axes, keep, dropped))


def plan_tiers(
    fleet: Fleet, references: dict[str, Reference], main: Reference, budget: Budget
) -> dict[str, Plan]:
    """The plan of every tier of the fleet; a tier that nothing fits is an error."""
    plans = {}
    for number, (tier, profile) in enumerate(zip(fleet.tiers, fleet.profiles, strict=True)):
        try:
            plans[tier.name] = _plan(tier, profile, references, main, budget_of(tier, budget))
        except InputError as error:  # noqa: PERF203 (the error names its own tier)
            raise InputError(
                error.message, field=f"fleet.tiers[{number}] ({tier.name})", fix=error.fix
            ) from None
    return plans


def budget_of(tier: Tier, budget: Budget) -> Budget:
    """The budget of a tier: what a method keeps beside the weights is counted where a board really
    has to hold it."""
    return budget if tier.board else replace(budget, blocks=())


def while_free(tier: Tier, budget: Budget, share: float = 1.0) -> Budget:
    """A budget while a share of the device's memory is free; more than the tier has at rest never
    is."""
    return replace(budget, ram_share=min(1.0, share, tier.memory_mean / 100))


def _plan(
    tier: Tier, profile: Profile, references: dict[str, Reference], main: Reference, budget: Budget
) -> Plan:
    if tier.model:
        return _plan_own_network(tier, profile, references[tier.name], budget)
    if tier.ratio:
        _require_cuttable(tier, main)
        piece = (
            _depth_piece(main, tier.ratio)
            if tier.cut == "depth"
            else Piece(main, ratio_view(main, tier.ratio))
        )
        return Plan(tier, profile, piece, tier.ratio, piece_cost(piece), None, budget)
    found = fit(profile, lambda ratio: ratio_cost(main, ratio), while_free(tier, budget))
    _require_fit(found, main.name)
    piece = Piece(main, ratio_view(main, found.ratio))
    return Plan(tier, profile, piece, found.ratio, piece_cost(piece), found, budget)


def _require_cuttable(tier: Tier, main: Reference) -> None:
    """A share of a network can only be given where the network can be cut."""
    if tier.ratio < 1 and tier.cut != "depth" and not main.axes.names:
        raise InputError(
            f"the network has no axis that could be cut: {'; '.join(cutting(main).lines())}",
            field=f"fleet.tiers ({tier.name}): ratio",
            fix="give ratio = 1, or name a smaller network for this tier (model = ...)",
        )


def _plan_own_network(tier: Tier, profile: Profile, reference: Reference, budget: Budget) -> Plan:
    piece = Piece(reference, reference.full)
    found = None
    if tier.device:
        found = fit(profile, lambda _: piece_cost(piece), budget, ratios=(1.0,))
        _require_fit(found, tier.model)
    return Plan(tier, profile, piece, 1.0, piece_cost(piece), found, budget)


def _require_fit(found: Fit, network: str) -> None:
    if not found.ratio:
        raise InputError(
            f"no piece of {network} trains on {found.device}: {'; '.join(found.reasons)}",
            fix="take a larger device, a smaller network, a smaller batch or the plain sgd "
            "optimiser (train.momentum = 0)",
        )


def _largest_in(plan: Plan, share: float) -> Piece:
    """The largest piece of a tier's network that fits when only a share of the memory is free. The
    smallest is always trainable, and a network of the tier's own stays whole."""
    main = plan.piece.reference
    if plan.tier.model:
        return plan.piece
    if plan.tier.cut == "depth":
        pieces = _depth_pieces(main)
        return pieces[
            max(
                (k for k, piece in enumerate(pieces) if plan.fits(piece_cost(piece), share)),
                default=0,
            )
        ]
    ratios = [r for r in RATIOS if r <= plan.ratio] or [plan.ratio]
    # What a width costs rises with it, so that few of them have to be looked at.
    fitting = bisect_left(ratios, True, key=lambda r: not plan.fits(ratio_cost(main, r), share))
    return Piece(main, ratio_view(main, ratios[max(fitting - 1, 0)]))


@lru_cache(maxsize=256)
def _depth_piece(main: Reference, ratio: float) -> Piece:
    """The deepest piece with at most a share of the network's parameters: what settles the size of
    a tier that is cut in depth."""
    pieces, allowed = _depth_pieces(main), ratio * ratio_cost(main, 1.0).params
    sizes = [piece_cost(piece).params for piece in pieces]
    fitting = [number for number, size in enumerate(sizes) if size <= allowed]
    if not fitting:
        message = (
            f"the shallowest part of {main.name} has {min(sizes)} of {max(sizes)} "
            f"parameters, more than {ratio:g} of them"
        )
        raise InputError(message, fix="give a larger ratio, or take a network of more blocks")
    return pieces[max(fitting)]


@lru_cache(maxsize=64)
def _depth_pieces(main: Reference) -> list[Piece]:
    return [Piece(main, view) for view in depth_views(main)]


@lru_cache(maxsize=256)
def ratio_view(reference: Reference, ratio: float) -> View:
    """The prefix view of a width ratio."""
    return reference.full if ratio == 1 else prefix(reference.axes, ratio)


@lru_cache(maxsize=256)
def ratio_cost(reference: Reference, ratio: float) -> Cost:
    """What the piece of a width ratio costs."""
    return piece_cost(Piece(reference, ratio_view(reference, ratio)))


_COSTS: WeakKeyDictionary[Reference, dict[bytes, Cost]] = WeakKeyDictionary()


@lru_cache(maxsize=64)
def _costs_of_kind(_kind: Hashable) -> dict[bytes, Cost]:
    return {}


def piece_cost(piece: Piece) -> Cost:
    """What a piece costs in parameters, arithmetic and memory; remembered by its form, since which
    channels it has does not matter."""
    kind, form = piece.reference.kind, piece.view.form()
    known = _COSTS.setdefault(piece.reference, {}) if kind is None else _costs_of_kind(kind)
    if form not in known:
        known[form] = cost_of(piece.reference.network(piece.view), piece.reference.shape)
    return known[form]

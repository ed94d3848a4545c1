"""FlexFL: widths by how idle each part is, and devices that cut further when memory is short."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch

from nestling.methods.api import Client, Device, Info, Message, Model, Phase, Piece, SharedWeights, State, World, require
from nestling.methods.kept import kept, made
from nestling.methods.part import WEIGHTS, Fact, Part, Tensors
from nestling.methods.proxy import PROXY_FIRST
from nestling.methods.submodel.apoz import WidthScale, measure_on_proxy, units_of
from nestling.methods.submodel.inner_teachers import taught
from nestling.methods.submodel.levels import anew, fitted, with_smaller
from nestling.methods.submodel.pool import ModelPool, Rung, params, whole
from nestling.settings import Compat, Count, NonZeroShare, NotNegative, Positive, ShareBelowOne, UnitShare
from nestling.views.nested import within
from nestling.views.view import take

LEVELS = (0.25, 0.5, 1.0)
_DISPATCHED = replace(
    WEIGHTS,
    down=lambda method, device, piece, round: method.dispatched(device, piece, round),
    like=lambda _method, piece, *_: piece.reference.network(piece.view).state_dict(),
)
_IDLE = Part("apoz", lambda method, *_: method.idle)
_TRAINED = Fact(
    "trained",
    lambda _method, _client, received: received.facts["fits"],
    lambda _method, sent, said: type(said) is int and 0 <= said < len(sent.facts["pool"]),
    "the model trained, one up to the dispatched,",
)


@dataclass
class FlexFL(SharedWeights):
    """FlexFL (Chen et al., "FlexFL: Heterogeneous Federated Learning via APoZ-Guided Flexible Pruning in Uncertain Scenarios", 2024).

    Idea: on a labelled proxy set the server finds out which units of the network are often zero, and keeps less of those: a nested
    pool of models, one for each level and a little smaller one beside it. A device trains the largest model up to the dispatched one
    that its memory holds just now, and larger models learn from the smaller ones inside them.
    Loss: CE + (λ/C)·mean over the smaller models j of τ²·KL(softmax(o_j/τ) ‖ softmax(o_i/τ)), teachers without gradient; λ is in the
    published convention (mean over batch and classes). Travels: the dispatched model and the APoZ vector down, the trained model up.
    Merge: mean weighted by n_k over the views that hold an entry; the others keep their value.
    Selection: every slot draws a level, then a device whose tier can hold it.
    Differs from the released code: the proxy is the server's share of the training data (the code takes the test set), all models
    are slices of one initial network, teachers always run in evaluation mode. `compat = "code"` takes the code's search for sizes
    (which ends above the nominal), lets the little smaller models teach, and draws all anew for round 1, whose merge joins them.

    levels:      sizes of the models as shares of the whole; empty: one per tier, the largest that it trains (paper: 0.25, 0.5, 1,
                 for tiers of ratio 1 that hold `memory_mean` of the model; a smaller ratio limits them to its width's size too).
    adapt:       how much smaller, as a share of the whole, the model beside a level is; 0 leaves those models out.
    ratios:      "apoz", or "uniform" for one width everywhere.
    units:       "stages" (blocks, as published) or "axes": what has a width of its own.
    apoz:        the shares of zeros, one per unit, instead of measuring them; no proxy is needed then.
    pretrain:    epochs on the proxy before zeros are counted.
    proxy:       the share of the public rows that is used as the proxy.
    tolerance:   by how much, as a share of the whole, a model may exceed its level.
    distil:      whether larger models learn from smaller ones.
    lam:         λ.
    temperature: τ.
    selection:   "levels", or "fleet": reachable devices at random, each with the largest level that it can hold.
    compat:      "paper" or "code".
    """

    levels: tuple[NonZeroShare, ...] = ()
    adapt: ShareBelowOne = 0.1
    ratios: Literal["apoz", "uniform"] = "apoz"
    units: Literal["stages", "axes"] = "stages"
    apoz: tuple[UnitShare, ...] = ()
    pretrain: Count = 100
    proxy: NonZeroShare = 1.0
    tolerance: NotNegative = 0.0
    distil: bool = True
    lam: NotNegative = 10.0
    temperature: Positive = 3.0
    selection: Literal["levels", "fleet"] = "levels"
    compat: Compat = "paper"
    idle: State = kept()  # the APoZ vector, as it travels
    scale: WidthScale = made()
    pool: ModelPool = made()
    _dispatched: tuple[int, dict[int, int]] = made()
    info = Info("width", "width: a ratio a unit; cut again on the device", "official code read", "A", PROXY_FIRST, any_task=True)
    parts = (_DISPATCHED, _IDLE)
    said = (_TRAINED,)

    def __post_init__(self) -> None:
        """Refuses levels that do not rise."""
        super().__post_init__()
        require(all(a < b for a, b in pairwise(self.levels)), "sizes from small to large", "method.levels")

    # -- on the server ---------------------------------------------------------------------------------------------------------

    @property
    def as_set(self) -> Info:
        """Without auxiliary data where the zeros are given or not needed."""
        return replace(self.info, auxiliary="none") if self.apoz or self.ratios == "uniform" else self.info

    def setup(self, world: World) -> None:
        """Makes the pool of models from how idle the units are; with uniform ratios nothing is measured."""
        super().setup(world)
        units = units_of(world.main.axes, self.units)
        self._use(units, () if self.ratios == "uniform" else self._zeros(units))

    def _use(self, units: tuple[str, ...], apoz: Sequence[float]) -> None:
        vector = torch.tensor(apoz, dtype=torch.float32, device=self.world.place)  # single precision, as devices know it
        self.idle, self._dispatched = {"apoz": vector} if apoz else {}, (0, {})
        self.scale = WidthScale(self.world.main, units, tuple(vector.tolist()))
        asked = self.levels or (LEVELS if self.compat == "code" else ())
        levels = [self._rung(size) for size in asked] or fitted(self.world, self.scale)
        self.pool = ModelPool(self.world, with_smaller(levels, self.adapt, self._rung))

    def _zeros(self, units: Sequence[str]) -> tuple[float, ...]:
        """How idle each unit is: as preset, or as measured."""
        names = tuple(dict.fromkeys(units))
        fix = f"one share for each of: {', '.join(names)}"
        require(len(self.apoz) in (0, len(names)), f"{len(self.apoz)} shares for {len(names)} units", "method.apoz", fix)
        return self.apoz or measure_on_proxy(self.world, units, self.info.title, self.proxy, self.pretrain)

    def _rung(self, size: float) -> Rung:
        """The model of a size."""
        main, limit = self.world.main, (size + self.tolerance) * whole(self.world)
        code = self.compat == "code"
        view = self.scale.first(size) if code else self.scale.largest(lambda v: params(Piece(main, v)) <= limit)
        return Rung(size, Piece(main, view))

    def choose(self, round: int, clients: int) -> list[int]:
        """The devices that the pool's slots draw, each with its model; for the whole fleet, reachable ones at random."""
        if self.selection == "fleet":
            return super().choose(round, clients)
        self._dispatched = (round, self.pool.slots(round, clients))
        return sorted(self._dispatched[1])

    def piece(self, device: Device, round: int) -> Piece:
        """The model that is dispatched to the device."""
        return self.pool.rungs[self._number(device, round)].piece

    def _number(self, device: Device, round: int) -> int:
        """The model that the device's slot drew; without a slot, the largest that may be dispatched to its tier."""
        drawn = self._dispatched[1] if self._dispatched[0] == round else {}
        return drawn[device.id] if device.id in drawn else self.pool.most(device.tier)

    def alike(self, device: Device, piece: Piece) -> None:
        """None: what a device is told depends on its memory."""

    def dispatched(self, device: Device, piece: Piece, round: int) -> Tensors:
        """The weights of the model that a device gets; in the released code's first round all but the whole are drawn anew."""
        number = self._number(device, round)
        if round > 1 or self.compat == "paper" or number + 1 == len(self.pool.rungs):
            return self.weights_once(piece, round)
        return self.once(round, number, lambda: anew(self.pool.rungs[number].piece, self.world.seed, number))

    def facts(self, device: Device, piece: Piece, round: int) -> dict[str, Any]:
        """The pool up to the dispatched model, and which of it fits: a device would read off its memory what the fleet knows."""
        number = self._number(device, round)
        rungs = self.pool.rungs[: number + 1]
        return {
            "pool": [rung.piece.spec() for rung in rungs],
            "levels": [rung.level for rung in rungs],
            "fits": min(number, self.pool.held(device.tier, device, round)),
        }

    def cut_to(self, piece: Piece, sent: Message, facts: Mapping[str, Any]) -> Piece:
        """The model of the pool that the client says it has trained."""
        return self.pool.rungs[facts["trained"]].piece

    def global_model(self) -> Model:
        """The largest model of the pool."""
        view = self.pool.rungs[-1].piece.view
        return Model(self.world.main, view, view.extract(self.weights))

    def restore(self, state: Mapping[str, State]) -> None:
        """Makes the pool again where the checkpoint has another APoZ vector."""
        super().restore(state)
        apoz = self.idle["apoz"].tolist() if self.idle else []
        if tuple(apoz) != self.scale.apoz:
            self._use(self.scale.units, apoz)

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def start(self, client: Client, received: Message) -> Tensors:
        """The largest model up to the dispatched one that the device's memory holds now, cut out of what came."""
        own, sent = client.reference.view(received.facts["pool"][received.facts["fits"]]), client.view
        if own.key() == sent.key():
            return received["weights"]
        client.view = own
        return {name: take(received["weights"][name], within(own, sent, name)) for name in own.names}

    def phases(self, client: Client, received: Message) -> Iterable[Phase]:
        """One training phase, taught by the smaller models inside; plain where there are none or nothing is distilled."""
        facts = received.facts
        smaller = zip(facts["pool"][: facts["fits"]], facts["levels"], strict=False)
        teachers = [client.reference.view(spec) for spec, level in smaller if level or self.compat == "code"]
        if not self.distil or not self.lam or not teachers:
            return super().phases(client, received)
        return [taught(client, teachers, self.lam, self.temperature)]

"""FlexFL: widths by how idle each part is, and devices that cut further when memory is short."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.errors import InputError
from nestling.methods.api import (
    Client,
    Device,
    Info,
    Message,
    Model,
    Phase,
    Piece,
    Reference,
    Reply,
    SharedWeights,
    State,
    View,
    World,
)
from nestling.methods.kept import made
from nestling.methods.proxy import labelled_proxy
from nestling.methods.submodel.apoz import UNITS, Scale, measure, units_of
from nestling.methods.submodel.pool import Pool, Rung, params, trains, whole
from nestling.schema import require
from nestling.seeds import torch_seeded
from nestling.training.objectives import Batch, Given, Net, distillation
from nestling.training.optimisers import Optim
from nestling.training.trainer import train
from nestling.views.flat import pack
from nestling.views.nested import forward, prepare, within
from nestling.views.view import take

LEVELS = (0.25, 0.5, 1.0)
PRETRAIN = Phase(optim=Optim("adam", 1e-3), batch=50)


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
    are slices of one initial network, teachers run in evaluation mode in every round. `compat = "code"` takes the code's search for
    sizes (which ends above the nominal ones), counts the little smaller models among the teachers, and draws every model anew for the
    first round; the first merge makes one network of them.

    levels:      sizes of the models as shares of the whole; empty: one a tier, the largest that the tier can train (paper: 0.25,
                 0.5, 1, for tiers of ratio 1 of which `memory_mean` says how much of the model they hold; a smaller ratio is a
                 width, whose parameters they are then held to as well).
    adapt:       how much smaller, as a share of the whole, the model beside a level is; 0 leaves those models out.
    ratios:      "apoz", or "uniform" for one width everywhere.
    units:       "stages" (blocks, as published) or "axes": what has a width of its own.
    apoz:        the shares of zeros, one a unit, instead of measuring them; no proxy is needed then.
    pretrain:    epochs on the proxy before zeros are counted.
    proxy:       the share of the public rows that is used as the proxy.
    tolerance:   by how much, as a share of the whole, a model may exceed its level.
    distil:      whether larger models learn from smaller ones.
    lam:         λ.
    temperature: τ.
    selection:   "levels", or "fleet": reachable devices at random, each with the largest level that it can hold.
    compat:      "paper" or "code".
    """

    levels: tuple[float, ...] = ()
    adapt: float = 0.1
    ratios: str = "apoz"
    units: str = "stages"
    apoz: tuple[float, ...] = ()
    pretrain: int = 100
    proxy: float = 1.0
    tolerance: float = 0.0
    distil: bool = True
    lam: float = 10.0
    temperature: float = 3.0
    selection: str = "levels"
    compat: str = "paper"

    scale: Scale = made()
    pool: Pool = made()
    _dispatched: tuple[int, dict[int, int]] = field(init=False, repr=False, compare=False, default=(0, {}))
    _first: dict[int, State] = field(init=False, repr=False, compare=False, default_factory=dict)

    info = Info(
        "width",
        "width: nested, a ratio for every unit; cut further on the device",
        "official code read",
        "A",
        auxiliary="server proxy (labelled), before the first round",
    )

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.levels, self.levels[1:], strict=False))
        require(rising and all(0 < q <= 1 for q in self.levels), "sizes in (0, 1], from small to large", "method.levels")
        require(0 <= self.adapt < 1, "must be in [0, 1) (0 leaves the adaptive models out)", "method.adapt")
        require(all(0 <= a <= 1 for a in self.apoz), "shares of zeros must be in [0, 1]", "method.apoz")
        require(self.pretrain >= 1, "at least one epoch", "method.pretrain")
        require(0 < self.proxy <= 1, "must be in (0, 1]", "method.proxy")
        require(self.tolerance >= 0, "must not be negative", "method.tolerance")
        require(self.lam >= 0, "must not be negative", "method.lam")
        require(self.temperature > 0, "must be above 0", "method.temperature")
        for name, allowed in (
            ("ratios", ("apoz", "uniform")),
            ("units", UNITS),
            ("selection", ("levels", "fleet")),
            ("compat", ("paper", "code")),
        ):
            value = getattr(self, name)
            require(value in allowed, f"unknown value {value!r}", f"method.{name}", f"allowed: {', '.join(allowed)}")

    # -- on the server ---------------------------------------------------------------------------------------------------------

    @property
    def as_set(self) -> Info:
        return replace(self.info, auxiliary="none") if self.apoz or self.ratios == "uniform" else self.info

    def setup(self, world: World) -> None:
        super().setup(world)
        units = units_of(world.main.axes, self.units)
        self._use(units, () if self.ratios == "uniform" else self._preset(units) or self._measure(units))

    def _use(self, units: tuple[str, ...], apoz: Sequence[float]) -> None:
        # Devices know the vector in single precision, so the server must not know it better.
        self.scale = Scale(self.world.main, units, tuple(np.asarray(apoz, dtype=np.float32).tolist()))
        self.pool = Pool(self.world, self._rungs())
        self._dispatched, self._first = (0, {}), {}

    def _preset(self, units: Sequence[str]) -> tuple[float, ...]:
        names = tuple(dict.fromkeys(units))
        if self.apoz:
            fix = f"one share for each of: {', '.join(names)}"
            require(len(self.apoz) == len(names), f"{len(self.apoz)} shares for {len(names)} units", "method.apoz", fix)
        return self.apoz

    def _measure(self, units: Sequence[str]) -> tuple[float, ...]:
        """Trains a copy of the network on most of the proxy and counts its zeros on the rest; the copy is thrown away."""
        fix = 'set it above 0, or preset method.apoz, or set method.ratios = "uniform"'
        x, y, rest, _ = labelled_proxy(self.world, self.info.title, fix, self.proxy)
        module = copy.deepcopy(self.world.main.module)
        train(module, replace(PRETRAIN, epochs=self.pretrain), x, y, self.world.seed)
        return measure(self.world.main, units, module, rest)

    def _rungs(self) -> list[Rung]:
        """M1 ⊂ M2' ⊂ M2 ⊂ M3' ⊂ M3: the levels, and beside each but the first the one that is a little smaller."""
        asked = self.levels or (LEVELS if self.compat == "code" else ())
        levels = [self._rung(size) for size in asked] or self._fitted()
        rungs = levels[:1]
        for rung in levels[1:]:
            size = rung.size - self.adapt
            if self.adapt and size > rungs[-1].size:
                smaller = self._rung(size, level=False)
                if params(rungs[-1].piece) < params(smaller.piece) < params(rung.piece):
                    rungs.append(smaller)
            rungs.append(rung)
        return rungs

    def _rung(self, size: float, level: bool = True) -> Rung:
        """The model of a size."""
        main, limit = self.world.main, (size + self.tolerance) * whole(self.world)
        code = self.compat == "code"
        view = self.scale.first(size) if code else self.scale.largest(lambda v: params(Piece(main, v)) <= limit)
        return Rung(size, Piece(main, view), level)

    def _fitted(self) -> list[Rung]:
        """One model a tier, the largest that it trains."""
        world = self.world
        views = [self.scale.largest(partial(trains, world, plan)) for plan in world.plans.values()]
        pieces = [Piece(world.main, view) for view in {view.key(): view for view in views}.values()]
        return [Rung(params(piece) / whole(world), piece, True) for piece in sorted(pieces, key=params)]

    def choose(self, round: int, clients: int) -> list[int]:
        if self.selection == "fleet":
            return super().choose(round, clients)
        self._dispatched = (round, self.pool.slots(round, clients))
        return sorted(self._dispatched[1])

    def piece(self, device: Device, round: int) -> Piece:
        return self.pool.rungs[self._number(device, round)].piece

    def _number(self, device: Device, round: int) -> int:
        """The model that the device's slot drew; without a slot, the largest that may be dispatched to its tier."""
        drawn = self._dispatched[1] if self._dispatched[0] == round else {}
        return drawn[device.id] if device.id in drawn else self.pool.most(device.tier)

    def send(self, device: Device, piece: Piece, round: int) -> Message:
        sent, number = super().send(device, piece, round), self._number(device, round)
        rungs = self.pool.rungs[: number + 1]
        facts = {
            "pool": [rung.piece.spec() for rung in rungs],
            "levels": [rung.level for rung in rungs],
            # What the device would read off its own memory; in a simulation the fleet knows it.
            "fits": min(number, self.pool.held(device.tier, device, round)),
        }
        parts = {"weights": self._drawn(number)} if round == 1 and self.compat == "code" else sent.parts
        return Message({**parts, "apoz": self._vector()} if self.scale.apoz else parts, facts)

    def _drawn(self, number: int) -> State:
        """Initial weights of a model's own; the whole has those of the network."""
        if number not in self._first:
            piece = self.pool.rungs[number].piece
            self._first[number] = anew(piece, self.world.seed, number) if number + 1 < len(self.pool.rungs) else self.weights
        return self._first[number]

    def _vector(self) -> State:
        return {"apoz": torch.tensor(self.scale.apoz, device=self.world.place)}

    def returned(self, piece: Piece, sent: Message, facts: Mapping[str, Any]) -> Piece:
        trained = facts.get("trained")
        if type(trained) is not int or not 0 <= trained < len(sent.facts["pool"]):
            raise InputError(f"a reply of model {trained!r}, which is not one up to the dispatched")
        return self.pool.rungs[trained].piece

    def expects(self, piece: Piece, sent: Message) -> Mapping[str, Mapping[str, Tensor]]:
        return {"weights": piece.reference.network(piece.view).state_dict()}

    def global_model(self) -> Model:
        view = self.pool.rungs[-1].piece.view
        return Model(self.world.main, view, view.extract(self.weights))

    def state(self) -> dict[str, State]:
        return {**super().state(), **({"apoz": self._vector()} if self.scale.apoz else {})}

    def restore(self, state: Mapping[str, State]) -> None:
        super().restore(state)
        if "apoz" in state and tuple(state["apoz"]["apoz"].tolist()) != self.scale.apoz:
            self._use(self.scale.units, state["apoz"]["apoz"].tolist())

    def merge(self, replies: Sequence[Reply], round: int) -> None:
        super().merge(replies, round)
        self._first.clear()

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def start(self, client: Client, received: Message) -> Mapping[str, Tensor]:
        """The largest model up to the dispatched one that the device's memory holds now, cut out of what came."""
        own, sent = client.reference.view(received.facts["pool"][received.facts["fits"]]), client.view
        if own.key() == sent.key():
            return received["weights"]
        client.view = own
        return {name: take(received["weights"][name], within(own, sent, name)) for name in own.names}

    def phases(self, client: Client, received: Message) -> Iterable[Phase]:
        facts = received.facts
        smaller = zip(facts["pool"][: facts["fits"]], facts["levels"], strict=False)
        teachers = [client.reference.view(spec) for spec, level in smaller if level or self.compat == "code"]
        if not self.distil or not self.lam or not teachers:
            return super().phases(client, received)
        prepare(client.reference, teachers)
        objective = partial(
            self_distilled,
            reference=client.reference,
            own=client.view,
            teachers=teachers,
            weight=self.lam / client.classes,
            temperature=self.temperature,
        )
        return [client.train.phase(client.round, objective=objective)]

    def reply(self, client: Client, received: Message) -> Message:
        sent = super().reply(client, received)
        return replace(sent, facts={**sent.facts, "trained": received.facts["fits"]})


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


def self_distilled(
    net: Net,
    batch: Batch,
    given: Given,
    *,
    reference: Reference,
    own: View,
    teachers: Sequence[View],
    weight: float,
    temperature: float,
) -> Tensor:
    """Cross-entropy, and the mean distance to the smaller networks inside this one, which are not moved by it."""
    logits = net(batch.x)
    with torch.no_grad():
        state = net.state()
        said = [forward(reference, teacher, state, batch.x, inside=own, training=False) for teacher in teachers]
    apart = sum(distillation(target, logits, temperature, batch) for target in said) / len(said)
    return batch.mean(F.cross_entropy(logits, batch.y, reduction="none")) + weight * apart

"""DISTREAL: every batch trains as many filters as the device has arithmetic for."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.errors import InputError
from nestling.methods.api import Client, Device, Info, Message, Phase, Piece, Reference, Reply, SharedWeights, State, View, World
from nestling.methods.kept import made
from nestling.methods.proxy import Proxy, labelled_proxy
from nestling.methods.submodel.dropout_search import Vector, front, pymoo, search
from nestling.schema import require
from nestling.seeds import stream
from nestling.store import Records
from nestling.training.objectives import Batch, Given, Net
from nestling.training.phase import Train
from nestling.training.trainer import train
from nestling.views import Axes, by_index, to_spec
from nestling.views.nested import prepare
from nestling.views.picked import Picker, picker


@dataclass
class Distreal(SharedWeights):
    """DISTREAL (Rapp, Khalili, Pfeiffer, Henkel, "DISTREAL: Distributed Resource-Aware Learning in Heterogeneous Systems", AAAI 2022).

    Idea: every mini-batch trains a random part of the filters, as large as the device's arithmetic allows; which share to drop in
    which layer is searched once, before the first round, for every amount of arithmetic (NSGA-II over cost and speed of learning).
    Loss: cross-entropy of the sub-network drawn for the batch. Travels: the full network down and up, and once to each device the
    list of vectors with their costs. Merge: mean weighted by n_k.
    Only arithmetic is saved: a device needs memory for the full network. Its budget is what the arithmetic of its tier's piece is of
    the full network's.
    Differs from the paper (from memory; its text was not at hand): a device's budget changes from round to round, not within one;
    group norms are dropped by whole groups; dropped weights keep their momentum and stay where they are.

    pareto:      dropout rates, one vector of a rate for every axis, instead of searching; no proxy is needed then.
    most:        the largest rate that is searched (from memory).
    population:  candidates in a generation; 32 to 64 search more thoroughly (from memory).
    generations: generations; 20 to 50 search more thoroughly (from memory).
    steps:       batches that a candidate is trained for on the proxy; 64 to 256 judge better (from memory).
    rescale:     inverted scaling: what a layer reads is divided by the share of filters kept. Not known of the paper; off, since
                 at high rates it learns worse here.
    """

    pareto: tuple[tuple[float, ...], ...] = ()
    most: float = 0.9
    population: int = 16
    generations: int = 8
    steps: int = 32
    rescale: bool = False

    vectors: list[Vector] = field(init=False, repr=False, compare=False, default_factory=list)
    told: Records = made()

    info = Info(
        "width",
        "arithmetic: random filters for every batch",
        "from memory",
        "A",
        auxiliary="server proxy (labelled), before the first round",
    )

    def __post_init__(self) -> None:
        require(all(0 <= rate < 1 for vector in self.pareto for rate in vector), "rates must be in [0, 1)", "method.pareto")
        require(0 < self.most < 1, "must be in (0, 1)", "method.most")
        require(self.population >= 4, "at least four candidates", "method.population")
        require(self.generations >= 1, "at least one generation", "method.generations")
        require(self.steps >= 1, "at least one step", "method.steps")

    @property
    def as_set(self) -> Info:
        return replace(self.info, auxiliary="none") if self.pareto else self.info

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        super().setup(world)
        axes, self.vectors, self.told = world.main.axes, single(self.pareto), Records(world.store)
        fix = f"one rate for each of: {', '.join(axes.names)}"
        require(
            all(len(v) == len(axes.names) for v in self.pareto), f"a vector needs {len(axes.names)} rates", "method.pareto", fix
        )
        if set(axes.shapes) - world.main.parameters:
            message = "running statistics of networks that change with every batch have no meaning"
            raise InputError(message, field="model.norm", fix='use norm = "group", "batch", "sbn" or "none"')
        picker(world.main, world.place)  # says so at once where a network cannot be cut by index
        if not self.pareto:
            pymoo()
            self._proxy()

    def _proxy(self) -> Proxy:
        return labelled_proxy(self.world, self.info.title, "set it above 0, or preset method.pareto")

    def _search(self) -> list[Vector]:
        """The vectors that no other beats in arithmetic and in loss after a short training from the initial network."""
        world, axes = self.world, self.world.main.axes
        proxy = self._proxy()
        known: dict[bytes, tuple[float, float]] = {}

        def objectives(vector: Vector) -> tuple[float, float]:
            view = narrowed(axes, vector)
            if view.key() not in known:
                known[view.key()] = (self.cost(vector), self._loss_after(vector, *proxy))
            return known[view.key()]

        found = single(search(objectives, len(axes.names), self.most, self.population, self.generations, world.seed))
        return [found[k] for k in front([objectives(vector) for vector in found])]

    def _loss_after(self, vector: Vector, x: Tensor, y: Tensor, x_rest: Tensor, y_rest: Tensor) -> float:
        world = self.world
        module = copy.deepcopy(world.main.module)
        epochs = math.ceil(self.steps / max(1, len(x) // world.train.batch)) + 1
        phase = replace(
            self._phase(world.main, vector, self.steps, world.seed, 0, 0, world.train), epochs=epochs, steps=self.steps
        )
        train(module, phase, x, y, world.seed)
        with torch.no_grad():
            loss = float(F.cross_entropy(module.eval()(x_rest), y_rest))
        return loss if math.isfinite(loss) else math.inf

    def cost(self, vector: Vector) -> float:
        """The arithmetic of training with a vector as a share of the full network's."""
        return self._share(Piece(self.world.main, narrowed(self.world.main.axes, vector)))

    def _share(self, piece: Piece) -> float:
        full = self.world.cost(Piece(self.world.main, self.world.main.full)).train_macs
        return self.world.cost(piece).train_macs / full

    def piece(self, device: Device, round: int) -> Piece:
        return Piece(self.world.main, self.world.main.full)

    def send(self, device: Device, piece: Piece, round: int) -> Message:
        if not self.vectors:
            self.vectors = self._search()
        sent, budget = super().send(device, piece, round), self._share(device.piece)
        # A device keeps the list, so that it travels until the device has answered.
        return Message(sent.parts if self.told.get(device.id) else {**sent.parts, "pareto": self._table()}, {"budget": budget})

    def merge(self, replies: Sequence[Reply], round: int) -> None:
        super().merge(replies, round)
        for reply in replies:
            if "pareto" in reply.sent:
                self.told.put(reply.device.id, {"pareto": torch.tensor(True)}, round)

    def _table(self) -> State:
        """One row a vector: its cost, then its rates."""
        return {"pareto": torch.tensor([[self.cost(v), *v] for v in self.vectors], device=self.world.place)}

    def state(self) -> dict[str, State]:
        rates = {"pareto": {"rates": torch.tensor(self.vectors)}} if self.vectors else {}
        return {**super().state(), **rates}

    def restore(self, state: Mapping[str, State]) -> None:
        super().restore(state)
        if "pareto" in state:
            self.vectors = [tuple(row) for row in state["pareto"]["rates"].tolist()]

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def phases(self, client: Client, received: Message) -> Sequence[Phase]:
        if "pareto" in received:
            client.memory["pareto"] = received["pareto"]["pareto"]
        vector = affordable(client.memory["pareto"].tolist(), float(received.facts["budget"]))
        # As many as anybody takes, so that clients of all sizes have tensors of one shape and are one kind of work.
        steps = client.most_steps(client.train.epochs, client.train.batch)
        return [self._phase(client.reference, vector, steps, client.site.seed, client.id, client.round, client.train)]

    def _phase(self, main: Reference, vector: Vector, steps: int, seed: int, client: int, round: int, train: Train) -> Phase:
        view = main.view(to_spec(narrowed(main.axes, vector)))
        plain = train.phase(max(round, 1))
        if view.key() == main.full.key():
            return plain
        prepare(main, [view])
        place = next(main.module.parameters()).device
        objective = partial(dropped, picker=picker(main, place), view=view, rescale=self.rescale)
        given = {name: drawn.to(place) for name, drawn in draws(view, steps, seed, client, round).items()}
        return replace(plain, objective=objective, given=given, optim=replace(plain.optim, lazy=True))


def single(vectors: Sequence[Sequence[float]]) -> list[Vector]:
    """The vectors in single precision: what devices are told, and the server must not know better."""
    return [tuple(np.asarray(vector, dtype=np.float32).tolist()) for vector in vectors]


def narrowed(axes: Axes, vector: Sequence[float]) -> View:
    """A view with as many filters as a vector leaves: ⌈(1 − d)·K⌉ of every axis, in whole groups where a group norm has them."""
    sizes = zip(axes.names, axes.sizes, axes.grains, vector, strict=True)
    return by_index(axes, {n: range(max(1, math.ceil((1 - d) * k / g - 1e-6)) * g) for n, k, g, d in sizes})


def affordable(table: Sequence[Sequence[float]], budget: float) -> Vector:
    """The rates of the row (cost, rates) with the highest cost within the budget, or of the cheapest where none is."""
    within = [row for row in table if row[0] <= budget + 1e-6]
    return tuple(max(within, key=lambda row: row[0])[1:] if within else min(table, key=lambda row: row[0])[1:])


def draws(view: View, steps: int, seed: int, client: int, round: int) -> dict[str, Tensor]:
    """For every axis that the view narrows, by number, which filters are kept in each step."""
    rows, found = max(1, steps), {}
    for axis, (name, size, grain) in enumerate(zip(view.axes.names, view.axes.sizes, view.axes.grains, strict=True)):
        kept = len(view.indices(axis)) // grain
        if kept * grain < size:
            chance = stream(seed, "filters", client, round, name).random((rows, size // grain))
            groups = np.sort(chance.argsort(1)[:, :kept], 1)
            found[str(axis)] = torch.from_numpy((groups[:, :, None] * grain + np.arange(grain)).reshape(rows, -1))
    return found


def dropped(net: Net, batch: Batch, given: Given, *, picker: Picker, view: View, rescale: bool) -> Tensor:
    """Cross-entropy of the sub-network that was drawn for this batch."""
    kept = {int(axis): batch.pick(rows) for axis, rows in given.items()}
    logits = picker.forward(view, net.state(), kept, batch.x, rescale=rescale)
    return batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))

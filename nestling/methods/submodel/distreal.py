"""DISTREAL: every batch trains as many filters as the device has arithmetic for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from nestling.methods.api import Client, Info, InputError, Message, Phases, Replies, SharedWeights, State, kept, made, require
from nestling.methods.part import WEIGHTS, Part
from nestling.methods.proxy import PROXY_FIRST, Proxy, labelled_proxy
from nestling.methods.submodel.dropout_search import Vector, affordable, front, loss_after, pymoo, search, single
from nestling.methods.submodel.random_filters import filters_phase, narrowed
from nestling.settings import BetweenZeroAndOne, Bounds, Count, ShareBelowOne
from nestling.store import Records
from nestling.views.picked import picker
from nestling.world import Device, Piece, World

_PARETO = Part("pareto", lambda method, device, *_: method.table_for(device))


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

    pareto: tuple[tuple[ShareBelowOne, ...], ...] = ()
    most: BetweenZeroAndOne = 0.9
    population: Annotated[int, Bounds(4)] = 16
    generations: Count = 8
    steps: Count = 32
    rescale: bool = False

    rates: Tensor = kept()  # one row per vector, in single precision; none before the search
    told: Records = made()

    info = Info("width", "arithmetic: random filters for every batch", "from memory", "A", PROXY_FIRST)
    parts = (WEIGHTS, _PARETO)

    @property
    def as_set(self) -> Info:
        """Without auxiliary data where the vectors are given."""
        return replace(self.info, auxiliary="none") if self.pareto else self.info

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """Checks vectors that are given and the network; where a search is needed, that pymoo and a proxy are there."""
        super().setup(world)
        axes, self.told = world.main.axes, Records(world.store)
        length, fix = len(axes.names), f"one rate for each of: {', '.join(axes.names)}"
        require(all(len(v) == length for v in self.pareto), f"a vector needs {length} rates", "method.pareto", fix)
        self.rates = torch.tensor(self.pareto, dtype=torch.float32)
        if set(axes.shapes) - world.main.parameters:
            message = "running statistics of networks that change with every batch have no meaning"
            raise InputError(message, field="model.norm", fix='use norm = "group", "batch", "sbn" or "none"')
        picker(world.main, world.place)  # says so at once where a network cannot be cut by index
        if not self.pareto:
            pymoo()
            self._proxy()

    @property
    def vectors(self) -> list[Vector]:
        """The rates, a vector for every amount of arithmetic."""
        return [tuple(row) for row in self.rates.tolist()]

    def _proxy(self) -> Proxy:
        return labelled_proxy(self.world, self.info.title, "set it above 0, or preset method.pareto")

    def _search(self) -> list[Vector]:
        """The vectors that no other beats in arithmetic and in loss after a short training from the initial network."""
        main, seed, train = self.world.main, self.world.seed, self.world.train
        axes, proxy, known = main.axes, self._proxy(), dict[bytes, tuple[float, float]]()

        def objectives(vector: Vector) -> tuple[float, float]:
            key = narrowed(axes, vector).key()
            if key not in known:
                phase = filters_phase(main, vector, self.steps, seed, 0, 0, train, self.rescale)
                known[key] = (self.cost(vector), loss_after(self.world, phase, self.steps, proxy))
            return known[key]

        found = single(search(objectives, len(axes.names), self.most, self.population, self.generations, self.world.seed))
        return [found[k] for k in front([objectives(vector) for vector in found])]

    def cost(self, vector: Vector) -> float:
        """The arithmetic of training with a vector as a share of the full network's."""
        return self._share(Piece(self.world.main, narrowed(self.world.main.axes, vector)))

    def _share(self, piece: Piece) -> float:
        full = self.world.cost(Piece(self.world.main, self.world.main.full)).train_macs
        return self.world.cost(piece).train_macs / full

    def piece(self, device: Device, round: int) -> Piece:
        """The full network for every device: only arithmetic is saved."""
        return Piece(self.world.main, self.world.main.full)

    def alike(self, device: Device, piece: Piece) -> tuple[float, bool]:
        """The device's budget, and whether it has the list of vectors already."""
        return self._share(device.piece), bool(self.told.get(device.id))

    def facts(self, device: Device, piece: Piece, round: int) -> dict[str, float]:
        """The device's budget: the arithmetic of what fits it, as a share of the full network's."""
        return {"budget": self._share(device.piece)}

    def merge(self, replies: Replies, round: int) -> None:
        """The mean by samples; writes down which devices have got the list of vectors."""
        super().merge(replies, round)
        for reply in replies:
            if "pareto" in reply.sent:
                self.told.put(reply.device.id, {"pareto": torch.tensor(True)}, round)

    def table_for(self, device: Device) -> State:
        """One row per vector: its cost, then its rates. A device keeps the list, so it travels until the device has answered."""
        if self.told.get(device.id):
            return {}
        if not len(self.rates):
            self.rates = torch.tensor(self._search())
        return {"pareto": torch.tensor([[self.cost(v), *v] for v in self.vectors], device=self.world.place)}

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def phases(self, client: Client, received: Message) -> Phases:
        """One phase of random filters by the costliest vector within the budget; stores the list of vectors when it arrives."""
        if "pareto" in received:
            client.memory["pareto"] = received["pareto"]["pareto"]
        vector = affordable(client.memory["pareto"].tolist(), float(received.facts["budget"]))
        # As many as anybody takes, so that clients of all sizes have tensors of one shape and are one kind of work.
        steps = client.most_steps(client.train.epochs, client.train.batch)
        main, seed = client.reference, client.site.seed
        return [filters_phase(main, vector, steps, seed, client.id, client.round, client.train, self.rescale)]

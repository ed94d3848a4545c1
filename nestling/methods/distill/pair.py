"""Two networks per client: its own, which stays, and a small one that all share, which travels and teaches."""

from __future__ import annotations

import copy
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from nestling.devices.fit import RATIOS
from nestling.methods.api import Client, Contribution, Info, Message, Phases, Reference, Replies, State, kept, made
from nestling.methods.part import Part, Parts, Tensors
from nestling.methods.personal import Personal
from nestling.models.taps import Taps
from nestling.settings import UnitShare
from nestling.training.memory import sectioned
from nestling.training.objectives import Objective
from nestling.world import Device, Model, World, ratio_cost, ratio_view

MEME = "meme"
_OURS = f"{MEME}."

INFO = Info(
    "data-free",
    "any: own networks never meet, a small one is shared",
    "reimplementation (HtFLlib) read; the paper from memory",
    "E",
    own_networks=True,
    personal=True,
)
"""What the methods of such pairs are."""


class Pair(nn.Module):
    """A client's own network and the shared one. In training it says what both say, (2, rows, classes); else what its own does."""

    def __init__(self, own: nn.Module, taps: Taps, meme: nn.Module, meme_head: str) -> None:
        """From a client's own network, a copy of the shared one, and where the heads of both are."""
        super().__init__()
        self.own, self.meme = own, meme
        self.taps = {"head": f"own.{taps.head}"}
        self.meme_head = f"{_OURS}{meme_head}"

    def forward(self, x: Tensor) -> Tensor:
        """In training the logits of both networks, stacked; otherwise those of the client's own."""
        return torch.stack([self.own(x), self.meme(x)]) if self.training else self.own(x)


_SHARED = Part(MEME, lambda method, *_: method.weights, lambda _method, client, _: meme_of(client.weights))


@dataclass
class Pairs(Personal):
    """Base of the methods whose clients train a network of their own and a small shared one together. A device must have room for
    both; where a tier takes parts of the main network, its own one shrinks until it has, as far as it can.

    ratio:     the width of the shared network, of the main one (0: the widest with at most half the smallest tier's parameters).
    weighting: what a client counts in the shared network's mean: "samples" (n_k) or "uniform".
    """

    ratio: UnitShare = 0.0
    weighting: Literal["samples", "uniform"] = "samples"

    shared: Reference = made()
    weights: State = kept()
    parts: ClassVar[Parts] = (_SHARED,)

    @abstractmethod
    def objective(self, client: Client) -> Objective:
        """What both networks of a client minimise together."""

    def tailor(self, module: nn.Module, taps: Taps) -> nn.Module:
        """The tier's network and a copy of the shared one, as one module."""
        return Pair(module, taps, copy.deepcopy(self.shared.module).to("cpu"), self.shared.taps.head)

    def shared_in(self, message: Message, like: Tensors) -> Tensors:
        """The shared network that a message holds; `like` has its shapes."""
        return message[MEME]

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """Cuts the shared network out of the main one, then pairs every tier's network with it."""
        view = ratio_view(world.main, self.ratio or _small(world))
        module = world.main.network(view, view.extract(world.main.initial))
        self.shared = world.add_network(MEME, copy.deepcopy(module).to("cpu"))
        self.weights = self.shared.initial.copy()
        super().setup(world)

    def merge(self, replies: Replies, round: int) -> None:
        """The mean of the shared network over clients, by samples or uniform."""
        shares = [float(reply.samples) if self.weighting == "samples" else 1.0 for reply in replies]
        states = [self.shared_in(reply.message, self.weights) for reply in replies]
        self.weights = self.mean(self.weights, [Contribution(self.shared.full, *own) for own in zip(states, shares, strict=True)])

    def model_for(self, device: Device) -> Model:
        """The device's own network, paired with the shared one as it is now."""
        own = super().model_for(device)
        return Model(own.reference, own.view, with_meme(own.state, self.weights))

    def other_models(self, device: Device) -> dict[str, Model]:
        """The shared network alone."""
        return {"by the shared network": self.global_model()}

    def global_model(self) -> Model:
        """The shared network."""
        return Model(self.shared, self.shared.full, self.weights)

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def start(self, client: Client, received: Message) -> Tensors:
        """The client's own network, paired with the received one."""
        return with_meme(super().start(client, received), self.shared_in(received, meme_of(client.reference.initial)))

    def phases(self, client: Client, received: Message) -> Phases:
        """One training phase for both networks together."""
        return [client.train.phase(client.round, objective=self.objective(client))]

    def keep(self, client: Client, received: Message) -> None:
        """The client keeps all of its pair but the shared network."""
        client.memory = sectioned(weights={n: t for n, t in client.weights.items() if not n.startswith(_OURS)})


def meme_of(state: Tensors) -> State:
    """The shared network's part of a pair's state, by its own names."""
    return {name.removeprefix(_OURS): t for name, t in state.items() if name.startswith(_OURS)}


def with_meme(state: Tensors, meme: Tensors) -> State:
    """A pair's state with another shared network."""
    return {**state, **{f"{_OURS}{name}": t for name, t in meme.items()}}


def _small(world: World) -> float:
    least = min(plan.cost.params for plan in world.plans.values())
    return max((r for r in RATIOS if ratio_cost(world.main, r).params <= least / 2), default=min(RATIOS))

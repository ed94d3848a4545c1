"""DepthFL: prefixes of a network with exits that teach each other."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from nestling.methods.api import Client, Device, Info, Message, Model, Phases, Piece, Replies, World, kept, made, pack
from nestling.methods.schedule import in_rounds
from nestling.methods.submodel.by_depth import ByDepth, exits_of, need_exits
from nestling.settings import Positive
from nestling.tasks import losses
from nestling.training.objectives import Batch, Given, Net, distillation
from nestling.views import Reference, State, Tensors, View
from nestling.views.depth import depth_views


@dataclass
class DepthFL(ByDepth):
    """DepthFL (Kim, Yu, Kim, Moon, "DepthFL: Depthwise Federated Learning for Heterogeneous Clients", ICLR 2023).

    Idea: a client holds the first D stages of one network and the D exits behind them; its exits teach one another, so that deep
    ones, which few clients train, learn from shallow ones. FedDyn keeps clients from drifting apart.
    Loss: Σᵢ [CE(oᵢ) + λₜ/(D-1)·Σ_{j≠i} KL(oⱼ ‖ oᵢ)], the teachers oⱼ held still, λₜ = exp(-5·(1 - min(t, ramp)/ramp)²); with FedDyn
    also -⟨hₖ, w⟩ + α/2·‖w - w₀‖². Travels: the D stages and exits down and up. Merge: uniform mean over holders, by name; FedDyn's
    server state h is moved by -α·(holders/clients)·(mean - old), and the weights become mean - h/α.
    Inference: the mean of the logits of all exits.
    Differs from the released code: tensors are matched by name, not by position; t counts from 1 (there from 0); nothing is added to
    probabilities (there 1e-7). Exits are plain unless the network is built with `model.heads = "attention"` (exitcnn, exitresnet),
    which is like the released exits and lighter: one separable convolution instead of two, and another gate.

    kd:     mutual distillation between exits.
    ramp:   the round from which distillation has its full weight; below 1, as a share of the run (published: 300 of 1000 rounds).
    feddyn: FedDyn, on clients and server.
    alpha:  FedDyn's α.
    exits:  "all", or only the "last" one of every depth (what remains without `kd` and `feddyn` is the plain mean over depths).
    """

    kd: bool = True
    ramp: Positive = 0.3
    feddyn: bool = True
    alpha: Positive = 0.1
    exits: Literal["all", "last"] = "all"

    dynamics: State = kept()
    ensemble: Reference = made()

    info = Info("depth", "depth: the first stages, an exit each", "author-contributed code read", "B", model="tinyexits")

    def setup(self, world: World) -> None:
        """Makes the network that answers with the mean of its exits and, for FedDyn, a server state of zeros."""
        network = need_exits(world.main, self.info.title)
        super().setup(world)
        self.ensemble = Reference(world.main.name, network.answering("mean"), world.main.shape)
        trained = world.main.parameters if self.feddyn else ()
        self.dynamics = {name: torch.zeros_like(t) for name, t in self.weights.items() if name in trained}

    def views(self, reference: Reference) -> list[View]:
        """The first stages, with all their exits or only the last."""
        return depth_views(reference, exits=self.exits)

    def facts(self, device: Device, piece: Piece, round: int) -> dict[str, float]:
        """The round's weight of distillation, λₜ."""
        return {"kd": self.ramped(round, self.world.rounds)} if self.kd else {}

    def ramped(self, round: int, rounds: int) -> float:
        """λₜ in a run of so many rounds."""
        ramp = in_rounds(self.ramp, rounds)
        return math.exp(-5 * (1 - min(round, ramp) / ramp) ** 2)

    def merge(self, replies: Replies, round: int) -> None:
        """The uniform mean over holders, then FedDyn's step for every tensor that somebody held."""
        before = self.weights
        super().merge(replies, round)
        if not self.feddyn:
            return
        merged, past = dict(self.weights), dict(self.dynamics)
        for name in past:
            holders = sum(name in reply.piece.view.shapes for reply in replies)
            if holders:
                past[name] = past[name] - self.alpha * holders / len(self.world.fleet) * (merged[name] - before[name])
                merged[name] = merged[name] - past[name] / self.alpha
        self.weights, self.dynamics = pack(merged), past

    def model_for(self, device: Device) -> Model:
        """The device's stages at rest, which answer with the mean of their exits."""
        return replace(super().model_for(device), reference=self.ensemble)

    def global_model(self) -> Model:
        """The deepest view, which answers with the mean of its exits."""
        view = self.ladder.pieces[-1].view
        return Model(self.ensemble, view, view.extract(self.weights))

    def phases(self, client: Client, received: Message) -> Phases:
        """One training phase in which exits teach each other, with FedDyn's terms in the gradient; each where it is on."""
        given = {"kd": torch.tensor(float(received.facts["kd"]), device=client.place)} if self.kd else {}
        rule = None
        if self.feddyn:
            past = _past(client, received)
            given |= {f"past/{name}": tensor for name, tensor in past.items()}
            given |= {f"start/{name}": received["weights"][name] for name in past}
            rule = partial(_dynamic, alpha=self.alpha)
        return [client.train.phase(client.round, objective=_mutual, given=given, rule=rule)]

    def keep(self, client: Client, received: Message) -> None:
        """Moves the client's FedDyn state by -α times what its weights moved."""
        if self.feddyn:
            moved = {n: h - self.alpha * (client.weights[n] - received["weights"][n]) for n, h in _past(client, received).items()}
            client.memory = {**client.memory, **moved}


def _past(client: Client, received: Message) -> State:
    """The client's FedDyn state of what it trains now; zero where it never trained it."""
    names = [name for name in received["weights"] if name in client.reference.parameters]
    return {n: client.memory[n] if n in client.memory else torch.zeros_like(received["weights"][n]) for n in names}


def _mutual(net: Net, batch: Batch, given: Given) -> Tensor:
    exits = exits_of(net, batch.x)
    loss = torch.stack([batch.mean(losses(logits, batch.y)) for logits in exits]).sum()
    if "kd" not in given or len(exits) == 1:
        return loss
    pairs = [(teacher, student) for teacher in exits for student in exits if teacher is not student]
    taught = torch.stack([distillation(teacher.detach(), student, batch=batch) for teacher, student in pairs]).sum()
    return loss + given["kd"] / (len(exits) - 1) * taught


def _dynamic(params: Tensors, grads: Tensors, given: Given, *, alpha: float) -> Tensors:
    """The gradients of FedDyn's two terms, added."""
    return {n: g - given[f"past/{n}"] + alpha * (params[n] - given[f"start/{n}"]) for n, g in grads.items()}

"""SCAFFOLD: control variates against the drift of clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nestling.methods.api import Client, Device, Info, Message, Phase, Piece, Replies, World, kept, made, pack, require
from nestling.methods.baselines.averaged import Averaged, parameters_of
from nestling.methods.part import WEIGHTS, Part, Tensors
from nestling.settings import Positive
from nestling.tasks import losses
from nestling.training.effective import effective_steps, steps_of
from nestling.training.memory import drop, keep, recall
from nestling.training.objectives import Batch, Given, Net
from nestling.training.optimisers import Optim
from nestling.views import Contribution, State, View, keep_private

_CONTROL = Part(
    "control",
    lambda method, _device, piece, _round: method.control_for(piece),
    lambda method, client, received: method.change(client, received),
)


@dataclass
class Scaffold(Averaged):
    """SCAFFOLD (Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020), averaged by name.

    Idea: the server knows the mean gradient c and each client its own, c_k; a client that follows g − c_k + c moves as if it had
    everybody's data. Both are estimates from the clients' last rounds.
    Loss: cross-entropy; the gradient rule is g − c_k + c, before momentum or Adam. Travels: the piece and c down, the piece and
    c_k⁺ − c_k up: twice the bytes; buffers have no control. c_k stays on the client. Merge: weights x + η_g·(mean of y_k − x); c
    grows by (|S|/N)·(mean of c_k⁺ − c_k), both per entry over the clients that own it (N: the fleet, or the group's members).
    Differs from the paper: momentum and Adam are allowed. With momentum the Kη of c_k⁺ = c_k − c + (x − y)/(Kη) is the effective
    step a·η of FedNova's momentum formula, which makes c_k⁺ the mean gradient again. Adam's steps are no multiples of gradients:
    there c_k⁺ is the mean of the mini-batch gradients at x (option I), at the price of one more epoch. The released benchmark code
    moves weights by the correction after the optimiser's step and gives batch-norm buffers controls too.

    server_lr: η_g.
    control:   how c_k⁺ is found: "steps" (option II), "gradient" (option I), or "auto" (steps for sgd, gradient for Adam).
    averaging, cut: see HeteroAvg.
    weighting: how weights are averaged: "samples" (n_k, as FedAvg, which a first round on equal networks is then), or "uniform" as in
               the paper, whose clients hold equally much. Controls are always averaged uniformly.
    """

    weighting: Literal["uniform", "samples"] = "samples"
    server_lr: Positive = 1.0
    control: Literal["auto", "steps", "gradient"] = "auto"

    controls: dict[str, State] = kept()
    _zeros: State = made()
    _views: dict[bytes, View] = made()

    info = Info("baseline", "width or depth: averaged by name, or among equals", "from paper", "B", any_task=True)
    parts = (WEIGHTS, _CONTROL)

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """Starts with all controls at zero, and refuses option II for optimisers other than sgd."""
        super().setup(world)
        require(
            not (self.control == "steps" and world.train.optimizer != "sgd"),
            "Adam's steps are no multiples of gradients",
            "method.control",
            'use "gradient" or "auto", or train.optimizer = "sgd"',
        )
        initial, trained = self.reference.initial, self.reference.parameters
        self._zeros = pack({name: torch.zeros_like(t) for name, t in initial.items() if name in trained})
        self.controls, self._views = {}, {}

    def control_for(self, piece: Piece) -> State:
        """c of a piece."""
        return self._trained(piece.view).extract(self._control_of(self.group_of(piece)))

    def _control_of(self, group: str) -> State:
        """A group's c, in the shape of the reference's parameters."""
        return self.controls.get(group, self._zeros)

    def _trained(self, view: View) -> View:
        """The view without buffers, remembered."""
        buffers = [name for name in view.members if name not in self.reference.parameters]
        if not buffers:
            return view
        return self._views.setdefault(view.key(), keep_private(view, buffers))

    def merge_group(self, group: str, replies: Replies) -> None:
        """Moves the weights towards their mean by η_g, and c by the |S|/N share of the clients' mean change."""
        old, control = self.state_of(group), self._control_of(group)
        super().merge_group(group, replies)
        if self.server_lr != 1:
            new, trained = self.weights[group], self.reference.parameters
            self.weights[group] = pack({n: t.lerp(new[n], self.server_lr) if n in trained else new[n] for n, t in old.items()})
        change = self.fuse(self._zeros, [Contribution(self._trained(r.piece.view), r.message["control"]) for r in replies])
        share = min(1.0, len(replies) / self._members(group))
        self.controls[group] = pack({name: c + share * change[name] for name, c in control.items()})

    def _members(self, group: str) -> int:
        """How many devices are averaged with one another when nothing else uses their memory."""
        pieces = {tier: self.piece(Device(0, tier, plan.piece, 0), 0) for tier, plan in self.world.plans.items()}
        return sum(self.world.fleet.count_of(tier) for tier, piece in pieces.items() if self.group_of(piece) == group) or 1

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def phases(self, client: Client, received: Message) -> Iterable[Phase]:
        """One training phase with corrected gradients; by option I, after an epoch that sums up the gradients at x."""
        own = _own_control(client, received)
        given = {name: c - own[name] for name, c in received["control"].items()}
        phase = client.train.phase(client.round, given=given, rule=_corrected)
        return _after_gradient(client, received, phase) if self._by_gradient(client) else [phase]

    def _by_gradient(self, client: Client) -> bool:
        return self.control == "gradient" or (self.control == "auto" and client.train.optimizer != "sgd")

    def change(self, client: Client, received: Message) -> State:
        """c_k⁺ − c_k; the client keeps c_k⁺."""
        own = _own_control(client, received)
        if self._by_gradient(client):
            new = recall(client.memory, "gradient", client.reference, client.view, own)
        else:
            new = _from_steps(client, received, own)
        client.memory = keep(drop(client.memory, "gradient"), "control", client.reference, client.view, new)
        return {name: c - own[name] for name, c in new.items()}


def _own_control(client: Client, received: Message) -> State:
    zeros = {name: torch.zeros_like(c) for name, c in received["control"].items()}
    return recall(client.memory, "control", client.reference, client.view, zeros)


def _corrected(_params: Tensors, grads: Tensors, given: Given) -> Tensors:
    return {name: grad + given[name] if name in given else grad for name, grad in grads.items()}


def _from_steps(client: Client, received: Message, own: State) -> State:
    """Option II: the mean gradient that carried the client from x to y."""
    phase = client.train.phase(client.round)
    far = phase.optim.lr * effective_steps(phase.optim, steps_of(client, phase))
    if not far:
        return own
    x, c, y = received["weights"], received["control"], client.weights
    return {name: c_k - c[name] + (x[name] - y[name]) / far for name, c_k in own.items()}


def _after_gradient(client: Client, received: Message, then: Phase) -> Iterator[Phase]:
    """Option I: one epoch sums up the gradients at x, then training starts from there."""
    x = parameters_of(client, received["weights"])
    # With equal rates clients stay one stack, so the sum becomes a mean only afterwards.
    first = client.train.phase(client.round, objective=_loss_at, optim=Optim("sgd", 1.0), epochs=1, given=x)
    client.weights = {name: torch.zeros_like(t) if name in x else t for name, t in received["weights"].items()}
    yield first
    gradient = {name: client.weights[name] / -max(steps_of(client, first), 1) for name in x}
    client.memory = keep(client.memory, "gradient", client.reference, client.view, gradient)
    client.weights = received["weights"]
    yield then


def _loss_at(net: Net, batch: Batch, given: Given) -> Tensor:
    """The loss at the given point, whose gradient arrives at the parameters wherever these are."""
    point = {name: given[name] + p - p.detach() for name, p in net.params.items()}
    return batch.mean(losses(net.with_weights(point, batch.x), batch.y))

"""FedNova: updates normalised by how far each client's steps carry it."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from nestling.methods.api import Client, Contribution, Info, Message, Phases, Replies, Reply, State, pack
from nestling.methods.baselines.averaged import Averaged, parameters_of
from nestling.methods.part import WEIGHTS, Fact, Part
from nestling.settings import NotNegative
from nestling.training.effective import effective_steps, steps_of
from nestling.training.objectives import proximal

_UPDATE = Part(
    "update",
    up=lambda method, client, received: method.update(client, received),
    like=lambda _method, _piece, sent: sent["weights"],
    can=lambda method, reply: reply.facts["effective_steps"] <= method.most_steps(reply.facts["samples"]),
)
_STEPS = Fact(
    "effective_steps",
    lambda method, client, received: method.steps(client, received),
    lambda _method, _sent, said: isinstance(said, float) and math.isfinite(said) and 0 < said < 2**40,
    "the effective number of steps",
)


@dataclass
class FedNova(Averaged):
    """FedNova (Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020),
    averaged by name.

    Idea: a client that takes more steps must not pull the mean harder, so each sends its update divided by its effective number of
    steps a_k, and the server applies their mean times the mean a_k.
    Loss: cross-entropy (+ μ/2·‖w − w_received‖² with `mu`). Travels: the client's piece down; d_k = (x − y_k)/a_k of its parameters
    and a_k up (buffers as they are). Merge: per entry, over the clients that own it: x − (Σ p_k a_k)·Σ p_k d_k with p_k ∝ n_k.
    Differs from the paper: a_k of momentum and proximal term together is their exact joint recursion; Adam, for which a_k is not
    defined, counts steps (a_k = τ); weight decay and clipping do not enter a_k.

    mu: the proximal term; 0 leaves it out.
    averaging, cut, weighting: see HeteroAvg; p_k is by samples as published.
    """

    weighting: Literal["uniform", "samples"] = "samples"
    mu: NotNegative = 0.0

    info = Info("baseline", "width or depth: averaged by name, or among equals", "from paper", "B", any_task=True)
    parts = (replace(WEIGHTS, up=None), _UPDATE)
    said = (_STEPS,)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Room for the received weights, where the proximal term is on."""
        return ("anchor",) if self.mu else ()

    def phases(self, client: Client, received: Message) -> Phases:
        """One training phase, with the proximal term unless `mu` is 0."""
        if not self.mu:
            return [client.train.phase(client.round)]
        given = parameters_of(client, received["weights"])
        return [client.train.phase(client.round, objective=partial(proximal, mu=self.mu), given=given)]

    def steps(self, client: Client, received: Message) -> float:
        """a_k."""
        phase = self.phases(client, received)[0]
        return effective_steps(phase.optim, steps_of(client, phase), self.mu) or 1.0

    def most_steps(self, samples: int) -> float:
        """The largest a_k of a client with so many rows: the mean update is multiplied by the mean a_k, so nobody may say any."""
        train = self.world.train
        steps = max(1, train.epochs * math.ceil(samples / train.batch))
        return steps / (1 - train.momentum) * (1 + 1e-9)

    def update(self, client: Client, received: Message) -> State:
        """d_k, and buffers as they are."""
        a, before = self.steps(client, received), received["weights"]
        now = {name: client.weights[name] for name in client.view.names}
        return {**now, **{name: (before[name] - tensor) / a for name, tensor in parameters_of(client, now).items()}}

    def merge_group(self, group: str, replies: Replies) -> None:
        """Moves every entry by its holders' mean update times their mean a_k; buffers become the mean of those that came up."""
        old, trained = self.state_of(group), self.reference.parameters
        still = {name: torch.zeros_like(t) if name in trained else t for name, t in old.items()}
        moved = self.fuse(still, [self.contribution(reply) for reply in replies])
        holders: dict[bytes, list[Reply]] = defaultdict(list)
        for reply in replies:
            holders[reply.piece.view.key()].append(reply)
        # A robust rule has to see every client's own number of steps.
        told = holders.values() if self.robust is None else [[reply] for reply in replies]
        far = self.fuse(still, [self._steps(own) for own in told])
        self.weights[group] = pack({n: t - far[n] * moved[n] if n in trained else moved[n] for n, t in old.items()})

    def contribution(self, reply: Reply, part: str = "update") -> Contribution:
        """The reply's normalised update, in place of weights."""
        return super().contribution(reply, part)

    def _steps(self, replies: Replies) -> Contribution:
        """The mean a_k of the holders of one view, for every entry of it."""
        weight = sum(self.weight(reply) for reply in replies)
        mean = sum(self.weight(reply) * reply.message.facts["effective_steps"] for reply in replies) / weight
        trained, like = self.reference.parameters, replies[0].message["update"]
        state: State = {name: torch.full_like(t, mean) if name in trained else t for name, t in like.items()}
        return Contribution(replies[0].piece.view, state, weight)

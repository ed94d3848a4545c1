"""FedKD: mutual distillation that trusts as far as both networks are right, and a shared network that travels in few factors."""

# ruff: noqa: ARG001 (an objective's signature)

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from nestling.methods.api import Client, Device, Message, Piece, State, Tensors
from nestling.methods.distill.factors import Ranked, factored, factors_like, ranks_of, whole
from nestling.methods.distill.pair import INFO, MEME, Pair, Pairs
from nestling.models.taps import Taps, watching
from nestling.settings import Count, NonZeroShare, NotNegative, Positive
from nestling.tasks import losses
from nestling.training.objectives import Batch, Given, Net, Objective, divergence


class Bridged(Pair):
    """A pair, and a linear layer from the shared network's features to the own one's."""

    def __init__(self, own: nn.Module, taps: Taps, meme: nn.Module, meme_taps: Taps) -> None:
        """From two networks and where the features of each are; the bridge between these has no bias."""
        super().__init__(own, taps, meme, meme_taps.head)
        self.bridge = nn.Linear(meme_taps.features, taps.features, bias=False)


@dataclass
class FedKD(Pairs):
    """FedKD (Wu et al., "Communication-efficient federated learning via knowledge distillation", Nature Communications 2022).

    Idea: as in FML, a client's own network (the mentor) and a small shared one (the mentee) teach each other, here by their features
    too, and the less the more both are wrong. The shared network travels as factors of its matrices that hold most of their energy.
    Loss: for each of the two, cross-entropy + (KL to the other's prediction + mean square of (own features − W·shared features)) / (the
    sum of both cross-entropies); teachers and the divisor are held still, and W, which stays on the client, learns with the shared
    network. Travels, down and up: of a weight as a matrix (outputs × the rest) the fewest singular components that hold the share T
    of its energy, T going from `energy` to `energy_end` over `ramp` rounds, or the matrix where that is fewer numbers; other tensors as
    they are. Merge: mean by n_k of what the factors make; the server keeps it whole. The global model is the shared network.
    Differs from the paper: the losses on hidden states and attention of transformers are one on the features. As in FML a device's
    budget counts both networks. Differs from HtFLlib, which was read: there gradients flow through teachers and divisor, KL is the
    mean over the classes too, kernels of convolutions are decomposed one by one, the mean is plain, gradients are clipped at
    norm 10, and the shared network has a learning rate of its own. The paper is from memory, and so are the energies.

    energy, energy_end: T at the beginning and at the end (1: nothing is left out).
    ramp:      in how many rounds T gets there (the whole run, as published; ours is a number, so that a run can be made longer).
    adaptive:  whether the losses are divided by the cross-entropies.
    floor:     the least that they are divided by (ours: of networks that know their few rows by heart the other terms would else be
               all there is; at 0.1 it was no better than training alone in our tests).
    hidden:    weight of the features' term.
    soft:      weight of the predictions' term.
    ratio:     the width of the shared network, of the main one (0: the widest with at most half the smallest tier's parameters).
    weighting: what a client counts in its mean: "samples" (n_k) or "uniform".
    """

    energy: NonZeroShare = 0.95
    energy_end: NonZeroShare = 0.98
    ramp: Count = 50
    adaptive: bool = True
    floor: Positive = 1.0
    hidden: NotNegative = 1.0
    soft: NotNegative = 1.0

    info = INFO

    def tailor(self, module: nn.Module, taps: Taps) -> nn.Module:
        """The tier's network, a copy of the shared one, and the bridge between their features."""
        return Bridged(module, taps, copy.deepcopy(self.shared.module).to("cpu"), self.shared.taps)

    def shared_in(self, message: Message, like: Tensors) -> State:
        """The message's factors, multiplied out."""
        return whole(message, like)

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def send(self, device: Device, piece: Piece, round: int) -> Message:
        """The shared network in factors that hold the round's share of energy; all devices get the same message."""
        energy = self.share(round)
        return self.once(round, MEME, lambda: factored(self.weights, energy, {"energy": energy}))

    def share(self, round: int) -> float:
        """T of a round."""
        return self.energy + min(1.0, (round - 1) / self.ramp) * (self.energy_end - self.energy)

    def returned(self, piece: Piece, sent: Message, facts: Mapping[str, Any]) -> Piece:
        """The piece with the ranks in which the reply says that it sends the shared network."""
        return Ranked(piece.reference, piece.view, ranks_of(facts, self.weights))

    def expects(self, piece: Piece, sent: Message) -> Mapping[str, Tensors]:
        """Factors of the shared network in the ranks that the reply names."""
        assert isinstance(piece, Ranked)
        return factors_like(self.weights, piece.ranks)

    def largest(self, piece: Piece, sent: Message) -> Mapping[str, Tensors]:
        """The shared network itself: its factors are sent where they are fewer numbers."""
        return {MEME: self.weights}

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def objective(self, client: Client) -> Objective:
        """Mutual learning by predictions and features; without `adaptive` nothing is divided."""
        module = client.reference.module
        assert isinstance(module, Bridged)
        floor = self.floor if self.adaptive else 0.0
        head, meme_head = client.reference.taps.head, module.meme_head
        return partial(_mutual, floor=floor, hidden=self.hidden, soft=self.soft, head=head, meme_head=meme_head)

    def reply(self, client: Client, received: Message) -> Message:
        """The shared network in factors that hold the share of energy which the server named."""
        told = super().reply(client, received)
        return factored(told[MEME], received.facts["energy"], told.facts)


def _mutual(
    net: Net, batch: Batch, given: Given, *, floor: float, hidden: float, soft: float, head: str, meme_head: str
) -> Tensor:
    with watching(net.module, (), head) as mine, watching(net.module, (), meme_head) as common:
        own, meme = net(batch.x)
    features, shared = mine["features"], net.module.get_submodule("bridge")(common["features"])
    wrong, wrong_too = (losses(logits, batch.y) for logits in (own, meme))
    trust = 1 / (batch.mean(wrong) + batch.mean(wrong_too)).detach().clamp(min=floor) if floor else 1.0
    taught = soft * divergence(meme.detach(), own) + hidden * (features - shared.detach()).square().mean(1)
    taught_too = soft * divergence(own.detach(), meme) + hidden * (features.detach() - shared).square().mean(1)
    return batch.mean(wrong + wrong_too + trust * (taught + taught_too))

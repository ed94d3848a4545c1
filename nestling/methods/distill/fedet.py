"""Fed-ET: small networks of any kind teach a large one on the server, and get its head back."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.methods.api import Device, Info, InputError, Model, Piece, Replies, Reply, World, made
from nestling.methods.distill.architectures import PerArchitecture, said_of
from nestling.methods.heads import head_of, with_head
from nestling.methods.personal import common_features, own_pieces
from nestling.models.embedding import with_features
from nestling.models.taps import Taps
from nestling.seeds import torch_seeded
from nestling.settings import Count, NotNegative, Positive, ShareBelowOne, Whole
from nestling.training.distiller import Distillation, distil, proxy, teacher_shares, whole
from nestling.training.objectives import divergence
from nestling.training.optimisers import Optim
from nestling.views import Contribution, Reference, State, Tensors
from nestling.views.flat import layout_of

Consensus = tuple[Tensor, Tensor, Tensor]
"""Per input: the label that the teachers agree on, the logits of those who do not, and whether there are any."""


@dataclass
class FedET(PerArchitecture):
    """Fed-ET (Cho, Manoel, Joshi, Sim, Dimitriadis, "Heterogeneous Ensemble Knowledge Transfer for Training Large Models in Federated
    Learning", IJCAI 2022), from memory and an unofficial implementation.

    Idea: devices train small networks of any kind; the server distils them on unlabelled data into a network that is too large for a
    device. Sure teachers count for more, and what the dissenters say is kept as a regulariser. All networks end in one layer of
    the same size, in which knowledge goes back.
    Loss: clients cross-entropy. Server, with the share α_k(x) of client k in the variance of logits: cross-entropy to the consensus
    label ŷ = argmax Σ α_k·logits_k, plus λ·KL(softmax(α-mean of the logits of clients whose argmax is not ŷ) ‖ server) for inputs
    that have such clients, and nothing for the others.
    Travels: each client's network down and up. Merge: uniform mean within an architecture. The server's network, which is the main
    one at full size, takes the mean of all clients' heads, is trained, and its head then replaces those of all small networks.
    Differs from the paper: where networks have different numbers of features these are pooled to the fewest, so that all heads have one
    form. Every width is an architecture; tiers of one width share it.

    steps, batch, lr, momentum: the server's training (SGD).
    diversity: λ.
    features:  how many features the common head is given (0: as many as the network with the fewest has).
    weighting: how much clients count in the means, of bodies and heads: "uniform" or "samples" (n_k).
    """

    steps: Whole = 128
    batch: Count = 64
    lr: Positive = 5e-3
    momentum: ShareBelowOne = 0.9
    diversity: NotNegative = 0.05
    features: Whole = 0
    weighting: Literal["uniform", "samples"] = "uniform"

    wide: int = made()
    pieces: dict[str, Piece] = made()
    server: Reference = made()
    head: Reference = made()

    info = Info(
        "public data", "any: averaged by kind, heads alike", "from memory", "D", "server proxy, unlabelled", own_networks=True
    )

    # -- the networks ----------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """Gives the tiers' networks and the server's features of one size, and all of them the same head."""
        if world.public is None:
            fix = "set it above 0, e.g. 0.01"
            raise InputError("Fed-ET distils on public data and there is none", field="split.public", fix=fix)
        self.world, self.wide = world, self.features or min(common_features(world), world.main.taps.features)
        self.pieces = _shared(world, own_pieces(world, self._tailor))
        self.server = self._large(world)
        with torch_seeded(world.seed, "network", "head"):
            self.head = Reference("head", nn.Linear(self.wide, world.classes), (self.wide,))
        self.begin_with([self.server, *(piece.reference for piece in self.pieces.values())])
        first = self._head_of(self.server.name, self.weights[self.server.name])
        self.weights = {name: self._with_head(name, state, first) for name, state in self.weights.items()}

    def _tailor(self, module: nn.Module, taps: Taps) -> nn.Module:
        # A network of its own also where nothing is changed: its head is replaced, whatever it is a part of.
        return with_features(copy.deepcopy(module), taps, self.wide)

    def _large(self, world: World) -> Reference:
        with torch_seeded(world.seed, "network", "server"):
            module = self._tailor(copy.deepcopy(world.main.module).to("cpu"), world.main.taps)
        found = Reference("server (tailored main)", module, world.main.shape)
        _ = found.axes  # traced where the network was made
        found.to(world.place)
        return found

    def piece(self, device: Device, round: int) -> Piece:
        """The tier's tailored network, which does not shrink."""
        return self.pieces[device.tier]

    def global_model(self) -> Model:
        """The server's large network."""
        return Model(self.server, self.server.full, self.weights[self.server.name])

    # -- the merge -------------------------------------------------------------------------------------------------------------

    def merge(self, replies: Replies, round: int) -> None:
        """Means within architectures; the server's network learns from the clients', and its head goes to all."""
        if not replies:
            return
        means, name = self.average(replies), self.server.name
        said = [self._head_of(r.piece.reference.name, r.message["weights"]) for r in replies]
        heads = [Contribution(self.head.full, head, self.weight(r)) for head, r in zip(said, replies, strict=True)]
        start = self._with_head(name, means[name], self.mean(self._head_of(name, means[name]), heads))
        taught = self._teach(start, replies, round) if self.steps else start
        head = self._head_of(name, taught)
        self.weights = {**{name: self._with_head(name, state, head) for name, state in means.items()}, name: taught}

    def weight(self, reply: Reply) -> float:
        """Its number of samples, or 1 for every client."""
        return super().weight(reply) if self.weighting == "samples" else 1.0

    def _teach(self, start: State, replies: Replies, round: int) -> State:
        """The server's network after its training."""
        x = self.world.public
        assert x is not None
        targets = consensus(torch.stack(said_of(replies, x)), [r.samples for r in replies])
        settings = Distillation(self.steps, self.batch, 1.0, Optim("sgd", self.lr, self.momentum))
        work, forward = self.world.recorder, whole(self.server.network(self.server.full))
        student = work.student("server", start, self.server.parameters, forward, settings.optim)
        seed, loss = self.world.seed, partial(server_loss, diversity=self.diversity)
        return distil(student, proxy(x, targets, self.batch, seed, round), settings, seed, round, loss=loss, work=work)

    def _head_of(self, name: str, state: Tensors) -> State:
        return head_of(state, self.references[name].taps.head)

    def _with_head(self, name: str, state: State, head: Tensors) -> State:
        return with_head(state, self.references[name].taps.head, {leaf: tensor.clone() for leaf, tensor in head.items()})


def consensus(logits: Tensor, samples: Sequence[int]) -> Consensus:
    """What teachers agree on and what dissenters say, for logits of shape (teachers, inputs, classes)."""
    share = teacher_shares(logits, samples, "variance")
    label = (share * logits).sum(0).argmax(-1)
    dissent = torch.where((logits.argmax(-1) != label).unsqueeze(-1), share, 0.0)
    total = dissent.sum(0)
    others = (dissent * logits).sum(0) / torch.where(total > 0, total, 1.0)
    return label, others, total.squeeze(-1) > 0


def server_loss(said: Tensor, targets: Consensus, diversity: float) -> Tensor:
    """Cross-entropy to the consensus, and the divergence from the dissenters where there are any."""
    label, others, dissent = targets
    return F.cross_entropy(said, label) + diversity * torch.where(dissent, divergence(others, said), 0.0).mean()


def _shared(world: World, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
    """Tiers whose parts of the main network came out equal train one network."""
    first: dict[object, Piece] = {}
    own = {tier: bool(world.plans[tier].tier.model) for tier in pieces}
    return {t: first.setdefault(t if own[t] else layout_of(p.reference.initial), p) for t, p in pieces.items()}

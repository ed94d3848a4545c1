"""FedGen: a generator of features, taught by the clients' classifiers, tells every client what others' classes look like."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from nestling.methods.api import Client, Contribution, Device, Info, Message, Model, Phases, Piece, Replies, State, World
from nestling.methods.distill.generated import Several, learner, started
from nestling.methods.distill.label_counts import COUNTS, counts_of, shares
from nestling.methods.distill.latent import Classifier, generative, generative_given, mean_classifier, step
from nestling.methods.heads import common_head, head_of, with_head
from nestling.methods.kept import kept, made
from nestling.methods.part import WEIGHTS, Part, Tensors
from nestling.methods.personal import Personal, common_features
from nestling.models.embedding import with_features
from nestling.models.latent_generator import LatentGenerator
from nestling.models.taps import Taps
from nestling.seeds import torch_seeded
from nestling.settings import Compat, Count, NonZeroShare, NotNegative, Positive, Whole
from nestling.training.optimisers import Optim

_HEAD = Part(
    "head",
    lambda method, *_: {} if method.full else method.weights,
    lambda _, client, received: head_of(client.weights, client.reference.taps.head) if "head" in received else {},
)
_GENERATOR = Part("generator", lambda method, *_: method.generator if method.seen.any() else {})  # at first it knows nothing
_SEEN = Part("classes", lambda method, *_: {"seen": method.seen} if method.seen.any() else {})


@dataclass
class FedGen(Personal):
    """FedGen (Zhu, Hong, Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021).

    Idea: the server trains a generator G of features, not of inputs, so that the clients' classifiers see in G(ε, y) what they know
    as class y; clients then train their own classifier on features of classes that they rarely see.
    Loss: from the second round on, cross-entropy + β_t·KL(head(G(ε, y)) ‖ f(x)), the first held still, + (B_g/B)·α_t·cross-entropy
    of head(G(ε, ŷ)) against ŷ, drawn evenly from the classes that anybody holds; α_t and β_t fall by `decay` every round. G
    minimises Σ_k mean_i a_{k,y_i}·CE(head_k(G(ε_i, y_i)), y_i) + diversity, where a_{k,y} is the client's share of the class.
    Travels: the client's part of the network, or its classifier alone, down and up; G down; class counts up. Merge: mean by n_k.
    Differs from the paper: there all networks are equal. Where devices hold parts of one network, a narrow classifier reads those of
    the generated features that its own inputs are; networks that have nothing in common have their features pooled to one
    number and a common classifier, the only thing that travels. Differs from the released code: it multiplies the mean loss by the mean
    share, by which shares lose their meaning, and counts every class once too often (`compat = "code"` does both); G's optimiser
    starts anew every round; a batch is a batch (there 20 of them are called epochs). A device's budget does not count G.

    share:         what travels: "full" (parts of one network), "head" (classifiers), or "auto": full unless a tier brings a network.
    alpha, beta:   weights of the two terms (10 as released, for steps of 0.01 without momentum; with ours it drowns the data).
    decay:         what both are multiplied by every round.
    iterations:    steps of G in a round.
    generator_lr, weight_decay: its Adam.
    batch:         features made at a time, on the server and (B_g) in every step of a client.
    noise, hidden: sizes of ε, drawn from [0, 1), and of the hidden layer of G.
    latent:        how many features there are where only classifiers travel (0: as many as the network with the fewest has).
    compat:        "paper" or "code" (see above).
    """

    share: Literal["auto", "full", "head"] = "auto"
    alpha: NotNegative = 1.0
    beta: NotNegative = 1.0
    decay: NonZeroShare = 0.98
    iterations: Whole = 50
    generator_lr: Positive = 3e-4
    weight_decay: NotNegative = 1e-2
    batch: Several = 32
    noise: Count = 32
    hidden: Count = 256
    latent: Whole = 0
    compat: Compat = "paper"

    weights: State = kept()
    generator: State = kept()
    seen: Tensor = kept()
    network: nn.Module = made()
    wide: int = made()
    full: bool = made()

    info = Info(
        "data-free",
        "any: a common classifier, or parts of one network",
        "official code read",
        "E",
        auxiliary="none (label counts, and a generator of features)",
        own_networks=True,
        personal=True,
    )
    parts = (WEIGHTS, _HEAD, _GENERATOR, _SEEN, COUNTS)

    @property
    def as_set(self) -> Info:
        """Group and models by what travels, which with "auto" is known only after `setup`."""
        if self.share == "auto" and not hasattr(self, "full"):
            return self.info  # the networks decide
        full = self.full if self.share == "auto" else self.share == "full"
        own = self.info.own_networks and self.share != "full"
        return replace(self.info, group="E" if full else "F", global_model=full, personal=not full, own_networks=own)

    def tailor(self, module: nn.Module, taps: Taps) -> nn.Module:
        """A network of its own with the common number of features, even where nothing changes: its head is the common one."""
        return with_features(copy.deepcopy(module), taps, self.wide)

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """The main network or a common head, an untrained generator, and no class seen yet."""
        alike = all(plan.piece.reference is world.main for plan in world.plans.values())
        self.full = self.share == "full" or (self.share == "auto" and alike)
        if self.full:
            world.refuse_own_networks(self.info.title)
            self.world, self.weights, features = world, world.main.initial.copy(), world.main.taps.features
        else:
            self.wide = features = common_features(world, self.latent)
            super().setup(world)
            self.weights = common_head(self.pieces.values())
        self.network, self.generator = started(world, lambda: LatentGenerator(self.noise, world.classes, self.hidden, features))
        self.seen = torch.zeros(world.classes, dtype=torch.bool, device=world.place)

    def piece(self, device: Device, round: int) -> Piece:
        """What fits the device now if parts of one network travel, else its tailored network."""
        return device.piece if self.full else super().piece(device, round)

    def alike(self, device: Device, piece: Piece) -> bytes:
        """Holders of the same part get the same message; if heads travel, everybody does."""
        return piece.view.key() if self.full else b""

    def weights_for(self, piece: Piece) -> State:
        """The piece's part of the main network; nothing if heads travel."""
        return piece.view.extract(self.weights) if self.full else {}

    def merge(self, replies: Replies, round: int) -> None:
        """The mean by samples of what came back, then the generator's training on the clients' classifiers."""
        if not replies:
            return
        if self.full:
            given = [Contribution(r.piece.view, r.message["weights"], float(r.samples), client=r.device.id) for r in replies]
            self.weights = self.mean(self.weights, given)
        else:
            self.weights = mean_classifier([r.message["head"] for r in replies], [r.samples for r in replies])
        counts = counts_of(replies, self.most_of_class).to(self.world.place)
        self.seen = self.seen | (counts.sum(0) > 0)
        if self.iterations and bool(self.seen.any()):
            with torch_seeded(self.world.seed, "fedgen", round):
                self._teach([Classifier.of(reply) for reply in replies], shares(counts, self.compat))

    def _teach(self, classifiers: Sequence[Classifier], share: Tensor) -> None:
        work, place = self.world.recorder, self.world.place
        optim = Optim("adam", self.generator_lr, weight_decay=self.weight_decay)
        student, held = learner(self.world, self.network, self.generator, optim), self.seen.nonzero()[:, 0].cpu()
        with work.session():
            fixed = [c.kept(work, number) for number, c in enumerate(classifiers)]
            known = list(zip(fixed, work.keep("share", {"share": share})["share"].unbind(), strict=True))
            body = partial(step, self.network, student, known, self.compat)
            kind = ("teach", tuple(tuple(c.head["weight"].shape) for c in classifiers))
            for _ in range(self.iterations):
                noise = torch.rand(self.batch, self.noise).to(place)
                labels = held[torch.randint(len(held), (self.batch,))].to(place)
                work.do(kind, body, noise, labels)
            self.generator = student.state()

    def model_for(self, device: Device) -> Model:
        """The device's part of the main network, or its own network, which has the common head until it has trained."""
        if self.full:
            return Model(device.piece.reference, device.piece.view, self.weights_for(device.piece))
        own = super().model_for(device)
        known = bool(self.world.store.get(device.id))
        return own if known else replace(own, state=with_head(own.state, own.reference.taps.head, self.weights))

    def global_model(self) -> Model | None:
        """The main network, if parts of it travel."""
        return Model(self.world.main, self.world.main.full, self.weights) if self.full else None

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def start(self, client: Client, received: Message) -> Tensors:
        """The received part, or the client's own network with the received head."""
        if "weights" in received:
            return received["weights"]
        return with_head(super().start(client, received), client.reference.taps.head, received["head"])

    def phases(self, client: Client, received: Message) -> Phases:
        """Local training, with the two terms of generated features once a generator came."""
        if "generator" not in received:
            return [client.train.phase(client.round)]
        fallen, head = self.decay ** (client.round - 1), client.reference.taps.head
        objective = partial(generative, head=head, count=self.batch, noise=self.noise, classes=client.classes)
        given = generative_given(client, received, self.alpha * fallen, self.beta * fallen)
        return [client.train.phase(client.round, objective=objective, given=given)]

    def keep(self, client: Client, received: Message) -> None:
        """The client keeps its network if only heads travel."""
        if "head" in received:
            super().keep(client, received)

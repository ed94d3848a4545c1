"""FedHKD: mean features and mean soft predictions of every class, clipped and noised, instead of public data."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from math import inf, sqrt
from typing import Literal

import torch

from nestling.methods.allocation import Ladder, ladder
from nestling.methods.api import Client, Contribution, Device, Info, Message, Model, Phases, Piece, Replies, State, World
from nestling.methods.distill import gaussian
from nestling.methods.distill.embedded import embedded_ladder
from nestling.methods.distill.hyper_knowledge import clipped, noised, noised_alike, taught
from nestling.methods.kept import kept, made
from nestling.methods.part import WEIGHTS, Tensors
from nestling.methods.representation.class_means import ByClass, class_means, outputs_of, spread
from nestling.methods.representation.class_table import STATISTICS
from nestling.settings import BetweenZeroAndOne, Compat, Count, NotNegative, Positive

EMBEDDING = 32


@dataclass
class FedHKD(ByClass):
    """FedHKD (Chen et al., "The Best of Both Worlds: Accurate Global and Personalized Models through Federated Learning with Data-Free
    Hyper-Knowledge Distillation", ICLR 2023).

    Idea: a client's hyper-knowledge of a class is its mean feature vector H_c and its mean soft prediction Q_c. Their averages teach
    every client's classifier what to say of H̄_c, and pull its features towards H̄_c.
    Loss: cross-entropy + λ·mean over classes of ‖softmax(head(H̄_c)/T) − Q̄_c‖ + γ·mean of ‖features − H̄_y‖, where H̄ is known.
    Travels: C·(d + C) numbers at most (up the classes a client holds, with their counts; down those the server knows), and in the
    variant "weights" the network. Merge: per class, the mean weighted by the clients' rows of it; weights by the mean over views.
    Differs from the released code (`compat = "code"`): there the last client's hyper-knowledge replaces all others', nothing is
    clipped, all classes get one noise vector of standard deviation 2, and the distances are KL (element mean) and mean square.

    Privacy (`compat = "paper"`): features are clipped to norm ζ, so that replacing one of the n_c inputs of a class moves H_c by at
    most 2ζ/n_c; each class gets Gaussian noise of its own, of σ·2ζ/n_c per coordinate, with σ from (ε, δ) by the analytic Gaussian
    mechanism (see `gaussian`). An input counts in one class only, so that a round's release as a whole is (ε, δ)-private; `spent(t)`
    is the ε of t rounds. What that covers, and what not: neighbours differ in one input; labels and counts are told openly. The
    network that makes the features counts as fixed, as published; in truth it was trained on the same rows, and what it remembers of
    them is not covered: this is no guarantee for a run from end to end. Q_c gets noise with `protect = "both"` only (sensitivity
    √2/n_c; the two share the budget), and weights never do. On a real device the noise is fresh entropy of that machine in every
    round, so that the server cannot take it off; it comes from a statistical generator (PCG64) seeded so, not from a cryptographic one.
    In a simulation it follows from the experiment's seed, as all chance does: whoever has the seed can draw it again.

    variant:     "hyper" (FedHKD*: networks of any kind stay with their clients) or "weights" (the paper's main form: parts of one
                 network are averaged too; where devices hold different widths of it, a linear layer gives them features of one size).
    size:        d, the number of features (0: as many as the network with the fewest has; behind that linear layer, 32).
    lam, gamma:  λ and γ.
    temperature: T.
    clip:        ζ (its value, ε and δ are ours).
    epsilon:     ε of one round; 0 adds no noise and promises nothing.
    delta:       δ.
    protect:     which hyper-knowledge gets noise: "features" (as published) or "both".
    least:       a client does not tell of classes of which it has fewer rows (under-represented classes; the number is ours).
    compat:      see above.
    """

    variant: Literal["hyper", "weights"] = "hyper"
    lam: NotNegative = 0.05
    gamma: NotNegative = 0.05
    temperature: Positive = 0.5
    clip: Positive = 3.0
    epsilon: NotNegative = 8.0
    delta: BetweenZeroAndOne = 1e-5
    protect: Literal["features", "both"] = "features"
    least: Count = 5
    compat: Compat = "paper"

    weights: State = kept()
    _ladder: Ladder = made()

    by_rule = True
    info = Info.of_own_networks(
        "data-free", "any: networks never meet, features have one size (or width, with weights)", "official code read", "F"
    )
    parts = (*ByClass.parts, replace(WEIGHTS, when=lambda method: method.merges))

    @property
    def as_set(self) -> Info:
        """With weights it is a method of one network, which is the global model."""
        merged = replace(self.info, own_networks=False, personal=False, global_model=True, group="E")
        return merged if self.merges else self.info

    @property
    def fewest(self) -> int:
        """The setting `least`."""
        return self.least

    @property
    def merges(self) -> bool:
        """Whether weights travel too."""
        return self.variant == "weights"

    @property
    def sigma(self) -> float:
        """The noise of each released mean, in units of its sensitivity."""
        if self.compat == "code" or not self.epsilon:
            return 0.0
        return gaussian.multiplier(self.epsilon, self.delta) * sqrt(self._releases)

    @property
    def _releases(self) -> int:
        return 2 if self.protect == "both" else 1

    def spent(self, rounds: int) -> float:
        """The ε that a client has spent at δ after taking part in so many rounds (see Privacy)."""
        return gaussian.spent(self.sigma, self.delta, rounds * self._releases) if self.sigma else inf * rounds if rounds else 0.0

    def shapes(self, classes: int) -> dict[str, tuple[int, ...]]:
        """Per class, its mean features and its mean soft prediction."""
        return {"features": (self.wide,), "soft": (classes,)}

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """An empty table; with weights also the widths of one network, embedded if their features would differ in size."""
        self.weights = {}
        if not self.merges:
            super().setup(world)
            return
        world.refuse_own_networks("FedHKD with weights")
        self.world, features = world, world.main.taps.features
        whole = all(plan.piece.view.keep.all() and not world.varies(plan) for plan in world.plans.values())
        self.wide = self.size or (features if whole else EMBEDDING)
        self.know_nothing(world)
        alike = whole and self.wide == features
        self._ladder = ladder(world, world.main, [world.main.full]) if alike else embedded_ladder(world, self.wide)
        self.weights = self._ladder.pieces[0].reference.initial.copy()

    def piece(self, device: Device, round: int) -> Piece:
        """With weights the width that fits now, else the client's own network."""
        return self._ladder.of(device, round) if self.merges else super().piece(device, round)

    def alike(self, device: Device, piece: Piece) -> Hashable:
        """With weights, holders of the same width get the same message."""
        return piece.view.key() if self.merges else super().alike(device, piece)

    def weights_for(self, piece: Piece) -> State:
        """The piece's part of the averaged network."""
        return piece.view.extract(self.weights)

    def merge(self, replies: Replies, round: int) -> None:
        """The mean per class by rows (in "code" the last client's word alone) and, with weights, the mean over views."""
        for some in [[reply] for reply in replies] if self.compat == "code" else [replies]:
            self.table = self.table.after(some, robust=self.robust, most=self.most_of_class)
        if self.merges:
            own = [Contribution(r.piece.view, r.message["weights"], float(r.samples), client=r.device.id) for r in replies]
            self.weights = self.fuse(self.weights, own)

    def model_for(self, device: Device) -> Model:
        """With weights the device's part of the averaged network, else its own."""
        return self._model(self.piece(device, 0)) if self.merges else super().model_for(device)

    def global_model(self) -> Model | None:
        """With weights, the widest part that any device holds at rest."""
        # Nobody has trained what no device can hold.
        return self._model(self._ladder.pieces[max(map(self._ladder.at_rest, self.world.plans))]) if self.merges else None

    def _model(self, piece: Piece) -> Model:
        return Model(piece.reference, piece.view, self.weights_for(piece))

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def start(self, client: Client, received: Message) -> Tensors:
        """With weights the received ones, else the client's own."""
        return received["weights"] if self.merges else super().start(client, received)

    def phases(self, client: Client, received: Message) -> Phases:
        """Local training, with both terms of hyper-knowledge once the server knows any."""
        if STATISTICS not in received:
            return [client.train.phase(client.round)]
        code, head = self.compat == "code", client.reference.taps.head
        objective = partial(taught, lam=self.lam, gamma=self.gamma, temperature=self.temperature, code=code, head=head)
        return [client.train.phase(client.round, objective=objective, given=spread(received, client.classes))]

    def statistics(self, client: Client) -> State:
        """Mean features and soft predictions per class: clipped and noised, or as in the released code."""
        features, logits, y = outputs_of(client)
        if self.compat == "paper":
            features = clipped(features, self.clip)
        soft = class_means(torch.softmax(logits / self.temperature, 1), y, client.classes)
        means = class_means(features, y, client.classes)
        chance = client.secret_chance("hyper-knowledge")
        if self.compat == "code":
            return {"features": noised_alike(means, chance), "soft": soft}
        scale = self.sigma / torch.bincount(client.y, minlength=client.classes).clamp(min=1).to(means)[:, None]
        return noised(means, soft, scale, self.clip, self.protect == "both", chance)

    def keep(self, client: Client, received: Message) -> None:
        """The client keeps its own network if weights do not travel."""
        if not self.merges:
            super().keep(client, received)

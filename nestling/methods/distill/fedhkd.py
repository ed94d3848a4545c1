"""FedHKD: mean features and mean soft predictions of every class, clipped and noised, instead of public data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, sqrt

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nestling.devices.fit import RATIOS
from nestling.methods.allocation import Ladder, ladder
from nestling.methods.api import (
    Client,
    Contribution,
    Device,
    Info,
    Message,
    Model,
    Phase,
    Piece,
    Reference,
    Reply,
    State,
    View,
    World,
)
from nestling.methods.distill import gaussian
from nestling.methods.kept import made
from nestling.methods.representation.class_means import STATISTICS, ByClass, class_means, gap, look, spread
from nestling.models.embedding import with_embedding
from nestling.schema import require
from nestling.seeds import stream, torch_seeded
from nestling.training.objectives import Batch, Given, Net, distillation, see
from nestling.views import merge, prefix
from nestling.views.flat import only, pack

ALLOWED = {"variant": ("hyper", "weights"), "protect": ("features", "both"), "compat": ("paper", "code")}
EMBEDDING = 32
_CODE_NOISE = 2.0
_SOFT = sqrt(2.0)  # how far two soft predictions can be apart


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
    √2/n_c; the two share the budget), and weights never do.

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

    variant: str = "hyper"
    lam: float = 0.05
    gamma: float = 0.05
    temperature: float = 0.5
    clip: float = 3.0
    epsilon: float = 8.0
    delta: float = 1e-5
    protect: str = "features"
    least: int = 5
    compat: str = "paper"

    weights: State = made()
    _ladder: Ladder = made()
    _messages: dict[bytes, Message] = made()

    info = Info.of_own_networks(
        "data-free", "any: networks never meet, features have one size (or width, with weights)", "official code read", "F"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in ALLOWED.items():
            value = getattr(self, name)
            require(value in allowed, f"unknown {name} {value!r}", f"method.{name}", f"allowed: {', '.join(allowed)}")
        for name in ("lam", "gamma", "epsilon"):
            require(getattr(self, name) >= 0, "must not be negative", f"method.{name}")
        for name in ("temperature", "clip"):
            require(getattr(self, name) > 0, "must be above 0", f"method.{name}")
        require(0 < self.delta < 1, "must be between 0 and 1", "method.delta")
        require(self.least >= 1, "must be at least 1", "method.least")

    @property
    def as_set(self) -> Info:
        if not self.merges:
            return self.info
        return replace(self.info, own_networks=False, personal=False, global_model=True, group="E")

    @property
    def fewest(self) -> int:
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
        return {"features": (self.wide,), "soft": (classes,)}

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        if self.merges:
            self._setup_weights(world)
        else:
            super().setup(world)

    def _setup_weights(self, world: World) -> None:
        world.refuse_own_networks("FedHKD with weights")
        self.world, self._messages = world, {}
        whole = all(plan.piece.view.keep.all() and not world.varies(plan) for plan in world.plans.values())
        self.wide = self.size or (world.main.taps.features if whole else EMBEDDING)
        self.know_nothing(world)
        alike = whole and self.wide == world.main.taps.features
        reference = world.main if alike else _embedded(world, self.wide)
        self._ladder = ladder(world, reference, [reference.full] if alike else _views(reference))
        self.weights = reference.initial.copy()

    def piece(self, device: Device, round: int) -> Piece:
        return self._ladder.of(device, round) if self.merges else super().piece(device, round)

    def send(self, device: Device, piece: Piece, round: int) -> Message:
        known = super().send(device, piece, round)
        if not self.merges:
            return known
        key = piece.view.key()
        if key not in self._messages:
            self._messages[key] = Message({**known.parts, "weights": piece.view.extract(self.weights)}, known.facts)
        return self._messages[key]

    def expects(self, piece: Piece, sent: Message) -> Mapping[str, Mapping[str, Tensor]]:
        return {**super().expects(piece, sent), **({"weights": sent["weights"]} if self.merges else {})}

    def merge(self, replies: Sequence[Reply], round: int) -> None:
        self._sent, self._messages = None, {}
        for some in [[reply] for reply in replies] if self.compat == "code" else [replies]:
            self.table = self.table.told(some)
        if self.merges:
            own = [Contribution(r.piece.view, r.message["weights"], float(r.samples)) for r in replies]
            self.weights = merge(self.weights, own)

    def model_for(self, device: Device) -> Model:
        if not self.merges:
            return super().model_for(device)
        piece = self.piece(device, 0)
        return Model(piece.reference, piece.view, piece.view.extract(self.weights))

    def global_model(self) -> Model | None:
        if not self.merges:
            return None
        # What no device can hold nobody has trained.
        piece = self._ladder.pieces[max(self._ladder.at_rest(tier) for tier in self.world.plans)]
        return Model(piece.reference, piece.view, piece.view.extract(self.weights))

    def state(self) -> dict[str, State]:
        return {**super().state(), **({"weights": self.weights} if self.merges else {})}

    def restore(self, state: Mapping[str, State]) -> None:
        super().restore(state)
        self._messages = {}
        if self.merges:
            self.weights = pack(state["weights"])

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def start(self, client: Client, received: Message) -> Mapping[str, Tensor]:
        return received["weights"] if self.merges else super().start(client, received)

    def phases(self, client: Client, received: Message) -> Sequence[Phase]:
        if STATISTICS not in received:
            return [client.train.phase(client.round)]
        objective = partial(
            _taught,
            lam=self.lam,
            gamma=self.gamma,
            temperature=self.temperature,
            code=self.compat == "code",
            head=client.reference.taps.head,
        )
        return [client.train.phase(client.round, objective=objective, given=spread(received, client.classes))]

    def statistics(self, client: Client) -> State:
        features, logits, y = look(client)
        if self.compat == "paper":
            features = clipped(features, self.clip)
        soft = class_means(torch.softmax(logits / self.temperature, 1), y, client.classes)
        return self._noised(client, class_means(features, y, client.classes), soft)

    def _noised(self, client: Client, features: Tensor, soft: Tensor) -> State:
        chance = stream(client.site.seed, "hyper-knowledge", client.id, client.round)
        if self.compat == "code":
            same = torch.from_numpy(chance.normal(scale=_CODE_NOISE, size=features.shape[1]))
            return {"features": features + same.to(features), "soft": soft}
        scale = self.sigma / torch.bincount(client.y, minlength=client.classes).clamp(min=1).to(features)[:, None]
        draws = [torch.from_numpy(chance.normal(size=tuple(t.shape))).to(t) for t in (features, soft)]
        features = features + 2 * self.clip * scale * draws[0]
        if self.protect == "both":
            soft = (soft + _SOFT * scale * draws[1]).clamp(min=1e-6)
            soft = soft / soft.sum(1, keepdim=True)
        return {"features": features, "soft": soft}

    def reply(self, client: Client, received: Message) -> Message:
        if not self.merges:
            return super().reply(client, received)
        told = self.tell(client, self.statistics(client))
        return Message({**told.parts, "weights": only(client.weights, client.view.names)}, told.facts)


def clipped(features: Tensor, most: float) -> Tensor:
    """Every row with its norm cut to at most `most`."""
    return features * (most / features.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1)


def _taught(
    net: Net, batch: Batch, given: Given, *, lam: float, gamma: float, temperature: float, code: bool, head: str
) -> Tensor:
    logits, features = see(net, batch.x, head)
    said = net.module.get_submodule(head)(given["features"])
    if code:
        wrong = _divergence(said, given, temperature)
        far = gap(features, batch.y, given)
    else:
        wrong = (_norm(torch.softmax(said / temperature, 1) - given["soft"]) * given["known"]).sum() / given["known"].sum()
        far = _norm(features - given["features"][batch.y]) * given["known"][batch.y]
    return batch.mean(F.cross_entropy(logits, batch.y, reduction="none") + gamma * far) + lam * wrong


def _norm(rows: Tensor) -> Tensor:
    """The rows' norms, with a gradient at 0 too."""
    return rows.square().sum(1).add(1e-12).sqrt()


def _divergence(said: Tensor, given: Given, temperature: float) -> Tensor:
    """KL from the received soft predictions to what the classifier says, the mean over classes and entries as in the code."""
    wanted = temperature * given["soft"].clamp(min=1e-12).log()
    classes = Batch(said, said, said, mask=given["known"] > 0)
    return distillation(wanted, said, temperature, classes) / (temperature**2 * said.shape[1])


def _embedded(world: World, size: int) -> Reference:
    """The main network with an embedding."""
    with torch_seeded(world.seed, "network", "embedded"):
        module = with_embedding(world.main.module, world.main.taps, size)
    return world.adopt("main (embedded)", module)


def _views(reference: Reference) -> list[View]:
    """The network at every width; the embedding, whose size is common to all, stays whole."""
    axes, (body, _, _) = reference.axes, reference.taps.head.rpartition(".")
    channel = axes.dims[f"{body}.embed.weight"][0]
    assert channel is not None
    whole = axes.names[int(np.searchsorted(axes.offsets, channel[0], side="right")) - 1]
    return [prefix(axes, {name: 1.0 if name == whole else ratio for name in axes.names}) for ratio in RATIOS]

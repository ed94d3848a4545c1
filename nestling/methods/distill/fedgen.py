"""FedGen: a generator of features, taught by the clients' classifiers, tells every client what others' classes look like."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.methods.api import Client, Contribution, Device, Info, Message, Model, Phase, Piece, Reply, State, World
from nestling.methods.heads import columns_of, head_of, with_head
from nestling.methods.kept import made
from nestling.methods.personal import Personal, common_features, keep_weights
from nestling.models.embedding import with_features
from nestling.models.generators import diversity
from nestling.models.latent_generator import LatentGenerator, generated
from nestling.models.taps import Taps
from nestling.schema import require
from nestling.seeds import derive, torch_seeded
from nestling.training.distiller import Student
from nestling.training.noise import uniform
from nestling.training.objectives import Batch, Given, Net, distillation
from nestling.training.optimisers import Optim
from nestling.training.recorder import Recorder
from nestling.views import merge
from nestling.views.flat import only, pack

ALLOWED = {"share": ("auto", "full", "head"), "compat": ("paper", "code")}


@dataclass(frozen=True)
class Classifier:
    """A client's last layer, and which of the generated features it reads (None: all)."""

    head: Mapping[str, Tensor]
    columns: Tensor | None = None

    def kept(self, work: Recorder, number: int) -> Classifier:
        """The same, of the `number`-th client, where recorded work can read it."""
        columns = {} if self.columns is None else {"columns": self.columns}
        found = work.keep(("classifier", number), {**self.head, **columns})
        return Classifier({name: found[name] for name in self.head}, found.get("columns"))

    def __call__(self, z: Tensor) -> Tensor:
        """Its logits."""
        return F.linear(z if self.columns is None else z[:, self.columns], self.head["weight"], self.head.get("bias"))


@dataclass
class FedGen(Personal):
    """FedGen (Zhu, Hong, Zhou, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021).

    Idea: the server trains a generator G of features, not of inputs, so that the clients' classifiers see in G(ε, y) what they know
    as class y; clients then train their own classifier on features of classes that they rarely see.
    Loss: from the second round on, cross-entropy + β_t·KL(head(G(ε, y)) ‖ f(x)), the first held still, + (B_g/B)·α_t·cross-entropy
    of head(G(ε, ŷ)) against ŷ, drawn evenly from the classes that anybody holds; α_t and β_t fall by `decay` every round. G
    minimises Σ_k mean_i a_{k,y_i}·CE(head_k(G(ε_i, y_i)), y_i) + diversity, where a_{k,y} is the client's share of the class.
    Travels: the client's part of the network, or its classifier alone, down and up; G down; numbers of samples by class up. Merge:
    mean by n_k of what travels.
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

    share: str = "auto"
    alpha: float = 1.0
    beta: float = 1.0
    decay: float = 0.98
    iterations: int = 50
    generator_lr: float = 3e-4
    weight_decay: float = 1e-2
    batch: int = 32
    noise: int = 32
    hidden: int = 256
    latent: int = 0
    compat: str = "paper"

    weights: State = made()
    generator: State = made()
    seen: Tensor = made()
    network: nn.Module = made()
    wide: int = made()
    full: bool = made()
    _sent: dict[bytes, Message] = made()

    info = Info(
        "data-free",
        "any: a common classifier, or parts of one network",
        "official code read",
        "E",
        auxiliary="none (label counts, and a generator of features)",
        own_networks=True,
        personal=True,
    )

    def __post_init__(self) -> None:
        for name, allowed in ALLOWED.items():
            value = getattr(self, name)
            require(value in allowed, f"unknown {name} {value!r}", f"method.{name}", f"allowed: {', '.join(allowed)}")
        for name in ("alpha", "beta", "weight_decay", "iterations", "latent"):
            require(getattr(self, name) >= 0, "must not be negative", f"method.{name}")
        require(0 < self.decay <= 1, "must be in (0, 1]", "method.decay")
        require(self.generator_lr > 0, "must be above 0", "method.generator_lr")
        require(self.batch >= 2, "must be at least 2 (the generator normalises over the batch)", "method.batch")
        for name in ("noise", "hidden"):
            require(getattr(self, name) >= 1, "must be at least 1", f"method.{name}")

    @property
    def as_set(self) -> Info:
        if self.share == "auto" and not hasattr(self, "full"):
            return self.info  # the networks decide
        full = self.full if self.share == "auto" else self.share == "full"
        own = self.info.own_networks and self.share != "full"
        return replace(self.info, global_model=full, personal=not full, own_networks=own)

    def tailor(self, module: nn.Module, taps: Taps) -> nn.Module:
        # A network of its own also where nothing is changed: its head is the common one, whatever it is a part of.
        return with_features(copy.deepcopy(module), taps, self.wide)

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        alike = all(plan.piece.reference is world.main for plan in world.plans.values())
        self.full = self.share == "full" or (self.share == "auto" and alike)
        if self.full:
            world.refuse_own_networks(self.info.title)
            self.world, self.pieces = world, {tier: plan.piece for tier, plan in world.plans.items()}
            self.weights, features = world.main.initial.copy(), world.main.taps.features
        else:
            self.wide = common_features(world, self.latent)
            super().setup(world)
            reference = next(iter(self.pieces.values())).reference
            self.weights, features = pack(head_of(reference.initial, reference.taps.head)), self.wide
        with torch_seeded(world.seed, "generator"):
            made = LatentGenerator(self.noise, world.classes, self.hidden, features)
        self.network = made.to(world.place)
        self.generator = {name: t.detach().clone() for name, t in self.network.state_dict().items()}
        self.seen, self._sent = torch.zeros(world.classes, dtype=torch.bool, device=world.place), {}

    def piece(self, device: Device, round: int) -> Piece:
        return device.piece if self.full else super().piece(device, round)

    def send(self, device: Device, piece: Piece, round: int) -> Message:
        key = piece.view.key() if self.full else b""
        if key not in self._sent:
            parts: dict[str, Mapping[str, Tensor]] = (
                {"weights": piece.view.extract(self.weights)} if self.full else {"head": self.weights}
            )
            # Before anybody has answered the generator knows nothing.
            taught = {"generator": self.generator, "classes": {"seen": self.seen}} if self.seen.any() else {}
            self._sent[key] = Message({**parts, **taught})
        return self._sent[key]

    def expects(self, piece: Piece, sent: Message) -> Mapping[str, Mapping[str, Tensor]]:
        kind = "weights" if self.full else "head"
        return {kind: sent[kind], "counts": {"classes": torch.zeros(self.world.classes, dtype=torch.int32)}}

    def merge(self, replies: Sequence[Reply], round: int) -> None:
        self._sent = {}
        if not replies:
            return
        if self.full:
            given = [Contribution(r.piece.view, r.message["weights"], float(r.samples)) for r in replies]
            self.weights = merge(self.weights, given)
        else:
            self.weights = pack(_mean([r.message["head"] for r in replies], [r.samples for r in replies]))
        # What a client counted is its word: fewer than none would make other clients' shares negative.
        counts = torch.stack([r.message["counts"]["classes"] for r in replies]).clamp(min=0).to(self.world.place)
        self.seen = self.seen | (counts.sum(0) > 0)
        if self.iterations and bool(self.seen.any()):
            with torch_seeded(self.world.seed, "fedgen", round):
                self._teach([self._classifier(r) for r in replies], shares(counts, self.compat))

    def _classifier(self, reply: Reply) -> Classifier:
        if not self.full:
            return Classifier(reply.message["head"])
        head = reply.piece.reference.taps.head
        return Classifier(head_of(reply.message["weights"], head), columns_of(reply.piece.reference, reply.piece.view, head))

    def _teach(self, classifiers: Sequence[Classifier], share: Tensor) -> None:
        """G's steps of a round."""
        names = [name for name, _ in self.network.named_parameters()]
        optim = Optim("adam", self.generator_lr, weight_decay=self.weight_decay)
        work = self.world.recorder
        student = work.student("generator", self.generator, names, self._made, optim)
        held, place = self.seen.nonzero()[:, 0].cpu(), self.world.place
        with work.session():
            fixed = [c.kept(work, number) for number, c in enumerate(classifiers)]
            body = partial(self._step, student, fixed, work.keep("share", {"share": share})["share"])
            kind = ("teach", tuple(tuple(c.head["weight"].shape) for c in classifiers))
            for _ in range(self.iterations):
                noise = torch.rand(self.batch, self.noise).to(place)
                labels = held[torch.randint(len(held), (self.batch,))].to(place)
                work.do(kind, body, noise, labels)
            self.generator = student.state()

    def _step(self, student: Student, classifiers: Sequence[Classifier], share: Tensor, noise: Tensor, labels: Tensor) -> None:
        z = student.forward(student.tensors, (noise, labels), 0)  # type: ignore[arg-type]
        known = [weighted(c(z), labels, a[labels], self.compat) for c, a in zip(classifiers, share.unbind(), strict=True)]
        student.update(torch.stack(known).sum() + diversity(noise, z))

    def _made(self, state: Mapping[str, Tensor], given: Any, number: int) -> Tensor:
        return torch.func.functional_call(self.network.train(), dict(state), given)

    def model_for(self, device: Device) -> Model:
        if self.full:
            piece = self.piece(device, 0)
            return Model(piece.reference, piece.view, piece.view.extract(self.weights))
        own, kept = super().model_for(device), self.world.store.get(device.id)
        return own if kept else Model(own.reference, own.view, with_head(own.state, own.reference.taps.head, self.weights))

    def global_model(self) -> Model | None:
        return Model(self.world.main, self.world.main.full, self.weights) if self.full else None

    def state(self) -> dict[str, State]:
        return {"weights": self.weights, "generator": self.generator, "classes": {"seen": self.seen}}

    def restore(self, state: Mapping[str, State]) -> None:
        self.weights, self._sent = pack(state["weights"]), {}
        self.generator, self.seen = dict(state["generator"]), state["classes"]["seen"].to(self.world.place)

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def start(self, client: Client, received: Message) -> Mapping[str, Tensor]:
        if "weights" in received:
            return received["weights"]
        return with_head(super().start(client, received), client.reference.taps.head, received["head"])

    def phases(self, client: Client, received: Message) -> Sequence[Phase]:
        if "generator" not in received:
            return [client.train.phase(client.round)]
        place, fallen = client.place, self.decay ** (client.round - 1)
        head = client.reference.taps.head
        given = {
            **{f"generator/{name}": t for name, t in received["generator"].items()},
            "seen": received["classes"]["seen"],
            "strength": torch.tensor([self.alpha * fallen, self.beta * fallen], device=place),
            "key": torch.tensor(derive(client.site.seed, "fedgen", client.id, client.round), device=place),
        }
        columns = columns_of(client.reference, client.view, head) if "weights" in received else None
        given |= {} if columns is None else {"columns": columns}
        objective = partial(_generative, head=head, made=self.batch, noise=self.noise, classes=client.classes)
        return [client.train.phase(client.round, objective=objective, given=given)]

    def reply(self, client: Client, received: Message) -> Message:
        counts = {"classes": client.class_counts().to(torch.int32)}
        if "weights" in received:
            kind, parts = "weights", only(client.weights, client.view.names)
        else:
            keep_weights(client)
            kind, parts = "head", head_of(client.weights, client.reference.taps.head)
        return Message({kind: parts, "counts": counts}, {"samples": client.samples})


def shares(counts: Tensor, compat: str = "paper") -> Tensor:
    """a_{k,y} from (clients, classes) numbers of samples: each client's share of a class, 0 where nobody has any."""
    counted = counts.double() + (1 if compat == "code" else 0)
    return (counted / counted.sum(0).clamp(min=1)).float()


def weighted(logits: Tensor, labels: Tensor, share: Tensor, compat: str = "paper") -> Tensor:
    """A classifier's part of G's loss: every sample counts by the client's share of its class."""
    each = F.cross_entropy(logits, labels, reduction="none")
    return each.mean() * share.mean() if compat == "code" else (each * share).mean()


def _generative(net: Net, batch: Batch, given: Given, *, head: str, made: int, noise: int, classes: int) -> Tensor:
    """Cross-entropy, and what the generator knows of the batch's labels and of others'."""
    logits = net(batch.x)
    loss = batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))
    state = {name.removeprefix("generator/"): t for name, t in given.items() if name.startswith("generator/")}
    classifier = Classifier(head_of(net.params, head), given.get("columns"))
    key, number, (alpha, beta) = given["key"], 3 * batch.counter, given["strength"]
    teacher = classifier(generated(state, uniform(key, number, (len(batch.x), noise)), batch.y, classes))
    loss = loss + beta * distillation(teacher.detach(), logits, batch=batch)
    labels = _drawn(given["seen"], uniform(key, number + 1, (made,)))
    others = classifier(generated(state, uniform(key, number + 2, (made, noise)), labels, classes))
    rows = len(batch.x) if batch.mask is None else batch.mask.sum()
    return loss + made / rows * alpha * F.cross_entropy(others, labels)


def _drawn(seen: Tensor, uniform: Tensor) -> Tensor:
    """Labels, evenly drawn from the classes that are flagged."""
    order = torch.argsort((~seen).to(torch.int8), stable=True)
    return order[(uniform * seen.sum()).long()]


def _mean(states: Sequence[Mapping[str, Tensor]], samples: Sequence[int]) -> State:
    share = torch.tensor(samples, dtype=torch.float64) / sum(samples)
    return {name: torch.tensordot(share.to(t), torch.stack([s[name] for s in states]), 1) for name, t in states[0].items()}

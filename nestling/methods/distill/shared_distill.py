"""Shared-distill: unequal clients fused by distillation into one global model, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from nestling.methods.api import Client, Device, Info, Message, Phase, Piece, Replies
from nestling.methods.distill.architectures import PerArchitecture, Weighting, held_parts, noise_inputs, said_of
from nestling.settings import Count, NotNegative, Positive, Whole
from nestling.training.distiller import Distillation, combine, logits_of
from nestling.training.inner import with_inner
from nestling.training.optimisers import Optim
from nestling.views import to_spec
from nestling.views.nested import prepare


@dataclass
class SharedDistill(PerArchitecture):
    """Shared-distill: the TinyML architecture this project starts from, fused by knowledge distillation.

    Idea: devices train what fits them, parts of one super-network or structurally different compact networks; the server treats
    what returns as an ensemble of teachers and distils it into one unified global model on a small unlabelled proxy set. The global
    model then goes back: cut to each device's part, or distilled once more into the networks that share no structure with it.
    Loss: clients cross-entropy of their network and, where it is a part of the super-network, with weight `inner` of a smaller part
    inside it, in turn; server τ²·KL(teachers ‖ student), for the full student and for the devices' parts of it in turn.
    Travels: each client's network down and up. Merge: networks of one kind are averaged (n_k) to start the student from, then
    distillation.
    Differs from the paper: its abstract names the two fusions only; the proxy (1 % of the training rows, or noise when there is
    none), the start from the average and the turn over the parts are our reading.

    temperature, steps, batch, lr: the distillation.
    weighting:  how teachers are combined: "samples" (by n_k), "variance" (per input, by the spread of the logits) or "uniform".
    start_from: where the student starts: "average" of the clients' networks, or "keep" the last global model.
    noise:      how many noise inputs stand in for the proxy when there is no public data.
    inner:      the weight of the smaller part's loss; 0 leaves it out.
    """

    temperature: Positive = 3.0
    steps: Whole = 50
    batch: Count = 50
    lr: Positive = 5e-4
    weighting: Weighting = "samples"
    start_from: Literal["average", "keep"] = "average"
    noise: Count = 256
    inner: NotNegative = 1.0

    info = Info(
        "fusion",
        "any: nested parts and unlike networks",
        "from paper (abstract only); the design is ours",
        "D",
        auxiliary="server proxy, unlabelled",
        own_networks=True,
        title="Shared-distill",
        paper="TinyML model-heterogeneous FL (abstract)",
    )

    def facts(self, device: Device, piece: Piece, round: int) -> Mapping[str, Any]:
        """The smaller parts inside the device's own, unless `inner` is 0."""
        own, parts = piece.view, held_parts(self.world, piece.reference) if self.inner else []
        return {"smaller": [to_spec(part) for part in parts if part.key() != own.key() and own.contains(part)]}

    def phases(self, client: Client, received: Message) -> Iterable[Phase]:
        """Local training, together with the smaller parts in turn if there are any."""
        smaller = [client.reference.view(spec) for spec in received.facts["smaller"]]
        if not smaller:
            return super().phases(client, received)
        prepare(client.reference, smaller)
        objective = partial(with_inner, reference=client.reference, own=client.view, smaller=smaller, weight=self.inner)
        return [client.train.phase(client.round, objective=objective)]

    def merge(self, replies: Replies, round: int) -> None:
        """Distils what came back into the main network, and that into the networks which are no part of it."""
        if not replies:
            return
        public, main = self.world.public, self.world.main
        inputs = noise_inputs(self.world, self.noise, round) if public is None else public
        targets = combine(said_of(replies, inputs), [r.samples for r in replies], self.weighting)
        how = Distillation(self.steps, self.batch, self.temperature, Optim("adam", self.lr))
        start = self.weights if self.start_from == "keep" else self.average(replies)
        self.weights[main.name] = self.fitted(main.name, start[main.name], (inputs, targets), how, round)
        unified = logits_of(main.network(main.full, self.weights[main.name]), inputs)
        for name, reference in self.references.items():
            if reference is not main:
                self.weights[name] = self.fitted(name, start[name], (inputs, unified), how, round)

"""FedDF: an average for every architecture, then distillation from all received models into each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from nestling.methods.api import Info, InputError, Reference, Replies, Reply, State, Tensors, View, World, made, require
from nestling.methods.distill.architectures import PerArchitecture, Weighting, held_parts, noise_inputs, said_of
from nestling.methods.proxy import labelled_proxy
from nestling.settings import Bounds, Compat, Count, NotNegative, Positive, Whole
from nestling.training.distiller import Check, Distillation, logits_of, teacher_shares
from nestling.training.optimisers import Optim


@dataclass
class FedDF(PerArchitecture):
    """FedDF (Lin, Kong, Stich, Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020).

    Idea: averages exist only among equal networks, but an ensemble can teach anybody. Every architecture starts from the average of
    its own replies and is then fitted, on unlabelled inputs, to what all received models together say of them.
    Loss: clients cross-entropy; server τ²·KL(softmax(mean logits / τ) ‖ student). Travels: each client's network down and up. Merge:
    mean by n_k within an architecture, distillation between them; with steps = 0 that mean is all. The server keeps the student that
    was best on a labelled validation set, the mean itself among them, and stops when none is better for a while.
    Differs from the paper: it takes 10⁴ steps, looks every 100 and waits for 1 000; the defaults here are 100, 10 and 50, for small
    networks. The validation set is split off the public rows. Widths of one network are one architecture, merged over
    views, and the student is fitted as a whole and at the devices' widths in turn. The global model is the main network's.
    Differs from the released code: see compat.

    steps, batch, lr, temperature: the distillation: Adam whose rate falls along a half cosine.
    clip:       the largest norm of a gradient (0: any).
    validation: the share of the public rows that is the validation set, with labels; 0: none, and all steps are taken.
    every, patience: how many steps lie between two looks at it, and after how many without a better one it ends (0: never).
    source:     the inputs: "public" rows, or "noise" where the server holds none.
    noise:      how many noise inputs, drawn anew every round.
    weighting:  how teachers count: "uniform", "samples" (n_k) or "variance" (per input, by the spread of the logits).
    drop_worst: models that are no better than chance on the validation set neither teach nor are averaged.
    compat:     "paper" fits the student to the teachers' mean logits; "code" minimises the mean of the losses to every teacher.
    """

    steps: Whole = 100
    batch: Count = 128
    lr: Positive = 1e-3
    temperature: Positive = 1.0
    clip: NotNegative = 5.0
    validation: Annotated[float, Bounds(0, 0.5)] = 0.2
    every: Count = 10
    patience: Whole = 50
    source: Literal["public", "noise"] = "public"
    noise: Count = 256
    weighting: Weighting = "uniform"
    drop_worst: bool = False
    compat: Compat = "paper"

    inputs: Tensor | None = made()
    judged: tuple[Tensor, Tensor] | None = made()

    info = Info(
        "public data",
        "any: averaged within an architecture, distilled between them",
        "official code read",
        "D",
        auxiliary="server proxy, unlabelled, and a labelled validation set",
        own_networks=True,
    )

    def __post_init__(self) -> None:
        """Checks the settings; dropping the worst models needs a validation set."""
        super().__post_init__()
        require(
            not self.drop_worst or self.validation > 0, "needs a validation set", "method.drop_worst", "set method.validation"
        )

    @property
    def as_set(self) -> Info:
        """Names the auxiliary data that the settings use: public inputs, validation labels, or noise alone."""
        inputs = ["server proxy, unlabelled"] if self.source == "public" else []
        labelled = ["a labelled validation set"] if self.validation else []
        return replace(self.info, auxiliary=", and ".join(inputs + labelled) or "none (noise)")

    def setup(self, world: World) -> None:
        """Splits the validation set off the public rows; the students are fitted on the others, or on noise."""
        super().setup(world)
        self.inputs, self.judged = world.public, None
        fix = 'set it above 0, or method.source = "noise" with method.validation = 0'
        if self.validation:
            self.inputs, _, x, y = labelled_proxy(world, self.info.title, fix, tried=1 - self.validation)
            self.judged = (x, y)
        if self.source == "noise":
            self.inputs = None
        elif self.inputs is None:
            raise InputError("FedDF distils on public data and there is none", field="split.public", fix=fix)

    def merge(self, replies: Replies, round: int) -> None:
        """The mean within each architecture, then each is fitted to what all received models say."""
        if self.drop_worst:
            replies = self._above_chance(replies)
        if not replies:
            return
        self.weights = self.average(replies)
        if self.steps:
            x = noise_inputs(self.world, self.noise, round) if self.inputs is None else self.inputs
            targets = self.targets(torch.stack(said_of(replies, x)), [r.samples for r in replies])
            optim = Optim("adam", self.lr, clip=self.clip)
            how = Distillation(self.steps, self.batch, self.temperature, optim, True, self.every, self.patience)
            start, own = self.weights, self.references.items()
            self.weights = {n: self.fitted(n, start[n], (x, targets), how, round, self._check(r)) for n, r in own}

    def targets(self, logits: Tensor, samples: Sequence[int]) -> Tensor:
        """What students are fitted to, as logits, given those of the teachers: (teachers, inputs, classes)."""
        share = teacher_shares(logits, samples, self.weighting)
        if self.compat == "paper":
            return (share * logits).sum(0)
        # Σ share·KL(p ‖ q) is KL(Σ share·p ‖ q) and something that does not depend on q: fitting to the mean of the teachers'
        # probabilities has the same gradient.
        return self.temperature * (share.log() + (logits / self.temperature).log_softmax(-1)).logsumexp(0)

    def _check(self, reference: Reference) -> Check | None:
        """The mean accuracy of a student as a whole and of its parts; nothing without a validation set."""
        views = dict.fromkeys([reference.full, *held_parts(self.world, reference)])

        def check(state: State) -> float:
            return sum(self._accuracy(reference, view, view.extract(state)) for view in views) / len(views)

        return check if self.judged else None

    def _accuracy(self, reference: Reference, view: View, state: Tensors) -> float:
        """A model's accuracy on the validation set."""
        assert self.judged is not None
        x, y = self.judged
        return float((logits_of(reference.network(view, state), x).argmax(-1) == y).float().mean())

    def _above_chance(self, replies: Replies) -> list[Reply]:
        """The replies whose model knows something; all of them where none does, so that a slow start is not the end."""
        chance = 1 / self.world.classes
        good = [r for r in replies if self._accuracy(r.piece.reference, r.piece.view, r.message["weights"]) > chance]
        return good or list(replies)

"""FedFTG: the averaged model is fine-tuned on hard inputs that a generator makes, class by class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.methods.api import Info, Replies, State, Tensors, World, kept, made, pack
from nestling.methods.distill.generated import Asked, Several, asked, kinds, learner, make_generator, noise
from nestling.methods.distill.label_counts import COUNTS, counts_of, shares
from nestling.methods.submodel.shared_average import SharedAverage
from nestling.models.generators import codes, diversity
from nestling.seeds import torch_seeded
from nestling.settings import Compat, Count, NonZeroShare, Positive, Whole
from nestling.training.distiller import Student
from nestling.training.objectives import divergence
from nestling.training.optimisers import Optim
from nestling.views.nested import forward


@dataclass
class FedFTG(SharedAverage):
    """FedFTG (Zhang et al., "Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID Federated Learning", CVPR 2022).

    Idea: the mean of clients' models forgets what few of them know. The server draws labels as the participants have them, a generator
    makes inputs of these classes that the participants recognise and the mean does not, and the mean is fitted to what those who hold
    a class say of it. The paper's clients are equal; here they may hold parts of one network, which teach the whole.
    Loss: clients as in Shared-average (equal clients: cross-entropy). With a_k,y = n_k,y / Σ_j n_j,y, for each client k in turn the
    generator minimises mean_i a_k,y_i·[CE(t_k(x_i), y_i) − KL(t_k(x_i) ‖ s(x_i))] + diversity/|S|; the student s minimises its soft
    cross-entropy to Σ_k a_k,y·softmax t_k(x), as a whole and, where clients hold parts, those in turn.
    Travels: the client's part down and up, and its number of samples of every class up. Merge: as Shared-average, by n_k; then the
    fine-tuning (`iterations = 0` leaves it out).
    Differs from the released code: it takes ℓ1 of logits for the divergence, as a constant of the teacher, and the product of the mean
    weight and the mean cross-entropy (`compat = "code"`). Its mean over classes in the student's loss is kept as what it is, a step of
    lr / classes. It draws labels in exact proportion, here they are independent; the weight decay of its student is left out.

    iterations:      times that a batch is drawn in a round: the generator takes a step per client on it, then the student its own.
    student_steps:   steps of the student on each batch.
    lr, generator_lr: SGD of the student (for a loss that is a mean over classes) and Adam of the generator.
    decay:           what both are multiplied by every round.
    batch:           inputs made at a time (50 as published; fewer here, so that a round stays short on one core).
    compat:          "paper" or "code" (see above).
    nz, channels:    size of the noise and width of the generator, which goes on from round to round (64 wide as released).
    nested, inner:   see Shared-average.
    """

    iterations: Whole = 10
    student_steps: Whole = 5
    lr: Positive = 0.1
    generator_lr: Positive = 0.01
    decay: NonZeroShare = 0.998
    batch: Several = 32
    compat: Compat = "paper"
    nz: Count = 100
    channels: Count = 8

    generator: State = kept()
    network: nn.Module = made()

    info = Info(
        "data-free", "width: nested parts (none in the paper)", "official code read", "E", "none (label counts, a generator)"
    )
    parts = (*SharedAverage.parts, COUNTS)

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """Shared-average's state, and a generator of inputs by class."""
        super().setup(world)
        self.network, self.generator = make_generator(world, self.nz, self.channels, world.classes)

    def merge(self, replies: Replies, round: int) -> None:
        """Shared-average's merge, then the fine-tuning if clients counted any samples."""
        super().merge(replies, round)
        if not replies or not self.iterations:
            return
        counts = counts_of(replies, self.most_of_class).double().cpu()
        if counts.sum() > 0:
            with torch_seeded(self.world.seed, "fedftg", round):
                self._tune(replies, counts, self.decay ** (round - 1))

    def _tune(self, replies: Replies, counts: Tensor, decay: float) -> None:
        world, work, pooled = self.world, self.world.recorder, counts.sum(0)
        share = shares(counts).to(world.place)
        step = Optim("sgd", self.lr / world.classes * decay)
        student = work.student("student", self.weights, world.main.parameters, self._outputs, step)
        maker = learner(world, self.network, self.generator, Optim("adam", self.generator_lr * decay))
        with work.session():
            teachers, same, turns = asked(world, replies), kinds(replies), len(self._levels())
            for number in range(self.iterations):
                labels = torch.multinomial(pooled, self.batch, replacement=True).to(world.place)
                first = number * self.student_steps % turns
                body = partial(self._iterate, student, maker, teachers, first)
                work.do(("tune", same, first), body, noise(self.batch, self.nz, world), labels, share[:, labels])
            self.weights, self.generator = pack(student.state()), maker.state()

    def _iterate(
        self, student: Student, maker: Student, teachers: Sequence[Asked], first: int, z: Tensor, labels: Tensor, weights: Tensor
    ) -> None:
        """A batch of inputs: the generator takes a step per client on it, then the student its own, numbered from `first`."""
        main, code = self.world.main, codes(z, labels, self.world.classes)
        pairs = list(zip(teachers, weights.unbind(), strict=True))
        for teacher, weight in pairs:
            x = maker(code)
            right, said = teacher(x), forward(main, main.full, self._masked(student.tensors), x, training=False)
            loss = hardness(self.compat, right, said, labels, weight)
            maker.update(loss + diversity(z, x) / len(teachers))
        with torch.no_grad():
            x = maker(code)
            target = torch.stack([weight[:, None] * F.softmax(teacher(x), dim=-1) for teacher, weight in pairs]).sum(0)
        student.steps = first
        for _ in range(self.student_steps):
            student.update(torch.stack([F.cross_entropy(said, target) for said in student(x)]).mean())

    def _outputs(self, state: Tensors, x: Tensor, number: int) -> list[Tensor]:
        """What the whole network says, and one of the parts that clients hold."""
        main, levels = self.world.main, self._levels()
        return [forward(main, view, self._masked(state), x) for view in dict.fromkeys([main.full, levels[number % len(levels)]])]

    def _masked(self, state: Tensors) -> Tensors:
        """The state without what parts may not read, which then has no gradient either."""
        return {**state, **{name: state[name] * mask for name, mask in self.masks.items()}}


def hardness(compat: str, teacher: Tensor, student: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """What the generator minimises for one client: inputs that the teacher is right about and the student differs on, each counted by
    the client's share of its class."""
    if compat == "code":
        apart = (student - teacher.detach()).abs().mean(-1)
        return weight.mean() * F.cross_entropy(teacher, labels) - (weight * apart).mean()
    return (weight * (F.cross_entropy(teacher, labels, reduction="none") - divergence(teacher, student))).mean()

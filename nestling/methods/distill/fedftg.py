"""FedFTG: the averaged model is fine-tuned on hard inputs that a generator makes, class by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.methods.api import Client, Info, Message, Piece, Reply, State, World
from nestling.methods.distill.generated import Asked, asked, check_generator, kinds, learner, make_generator, noise
from nestling.methods.kept import made
from nestling.methods.submodel.shared_average import SharedAverage
from nestling.models.generators import codes, diversity
from nestling.schema import require
from nestling.seeds import torch_seeded
from nestling.training.distiller import Student
from nestling.training.objectives import divergence
from nestling.training.optimisers import Optim
from nestling.views.flat import pack
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

    iterations:      times that a batch is drawn in a round: the generator takes a step a client on it, then the student its own.
    student_steps:   steps of the student on each batch.
    lr, generator_lr: SGD of the student (for a loss that is a mean over classes) and Adam of the generator.
    decay:           what both are multiplied by every round.
    batch:           inputs made at a time (50 as published; fewer here, so that a round stays short on one core).
    compat:          "paper" or "code" (see above).
    nz, channels:    size of the noise and width of the generator, which goes on from round to round (64 wide as released).
    nested, inner:   see Shared-average.
    """

    iterations: int = 10
    student_steps: int = 5
    lr: float = 0.1
    generator_lr: float = 0.01
    decay: float = 0.998
    batch: int = 32
    compat: str = "paper"
    nz: int = 100
    channels: int = 8

    generator: State = made()
    network: nn.Module = made()

    info = Info(
        "data-free",
        "width: nested parts that fit each device (none in the paper)",
        "official code read",
        "E",
        auxiliary="none (label counts, and the server's generator)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_generator(self.nz, self.channels, self.batch, self.generator_lr)
        require(self.iterations >= 0, "must not be negative (0: no fine-tuning)", "method.iterations")
        require(self.student_steps >= 0, "must not be negative", "method.student_steps")
        require(self.lr > 0, "must be above 0", "method.lr")
        require(0 < self.decay <= 1, "must be in (0, 1]", "method.decay")
        require(self.compat in ("paper", "code"), f"unknown compat {self.compat!r}", "method.compat", "allowed: paper, code")

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        super().setup(world)
        self.network = make_generator(world, self.nz, self.channels, world.classes)
        self.generator = {name: t.detach().clone() for name, t in self.network.state_dict().items()}

    def expects(self, piece: Piece, sent: Message) -> Mapping[str, Mapping[str, Tensor]]:
        return {**super().expects(piece, sent), "counts": {"classes": torch.zeros(self.world.classes, dtype=torch.int32)}}

    def merge(self, replies: Sequence[Reply], round: int) -> None:
        super().merge(replies, round)
        if not replies or not self.iterations:
            return
        # What a client counted is its word: fewer than none would make other clients' weights negative.
        counts = torch.stack([reply.message["counts"]["classes"] for reply in replies]).clamp(min=0).double().cpu()
        if counts.sum() > 0:
            with torch_seeded(self.world.seed, "fedftg", round):
                self._tune(replies, counts, self.decay ** (round - 1))

    def _tune(self, replies: Sequence[Reply], counts: Tensor, decay: float) -> None:
        world, work, pooled = self.world, self.world.recorder, counts.sum(0)
        shares = (counts / pooled.clamp(min=1)).float().to(world.place)
        step = Optim("sgd", self.lr / world.classes * decay)
        student = work.student("student", self.weights, world.main.parameters, self._outputs, step)
        maker = learner(world, self.network, self.generator, Optim("adam", self.generator_lr * decay))
        with work.session():
            teachers, same, turns = asked(world, replies), kinds(replies), len(self._levels())
            for number in range(self.iterations):
                labels = torch.multinomial(pooled, self.batch, replacement=True).to(world.place)
                first = number * self.student_steps % turns
                body = partial(self._iterate, student, maker, teachers, first)
                work.do(("tune", same, first), body, noise(self.batch, self.nz, world), labels, shares[:, labels])
            self.weights, self.generator = pack(student.state()), maker.state()

    def _iterate(
        self, student: Student, maker: Student, teachers: Sequence[Asked], first: int, z: Tensor, labels: Tensor, weights: Tensor
    ) -> None:
        """A batch of inputs: the generator takes a step a client on it, then the student its own, of which the first has a number."""
        code, pairs = codes(z, labels, self.world.classes), list(zip(teachers, weights.unbind(), strict=True))
        for teacher, weight in pairs:
            x = maker(code)
            loss = hardness(self.compat, teacher(x), self._whole(student, x), labels, weight)
            maker.update(loss + diversity(z, x) / len(teachers))
        with torch.no_grad():
            x = maker(code)
            target = torch.stack([weight[:, None] * F.softmax(teacher(x), dim=-1) for teacher, weight in pairs]).sum(0)
        student.steps = first
        for _ in range(self.student_steps):
            student.update(torch.stack([F.cross_entropy(said, target) for said in student(x)]).mean())

    def _outputs(self, state: Mapping[str, Tensor], x: Tensor, number: int) -> list[Tensor]:
        """What the whole network says, and one of the parts that clients hold."""
        main, levels = self.world.main, self._levels()
        return [forward(main, view, self._masked(state), x) for view in dict.fromkeys([main.full, levels[number % len(levels)]])]

    def _whole(self, student: Student, x: Tensor) -> Tensor:
        main = self.world.main
        return forward(main, main.full, self._masked(student.tensors), x, training=False)

    def _masked(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The state without what parts may not read, which then has no gradient either."""
        return {**state, **{name: state[name] * mask for name, mask in self.masks.items()}}

    def state(self) -> dict[str, State]:
        return {**super().state(), "generator": self.generator}

    def restore(self, state: Mapping[str, State]) -> None:
        super().restore(state)
        self.generator = dict(state["generator"])

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def reply(self, client: Client, received: Message) -> Message:
        plain = super().reply(client, received)
        return replace(plain, parts={**plain.parts, "counts": {"classes": client.class_counts().to(torch.int32)}})


def hardness(compat: str, teacher: Tensor, student: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """What the generator minimises for one client: inputs that the teacher is right about and the student differs on, each counted by
    the client's share of its class."""
    if compat == "code":
        apart = (student - teacher.detach()).abs().mean(-1)
        return weight.mean() * F.cross_entropy(teacher, labels) - (weight * apart).mean()
    return (weight * (F.cross_entropy(teacher, labels, reduction="none") - divergence(teacher, student))).mean()

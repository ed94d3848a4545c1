"""FedZKT: a server model learns from the devices' models on inputs that a generator makes, and teaches them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.methods.api import Client, Device, Info, Message, Method, Model, Phases, Piece, Replies, Reply, State, World, pack
from nestling.methods.baselines.averaged import parameters_of
from nestling.methods.distill.generated import Asked, Several, asked, kinds, learner, make_generator, noise
from nestling.methods.kept import kept, made
from nestling.methods.part import WEIGHTS
from nestling.seeds import torch_seeded
from nestling.settings import Count, NotNegative, Positive, ShareBelowOne, Whole
from nestling.store import Records
from nestling.training.distiller import Student, whole
from nestling.training.objectives import distillation, proximal
from nestling.training.optimisers import Optim


@dataclass
class FedZKT(Method):
    """FedZKT (Zhang, Wu, Yuan, "FedZKT: Zero-Shot Knowledge Transfer towards Resource-Constrained Federated Learning with Heterogeneous
    On-Device Models", ICDCS 2022).

    Idea: every device has a network of its own kind, and the server a larger one and no data. A generator looks for inputs on which the
    server's model F and the mean of the devices' models disagree most, and F learns to agree there; then F teaches each device's model
    on such inputs, and its weights go back to the device.
    Loss: clients cross-entropy + μ/2·‖w − w_received‖²; the server's generator maximises and F minimises ‖mean_k softmax f_k(x) −
    softmax F(x)‖₁ (sum over classes, mean over the batch); each f_k then minimises the same towards F.
    Travels: the weights of the device's own network, up and down. Merge: none; F is distilled, and the server keeps each device's model
    for the next time it takes part.
    Differs from the paper: written from its abstract and from memory, which also holds for the constants; the published 200 (grey) to
    500 (colour) iterations of 256 inputs are fewer here, so that a round stays short on one core. The devices that are asked and taught
    in a round are those that took part in it. A device keeps its network when its free memory changes.

    iterations:    batches made in a round; the generator takes one step on each.
    student_steps: steps of F on each batch.
    back:          steps of every participant's model towards F.
    loss:          what the two sides differ by: "sl" (the published choice), "kl" (from the mean of the devices to F) or "logit-l1"
                   (the same norm on logits and their mean).
    lr, momentum:  SGD of F and of the devices' models on the server.
    generator_lr:  Adam of the generator.
    batch:         inputs made at a time.
    mu:            the pull of a client to the weights it received (0: none).
    nz, channels:  size of the noise and width of the generator, which goes on from round to round.
    """

    iterations: Whole = 20
    student_steps: Whole = 5
    back: Whole = 10
    loss: Literal["sl", "kl", "logit-l1"] = "sl"
    lr: Positive = 0.01
    momentum: ShareBelowOne = 0.9
    generator_lr: Positive = 1e-3
    batch: Several = 32
    mu: NotNegative = 0.0
    nz: Count = 100
    channels: Count = 8

    world: World = made()
    weights: State = kept()
    generator: State = kept()
    network: nn.Module = made()
    records: Records = made()

    info = Info(
        "data-free", "any: unlike networks and parts", "from memory", "E", "none (a generator)", own_networks=True, personal=True
    )
    parts = (replace(WEIGHTS, down=lambda method, device, piece, _: method.weights_of(device, piece)),)

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """The main network as the server's model, an untrained generator, and no device's model yet."""
        self.world, self.records = world, Records(world.store)
        self.weights = world.main.initial.copy()
        self.network, self.generator = make_generator(world, self.nz, self.channels)

    def piece(self, device: Device, round: int) -> Piece:
        """The tier's network at rest, in every round."""
        return self.world.plans[device.tier].piece

    def alike(self, device: Device, piece: Piece) -> str | None:
        """Devices of a tier get the same message until they have taken part, then each its own."""
        return None if self.records.get(device.id) else device.tier

    def weights_of(self, device: Device, piece: Piece) -> State:
        """The model that a device goes on from."""
        return pack(self._known(device)) or piece.view.extract(piece.reference.initial)

    def _known(self, device: Device) -> State:
        """The server's copy of a device's model; nothing before it took part."""
        return {name: t.to(self.world.place) for name, t in self.records.get(device.id).items()}

    def merge(self, replies: Replies, round: int) -> None:
        """Trains the generator and F against the received models, then F teaches these, which are recorded."""
        if not replies:
            return
        main, work = self.world.main, self.world.recorder
        optim = Optim("sgd", self.lr, self.momentum)
        student = work.student("server", self.weights, main.parameters, whole(main.network(main.full)), optim)
        maker = learner(self.world, self.network, self.generator, Optim("adam", self.generator_lr))
        with torch_seeded(self.world.seed, "fedzkt", round), work.session():
            self._repeat("learn", self.iterations, replies, partial(self._against, student, maker, asked(self.world, replies)))
            models = [self._model(number, reply, optim) for number, reply in enumerate(replies)]
            self._repeat("teach", self.back, replies, partial(self._back, student, maker, models))
            taught = [model.state() for model in models]
            self.weights, self.generator = pack(student.state()), maker.state()
        for reply, state in zip(replies, taught, strict=True):
            self.records.put(reply.device.id, state, round)

    def _repeat(self, what: str, times: int, replies: Replies, body: Callable[[Tensor], None]) -> None:
        """Some work on one batch of noise after another."""
        for _ in range(times):
            self.world.recorder.do((what, kinds(replies)), body, noise(self.batch, self.nz, self.world))

    def _against(self, student: Student, maker: Student, teachers: Sequence[Asked], z: Tensor) -> None:
        """The generator and F against each other."""
        x = maker(z)
        said = torch.stack([teacher(x) for teacher in teachers])
        maker.update(-gap(self.loss, said, student(x)))
        for _ in range(self.student_steps):
            student.update(gap(self.loss, said.detach(), student(x.detach())))

    def _back(self, student: Student, maker: Student, models: Sequence[Student], z: Tensor) -> None:
        """F teaches the participants' models, all on the same inputs."""
        with torch.no_grad():
            x = maker(z)
            said = student(x)[None]
        for model in models:
            model.update(gap(self.loss, said, model(x)))

    def _model(self, number: int, reply: Reply, optim: Optim) -> Student:
        reference, view = reply.piece.reference, reply.piece.view
        name, forward = ("model", number, view.form()), whole(reference.network(view))
        return self.world.recorder.student(name, reply.message["weights"], reference.parameters, forward, optim)

    def model_for(self, device: Device) -> Model:
        """The server's copy of the device's model, or the network as it was built."""
        piece = self.piece(device, 0)
        return Model(piece.reference, piece.view, self._known(device) or piece.view.extract(piece.reference.initial))

    def global_model(self) -> Model:
        """F, the server's model."""
        return Model(self.world.main, self.world.main.full, self.weights)

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def phases(self, client: Client, received: Message) -> Phases:
        """Local training, with a pull towards the received weights if `mu` is above 0."""
        if not self.mu:
            return [client.train.phase(client.round)]
        given = parameters_of(client, received["weights"])
        return [client.train.phase(client.round, objective=partial(proximal, mu=self.mu), given=given)]


def gap(kind: str, teachers: Tensor, student: Tensor) -> Tensor:
    """How far a student's logits are from those of (teachers, inputs, classes): a sum over classes, a mean over inputs."""
    if kind == "logit-l1":
        return (teachers.mean(0) - student).abs().sum(-1).mean()
    ensemble = F.softmax(teachers, dim=-1).mean(0)
    if kind == "sl":
        return (ensemble - F.softmax(student, dim=-1)).abs().sum(-1).mean()
    # The logarithm of probabilities are logits with that softmax.
    return distillation(ensemble.clamp_min(torch.finfo(ensemble.dtype).tiny).log(), student)

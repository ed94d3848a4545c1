"""KT-pFL: every client learns from the others as much as suits it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
from torch import Tensor

from nestling.methods.api import Client, Device, Info, Message, Phases, Piece, Replies, State, World, made
from nestling.methods.distill.coefficients import Coefficients, released_step, row_loss
from nestling.methods.part import Part
from nestling.methods.public import PublicExchange
from nestling.settings import Compat, Count, NotNegative, Positive, Whole
from nestling.store import Records
from nestling.training.distiller import Distillation, Student, distil
from nestling.training.objectives import Batch, Given, Net, distillation
from nestling.training.optimisers import Optim

_TARGET = Part("target", lambda method, device, *_: method.target(device))
_PREDICTIONS = Part(
    "predictions",
    up=lambda method, client, received: {"predictions": (method.said_of(client, received) / method.temperature).softmax(-1)},
    like=lambda method, *_: {"predictions": torch.empty(method.asked, method.world.classes)},
)


@dataclass
class KTpFL(PublicExchange):
    """KT-pFL (Zhang et al., "Parameterized Knowledge Transfer for Personalized Federated Learning", NeurIPS 2021).

    Idea: clients exchange soft predictions q = softmax(logits/T) on public inputs, and each has a target of its own, Σ_l c_kl·q_l. The
    server learns the coefficients c, one row of a simplex per client: near to what the client says itself, and not far from equal.
    Loss: weight·T²·KL(target ‖ q) on public rows, then cross-entropy on the client's own. Server, per row k: MSE(q_k, Σ_l c_kl·q_l) +
    ρ·MSE(c_k, 1/K).
    Travels: predictions up, a target down (N_align × C each). Merge: the coefficients. There is no global model.
    Of a client only the coefficients towards those who answered in the same round move, and their sum stays; in a target, those who
    answered last count, by their coefficients. Rows begin with 1/K and hold an entry for whom the client has met.
    Differs from the paper: the order within a round is that of `PublicExchange`. Rows are softmax(θ), moved by a few steps of Adam,
    instead of a gradient step and a projection. The published local epochs grow from round to round; ours are those of the run.
    compat = "code": one gradient step, rescaled by powers of 5 to a mean of 0.01, and softmax(5·row) kept as the next row, which over
    some rounds makes rows of more than 5 clients equal; clients take softmax(target) for the target, and the mean over classes too.

    align:             N_align, the public rows of a round (published: 500 to 4000).
    temperature:       T.
    rho:               ρ, how much equal coefficients are wanted.
    coefficient_steps: steps on the coefficients per round; 0 leaves them equal.
    coefficient_lr:    their learning rate (Adam on θ).
    distill:           epochs on the target.
    distill_batch:     rows per batch there.
    weight:            of T²·KL. The paper's plain KL at T = 10 is 0.01, whose gradient is below a hundredth of cross-entropy's: in
                       small networks it changes nothing, and 0.1 does.
    compat:            "paper" or "code".
    """

    align: Count = 2000
    temperature: Positive = 10.0
    rho: NotNegative = 0.7
    coefficient_steps: Whole = 10
    coefficient_lr: Positive = 0.1
    distill: Count = 1
    distill_batch: Count = 16
    weight: NotNegative = 0.1
    compat: Compat = "paper"

    coefficients: Coefficients = made()

    info = Info.of_own_networks(
        "public data", "any: only predictions travel", "official code read", "D", "public inputs on every client, unlabelled"
    )
    parts = (_TARGET, _PREDICTIONS)

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        """A matrix of coefficients that are all 1/K, none of which is stored yet."""
        super().setup(world)
        self.coefficients = Coefficients(Records(world.store), world.fleet.size, world.place)

    def alike(self, device: Device, piece: Piece) -> None:
        """Every client has a target of its own."""

    def target(self, device: Device) -> State:
        """What a device is to learn from."""
        if not self.known:
            return {}
        # Sorted: a checkpoint does not keep the order of names, and how a sum is rounded depends on its order.
        clients = sorted(self.known, key=int)
        row = self.coefficients.row(device.id, [int(client) for client in clients])
        said = torch.stack([self.known[client] for client in clients])
        return {"target": torch.tensordot((row / row.sum()).to(said.dtype), said, 1)}

    def merge(self, replies: Replies, round: int) -> None:
        """Learns the coefficients among those who answered, and keeps what they said for the next targets."""
        if not replies:
            return
        clients = [reply.device.id for reply in replies]
        said = [reply.message["predictions"]["predictions"] for reply in replies]
        before = torch.stack([self.coefficients.row(client, clients) for client in clients])
        share = before.sum(1, keepdim=True)
        for client, row in zip(clients, share * self.learn(before / share, torch.stack(said), round), strict=True):
            self.coefficients.put(client, clients, row, round)
        self.know({str(client): q for client, q in zip(clients, said, strict=True)}, round)

    def learn(self, rows: Tensor, said: Tensor, round: int = 0) -> Tensor:
        """The coefficients of some clients towards each other after a round, one row each, given what each of them said."""
        flat = said.flatten(1).to(rows.dtype)
        products = flat @ flat.T / flat.shape[1]
        loss = partial(row_loss, rho=self.rho)
        if self.compat == "code":
            return released_step(rows, products, loss)
        optim = Optim("adam", self.coefficient_lr, eps=1e-6)  # what is rounding only must not become a step
        student = Student({"theta": rows.log()}, {"theta"}, lambda state, *_: state["theta"].softmax(-1), optim)
        settings = Distillation(self.coefficient_steps, optim=optim)
        fitted = distil(student, repeat((products, products)), settings, self.world.seed, "coefficients", round, loss=loss)
        return fitted["theta"].softmax(-1)

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def phases(self, client: Client, received: Message) -> Phases:
        """Epochs on the target once there is one, then local training."""
        usual = client.train.phase(client.round)
        if "target" not in received:
            return [usual]
        target, code = received["target"]["target"], self.compat == "code"
        weight = self.weight / client.classes if code else self.weight
        learn = client.train.phase(
            client.round,
            source="public",
            rows=self.rows(client, received),
            epochs=self.distill,
            batch=self.distill_batch,
            augment="none",
            objective=partial(_match, temperature=self.temperature, weight=weight),
            # As logits, whose softmax at the temperature is the target (or, in the code, that of the target once more).
            given={"logits": self.temperature * (target if code else target.clamp_min(1e-12).log())},
        )
        return [learn, usual]


def _match(net: Net, batch: Batch, given: Given, *, temperature: float, weight: float) -> Tensor:
    return weight * distillation(given["logits"][batch.rows], net(batch.x), temperature, batch)

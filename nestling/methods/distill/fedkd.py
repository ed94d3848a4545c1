"""FedKD: mutual distillation that trusts as far as both networks are right, and a shared network that travels in few factors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.errors import InputError
from nestling.methods.api import Client, Contribution, Device, Info, Message, Piece, Reply, State, World
from nestling.methods.distill.pair import MEME, Pair, Pairs, meme_of, with_meme
from nestling.methods.kept import made
from nestling.methods.personal import Personal
from nestling.models.taps import Taps, watching
from nestling.schema import require
from nestling.training.objectives import Batch, Given, Net, Objective, divergence

LEFT, RIGHT = "left", "right"


@dataclass(frozen=True)
class Ranked(Piece):
    """A piece, and in how many components a reply has each tensor of the shared network (0: as it is)."""

    ranks: tuple[int, ...] = ()


class Bridged(Pair):
    """A pair, and a linear layer from the shared network's features to the own one's."""

    def __init__(self, own: nn.Module, taps: Taps, meme: nn.Module, meme_taps: Taps) -> None:
        super().__init__(own, taps, meme, meme_taps.head)
        self.bridge = nn.Linear(meme_taps.features, taps.features, bias=False)


@dataclass
class FedKD(Pairs):
    """FedKD (Wu et al., "Communication-efficient federated learning via knowledge distillation", Nature Communications 2022).

    Idea: as in FML, a client's own network (the mentor) and a small shared one (the mentee) teach each other, here by their features
    too, and the less the more both are wrong. The shared network travels as factors of its matrices that hold most of their energy.
    Loss: for each of the two, cross-entropy + (KL to the other's prediction + mean square of (own features − W·shared features)) / (the
    sum of both cross-entropies); teachers and the divisor are held still, and W, which stays on the client, learns with the shared
    network. Travels, down and up: of a weight as a matrix (outputs × the rest) the fewest singular components that hold the share T
    of its energy, T going from `energy` to `energy_end` over `ramp` rounds, or the matrix where that is fewer numbers; other tensors as
    they are. Merge: mean by n_k of what the factors make; the server keeps it whole. The global model is the shared network.
    Differs from the paper: the losses on hidden states and attention of transformers are one on the features. As in FML a device's
    budget counts both networks. Differs from HtFLlib, which was read: there gradients flow through teachers and divisor, KL is the
    mean over the classes too, kernels of convolutions are decomposed one by one, the mean is plain, gradients are clipped at
    norm 10, and the shared network has a learning rate of its own. The paper is from memory, and so are the energies.

    energy, energy_end: T at the beginning and at the end (1: nothing is left out).
    ramp:      in how many rounds T gets there (the whole run, as published; ours is a number, so that a run can be made longer).
    adaptive:  whether the losses are divided by the cross-entropies.
    floor:     the least that they are divided by (ours: of networks that know their few rows by heart the other terms would else be
               all there is; at 0.1 it was no better than training alone in our tests).
    hidden:    weight of the features' term.
    soft:      weight of the predictions' term.
    ratio:     the width of the shared network, of the main one (0: the widest with at most half the smallest tier's parameters).
    weighting: what a client counts in its mean: "samples" (n_k) or "uniform".
    """

    energy: float = 0.95
    energy_end: float = 0.98
    ramp: int = 50
    adaptive: bool = True
    floor: float = 1.0
    hidden: float = 1.0
    soft: float = 1.0

    _sent: Message | None = made()

    info = Info(
        "data-free",
        "any: own networks never meet, a small one is shared",
        "reimplementation (HtFLlib) read; the paper from memory",
        "E",
        own_networks=True,
        personal=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("energy", "energy_end"):
            require(0 < getattr(self, name) <= 1, "must be in (0, 1]", f"method.{name}")
        require(self.ramp >= 1, "must be at least 1", "method.ramp")
        require(self.floor > 0, "must be above 0", "method.floor")
        for name in ("hidden", "soft"):
            require(getattr(self, name) >= 0, "must not be negative", f"method.{name}")

    def tailor(self, module: nn.Module, taps: Taps) -> nn.Module:
        return Bridged(module, taps, copy.deepcopy(self.shared.module).to("cpu"), self.shared.taps)

    # -- on the server ---------------------------------------------------------------------------------------------------------

    def setup(self, world: World) -> None:
        super().setup(world)
        self._sent = None

    def send(self, device: Device, piece: Piece, round: int) -> Message:
        if self._sent is None or self._sent.facts["energy"] != self.share(round):
            self._sent = factored(self.weights, self.share(round), {"energy": self.share(round)})
        return self._sent

    def share(self, round: int) -> float:
        """T of a round."""
        return self.energy + min(1.0, (round - 1) / self.ramp) * (self.energy_end - self.energy)

    def returned(self, piece: Piece, sent: Message, facts: Mapping[str, Any]) -> Piece:
        found, most = facts.get("ranks"), [_most(self.weights[name]) for name in sorted(self.weights)]
        if not isinstance(found, list) or len(found) != len(most) or not all(map(_within, found, most)):
            raise InputError(f"the ranks told of are {str(found)[:60]!r}, none that the shared network's matrices have")
        return Ranked(piece.reference, piece.view, tuple(found))

    def expects(self, piece: Piece, sent: Message) -> Mapping[str, Mapping[str, Tensor]]:
        assert isinstance(piece, Ranked)
        like: dict[str, dict[str, Tensor]] = {}
        for name, rank in zip(sorted(self.weights), piece.ranks, strict=True):
            tensor = self.weights[name]
            if not rank:
                like.setdefault(MEME, {})[name] = tensor
                continue
            rows, columns = tensor.flatten(1).shape
            like.setdefault(LEFT, {})[name] = torch.empty(rows, rank, dtype=tensor.dtype, device="meta")
            like.setdefault(RIGHT, {})[name] = torch.empty(rank, columns, dtype=tensor.dtype, device="meta")
        return like

    def merge(self, replies: Sequence[Reply], round: int) -> None:
        super().merge(replies, round)
        self._sent = None

    def contribution(self, reply: Reply) -> Contribution:
        weight = float(reply.samples) if self.weighting == "samples" else 1.0
        return Contribution(self.shared.full, whole(reply.message, self.weights), weight)

    def restore(self, state: Mapping[str, State]) -> None:
        super().restore(state)
        self._sent = None

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def start(self, client: Client, received: Message) -> Mapping[str, Tensor]:
        mine = Personal.start(self, client, received)
        return with_meme(mine, whole(received, meme_of(client.reference.initial)))

    def objective(self, client: Client) -> Objective:
        module = client.reference.module
        assert isinstance(module, Bridged)
        floor = self.floor if self.adaptive else 0.0
        head, meme_head = client.reference.taps.head, module.meme_head
        return partial(_mutual, floor=floor, hidden=self.hidden, soft=self.soft, head=head, meme_head=meme_head)

    def reply(self, client: Client, received: Message) -> Message:
        told = super().reply(client, received)
        return factored(told[MEME], received.facts["energy"], told.facts)


@torch.no_grad()
def factored(state: Mapping[str, Tensor], energy: float, facts: Mapping[str, Any]) -> Message:
    """A state as it travels: matrices by the components that hold a share of their energy, where these are fewer numbers. The facts
    also say in how many, one number a tensor in the order of names (0: as it is)."""
    parts: dict[str, dict[str, Tensor]] = {}
    ranks: list[int] = []
    for name in sorted(state):
        tensor = state[name]
        factors = _components(tensor.flatten(1), energy) if tensor.dim() > 1 and energy < 1 else None
        ranks.append(factors[0].shape[1] if factors else 0)
        for kind, part in zip((LEFT, RIGHT), factors, strict=True) if factors else [(MEME, tensor)]:
            parts.setdefault(kind, {})[name] = part
    return Message(parts, {**facts, "ranks": ranks})


def _most(tensor: Tensor) -> int:
    return min(tensor.flatten(1).shape) if tensor.dim() > 1 else 0


def _within(rank: object, most: int) -> bool:
    return type(rank) is int and 0 <= rank <= most


def _components(matrix: Tensor, energy: float) -> tuple[Tensor, Tensor] | None:
    left, values, right = torch.linalg.svd(matrix.to(torch.float64), full_matrices=False)
    held = values.square().cumsum(0)
    rank = int((held < energy * held[-1]).sum()) + 1
    if rank * sum(matrix.shape) >= matrix.numel():
        return None
    return (left[:, :rank] * values[:rank]).to(matrix.dtype), right[:rank].to(matrix.dtype).contiguous()


def whole(message: Message, like: Mapping[str, Tensor]) -> State:
    """The state that a message's factors make, in the shapes of another one."""
    found = {}
    for name, tensor in like.items():
        factors = LEFT in message and name in message[LEFT]
        found[name] = (message[LEFT][name] @ message[RIGHT][name]).reshape(tensor.shape) if factors else message[MEME][name]
    return found


def _mutual(
    net: Net, batch: Batch, given: Given, *, floor: float, hidden: float, soft: float, head: str, meme_head: str
) -> Tensor:
    with watching(net.module, (), head) as mine, watching(net.module, (), meme_head) as common:
        own, meme = net(batch.x)
    features, shared = mine["features"], net.module.get_submodule("bridge")(common["features"])
    wrong, wrong_too = (F.cross_entropy(logits, batch.y, reduction="none") for logits in (own, meme))
    trust = 1 / (batch.mean(wrong) + batch.mean(wrong_too)).detach().clamp(min=floor) if floor else 1.0
    taught = soft * divergence(meme.detach(), own) + hidden * (features - shared.detach()).square().mean(1)
    taught_too = soft * divergence(own.detach(), meme) + hidden * (features.detach() - shared).square().mean(1)
    return batch.mean(wrong + wrong_too + trust * (taught + taught_too))

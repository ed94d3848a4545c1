"""FedHM: clients train low-rank networks of different ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from nestling.methods.api import Client, Contribution, Info, Message, Phases, Piece, Replies, Reply, made, pack, require
from nestling.methods.labels import PRESENT, counted_rows, held_classes, output_layer
from nestling.methods.lowrank.factored import Factored, Shapes, key_of, layers_of
from nestling.methods.part import WEIGHTS
from nestling.models.factorised import full_rank, to_dense
from nestling.settings import Bounds, Compat, Positive
from nestling.training.objectives import present_cross_entropy


@dataclass
class FedHM(Factored):
    """FedHM (Yao et al., "FedHM: Efficient Federated Learning for Heterogeneous Models via Low-rank Factorization", 2021).

    Idea: a client's convolution O×I×k×k is the pair (k×1)·(1×k) of rank r = max(round(O/ρ), 1), the best such approximation of the
    global weight as a matrix (O·k)×(I·k). The server multiplies the factors back and averages there, where all clients have one shape.
    Loss: cross-entropy, and λ/2·‖u·v‖² in place of weight decay on the factors. Travels: r(O·k+I·k) numbers per factorised layer,
    the other tensors whole, down and up. Merge: uniform mean of the recomposed networks (which is not that of the factors), then
    a new decomposition; where nobody trained at full rank, the last global network counts as one more client.
    Differs from the paper: ρ = 1 is the dense network itself, so that it returns exactly; no norms of their own between the factors;
    ρ is the smallest that fits the device. A layer's rank is at most what its matrix has. The released code masks absent classes as
    HeteroFL does but sums the classifier's rows without counting who holds them (`compat = "code"`): they shrink. It keeps about the
    first eight tensors of its ResNet-18 whole (`dense = 3`).

    ratios:      the values of ρ; 1 is the dense network.
    decay:       λ (from memory).
    dense:       how many of the first convolutions stay whole.
    pointwise:   whether 1×1 convolutions (shortcuts) are factorised.
    linear:      whether linear layers before the last are.
    leave_out:   devices that cannot train the smallest piece do not take part (false: they are an error).
    dynamic:     weights softmax(−ρ/T) in place of equal ones.
    temperature: T.
    virtual:     whether the last global network stands in for an absent full-rank client.
    compat:      "paper" or "code".
    """

    ratios: tuple[Annotated[float, Bounds(1)], ...] = (1.0, 2.0, 4.0, 8.0)
    dynamic: bool = False
    temperature: Positive = 5.0
    virtual: bool = True
    compat: Compat = "paper"

    ratio_of: dict[tuple[str, bytes], float] = made()

    form = "separable"
    info = Info("low-rank", "rank: truncated factors of every layer", "official code read", "A", any_task=True)
    parts = (WEIGHTS, replace(PRESENT, when=lambda method: method.compat == "code"))

    @property
    def as_set(self) -> Info:
        """As the released code is it masks classes, and needs them."""
        return replace(self.info, any_task=self.compat != "code")

    def __post_init__(self) -> None:
        """Refuses an empty list of ratios."""
        super().__post_init__()
        require(bool(self.ratios), "at least one (1 is the dense network)", "method.ratios")

    def ranks(self, shapes: Shapes) -> dict[str, int]:
        """The ranks at the smallest ρ above 1, which are the largest that a network of factors has."""
        return self._ranks(shapes, min((ratio for ratio in self.ratios if ratio > 1), default=2.0))

    def _ranks(self, shapes: Shapes, ratio: float) -> dict[str, int]:
        return {layer: min(max(round(s[0] / ratio), 1), full_rank(s, self.form)) for layer, s in shapes.items()}

    def pieces(self, shapes: Shapes) -> list[Piece]:
        """One piece per ρ: the dense network for 1, otherwise the first components of every layer; remembers the ρ of each."""
        main = self.world.main
        found = {
            ratio: Piece(main, main.full) if ratio == 1 else Piece(self.factors, self.first(self._ranks(shapes, ratio)))
            for ratio in self.ratios
        }
        self.ratio_of = {key_of(piece): ratio for ratio, piece in found.items()}
        return list(found.values())

    def merge(self, replies: Replies, round: int) -> None:
        """The mean of the recomposed networks; with `virtual` the last global one counts too if nobody trained at full rank."""
        given = [self.contribution(reply) for reply in replies]
        if given and self.virtual and all(reply.piece.reference is self.factors for reply in replies):
            given.append(Contribution(self.world.main.full, self.weights, self._weight(1.0)))
        self.weights = pack(self.fuse(self.weights, given))

    def contribution(self, reply: Reply) -> Contribution:
        """The reply as a dense network; as in the released code, if so set, with zeros in the rows of absent classes."""
        state = reply.message["weights"]
        if reply.piece.reference is self.factors:
            state = to_dense(state, layers_of(self.factors))
        if self.compat == "code":
            output = output_layer(self.world.main, self.world.classes)
            held = counted_rows(reply.message["present"]["classes"], state, output)
            state = {**state, **{name: state[name] * rows for name, rows in held.items()}}
        return Contribution(self.world.main.full, state, self._weight(self.ratio_of[key_of(reply.piece)]))

    def _weight(self, ratio: float) -> float:
        return math.exp(-ratio / self.temperature) if self.dynamic else 1.0

    def phases(self, client: Client, received: Message) -> Phases:
        """One training phase; as in the released code, if so set, absent classes are masked in the loss."""
        phases = super().phases(client, received)
        if self.compat == "paper":
            return phases
        present = {"present": held_classes(client).float()}
        return [replace(phase, objective=present_cross_entropy, given=present) for phase in phases]

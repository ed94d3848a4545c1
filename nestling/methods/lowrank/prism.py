"""PriSM: clients train singular components drawn by their singular values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nestling.methods.api import Client, Contribution, Device, Info, Message, Phase, Piece, Reply, Share, View
from nestling.methods.lowrank.factored import Factored, layers_of
from nestling.models.factorised import full_rank, singular_values, to_dense
from nestling.schema import require
from nestling.seeds import stream
from nestling.views import by_index, merge
from nestling.views.flat import pack

SAMPLINGS = ("power", "softmax", "uniform", "top")


@dataclass
class PriSM(Factored):
    """PriSM (Niu et al., "Overcoming Resource Constraints in Federated Learning: Large Models Can Be Trained with only Weak Clients",
    TMLR 2023).

    Idea: a weight O×(I·k²) is a sum of R = min(O, I·k²) singular components; a client that can hold a share κ of them trains ⌈κR⌉,
    drawn anew every round without replacement with p ∝ σ^power. Over the rounds all components are trained, though no client ever
    holds them all.
    Loss: cross-entropy, and λ/2·‖u·v‖² in place of weight decay on the factors. Travels: n(O+I·k²) numbers a factorised layer, the
    other tensors whole, down and up; which components they are only the server needs to know. Merge: uniform mean of each component
    over its holders, the others keep their value; dense tensors by n_k; then the product, and a new decomposition.
    Differs from the released code: no momentum buffers travel (optimisers start afresh every round); the code's last version draws
    uniformly or by softmax(σ) (`sampling`) and fixes a part of the output channels, which is left out. A device's own model, where it
    is tested, has the largest components.

    keeps:     the values of κ; a device takes the largest that fits.
    power:     the exponent of σ.
    sampling:  "power", "softmax" (p ∝ exp σ), "uniform", or "top" (always the largest: nothing is drawn).
    decay:     λ.
    clip:      gradient clipping where `train.clip` names none; 0 turns it off.
    dense:     how many of the first convolutions stay whole.
    pointwise: whether 1×1 convolutions are factorised.
    linear:    whether linear layers before the last are.
    leave_out: devices that cannot train the smallest piece do not take part (false: they are an error).
    """

    decay: float = 2e-4
    keeps: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
    power: float = 3.0
    sampling: str = "power"
    clip: float = 5.0

    form = "columns"
    info = Info("low-rank", "rank: drawn singular components", "official code read", "A")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.keeps) and all(0 < keep <= 1 for keep in self.keeps), "shares above 0 and up to 1", "method.keeps")
        require(self.power >= 0, "must not be negative (0 draws uniformly)", "method.power")
        require(self.clip >= 0, "must not be negative (0 turns clipping off)", "method.clip")
        known = f"allowed: {', '.join(SAMPLINGS)}"
        require(self.sampling in SAMPLINGS, f"unknown sampling {self.sampling!r}", "method.sampling", known)

    def ranks(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
        return {layer: full_rank(shape, self.form) for layer, shape in shapes.items()}

    def pieces(self, shapes: dict[str, tuple[int, ...]]) -> list[Piece]:
        every = self.ranks(shapes)
        views = [self.first({layer: math.ceil(keep * n - 1e-9) for layer, n in every.items()}) for keep in self.keeps]
        return [Piece(self.factors, view) for view in views]

    def send(self, device: Device, piece: Piece, round: int) -> Message:
        """Other components for every client and round, in a network of the same shape, so that equal clients still do equal work."""
        state = self.factor_state()
        draw = stream(self.world.seed, "components", device.id, round)
        drawn = {
            layer: self.draw(
                singular_values(state[f"{layer}.u.weight"]).cpu().numpy(), piece.view.shape(f"{layer}.v.weight")[0], draw
            )
            for layer in layers_of(self.factors)
        }
        return Message({"weights": self._view(drawn).extract(state)}, {"components": drawn})

    def draw(self, values: np.ndarray, count: int, chance: np.random.Generator) -> list[int]:
        """Which `count` components, given their singular values."""
        if count == len(values) or self.sampling == "top":
            return list(range(count))
        scaled = values / max(values.max(), 1e-30)
        shares = {
            "power": scaled**self.power,
            "softmax": np.exp(values - values.max()),
            "uniform": np.ones_like(values),
        }[self.sampling]
        shares = np.maximum(shares, 1e-12)  # even components that have vanished can be drawn when the others are used up
        return sorted(chance.choice(len(values), count, replace=False, p=shares / shares.sum()).tolist())

    def _view(self, drawn: dict[str, list[int]]) -> View:
        return by_index(self.factors.axes, {f"{layer}.v": chosen for layer, chosen in drawn.items()})

    def phases(self, client: Client, received: Message) -> Sequence[Phase]:
        phases = super().phases(client, received)
        return [replace(p, optim=replace(p.optim, clip=p.optim.clip or self.clip)) for p in phases]

    def shares(self, replies: Sequence[Reply]) -> Mapping[str, Share]:
        """Composed again from its components, every entry of a weight moves."""
        given = [Contribution(self.world.main.full, self.weights)] if replies else []
        return {"": Share(self.weights, self.world.main.parameters, given)}

    def merge(self, replies: Sequence[Reply], round: int) -> None:
        state = self.factor_state()
        components = {f"{layer}.{side}.weight" for layer in layers_of(self.factors) for side in ("u", "v")}
        views = [self._view(reply.sent.facts["components"]) for reply in replies]
        merged = {}
        for weights, names in (
            ([1.0] * len(replies), [n for n in state if n in components]),
            ([float(r.samples) for r in replies], [n for n in state if n not in components]),
        ):
            given = [Contribution(v, r.message["weights"], w) for v, r, w in zip(views, replies, weights, strict=True)]
            merged.update(merge({name: state[name] for name in names}, given))
        if replies:
            dense = to_dense(merged, layers_of(self.factors))
            self.weights = pack({name: dense[name] for name in self.weights})

"""PriSM: clients train singular components drawn by their singular values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from nestling.methods.api import Client, Device, Info, Message, Phases, Piece, Replies, Share, pack, require
from nestling.methods.lowrank.factored import Factored, Shapes, layers_of
from nestling.models.factorised import full_rank, singular_values, to_dense
from nestling.seeds import stream
from nestling.settings import NonZeroShare, NotNegative
from nestling.views import Contribution, View, by_index


@dataclass
class PriSM(Factored):
    """PriSM (Niu et al., "Overcoming Resource Constraints in Federated Learning: Large Models Can Be Trained with only Weak Clients",
    TMLR 2023).

    Idea: a weight O×(I·k²) is a sum of R = min(O, I·k²) singular components; a client that can hold a share κ of them trains ⌈κR⌉,
    drawn anew every round without replacement with p ∝ σ^power. Over the rounds all components are trained, though no client ever
    holds them all.
    Loss: cross-entropy, and λ/2·‖u·v‖² in place of weight decay on the factors. Travels: n(O+I·k²) numbers per factorised layer,
    the other tensors whole, down and up; which components they are only the server needs to know. Merge: uniform mean of each
    component over its holders, the others keep their value; dense tensors by n_k; then the product, and a new decomposition.
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

    decay: NotNegative = 2e-4
    keeps: tuple[NonZeroShare, ...] = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
    power: NotNegative = 3.0
    sampling: Literal["power", "softmax", "uniform", "top"] = "power"
    clip: NotNegative = 5.0

    form = "columns"
    info = Info("low-rank", "rank: drawn singular components", "official code read", "A", any_task=True)

    def __post_init__(self) -> None:
        """Refuses an empty list of shares."""
        super().__post_init__()
        require(bool(self.keeps), "at least one share", "method.keeps")

    def ranks(self, shapes: Shapes) -> dict[str, int]:
        """All components that a layer has."""
        return {layer: full_rank(shape, self.form) for layer, shape in shapes.items()}

    def pieces(self, shapes: Shapes) -> list[Piece]:
        """One piece per κ: the first ⌈κR⌉ components of every layer."""
        every = self.ranks(shapes)
        views = [self.first({layer: math.ceil(keep * n - 1e-9) for layer, n in every.items()}) for keep in self.keeps]
        return [Piece(self.factors, view) for view in views]

    def message(self, device: Device, piece: Piece, round: int) -> Message:
        """Other components for every client and round, in a network of the same shape, so that equal clients still do equal work."""
        state, drawn = self.factor_state(), {}
        chance = stream(self.world.seed, "components", device.id, round)
        for layer in layers_of(self.factors):
            values = singular_values(state[f"{layer}.u.weight"]).cpu().numpy()
            drawn[layer] = self.draw(values, piece.view.shape(f"{layer}.v.weight")[0], chance)
        return Message({"weights": self._view(drawn).extract(state)}, {"components": drawn})

    def alike(self, device: Device, piece: Piece) -> None:
        """None: every client gets components drawn for it alone."""

    def draw(self, values: np.ndarray, count: int, chance: np.random.Generator) -> list[int]:
        """Which `count` components, given their singular values."""
        if count == len(values) or self.sampling == "top":
            return list(range(count))
        scaled = values / max(values.max(), 1e-30)
        ways = {"power": scaled**self.power, "softmax": np.exp(values - values.max()), "uniform": np.ones_like(values)}
        # Even components that have vanished can be drawn when the others are used up.
        shares = np.maximum(ways[self.sampling], 1e-12)
        return sorted(chance.choice(len(values), count, replace=False, p=shares / shares.sum()).tolist())

    def _view(self, drawn: dict[str, list[int]]) -> View:
        return by_index(self.factors.axes, {f"{layer}.v": chosen for layer, chosen in drawn.items()})

    def phases(self, client: Client, received: Message) -> Phases:
        """One training phase on factors, clipped by `clip` where the experiment does not clip."""
        phases = super().phases(client, received)
        return [replace(p, optim=replace(p.optim, clip=p.optim.clip or self.clip)) for p in phases]

    def shares(self, replies: Replies) -> Mapping[str, Share]:
        """All weights: each is recomposed from its components, so every entry of it moves."""
        given = [Contribution(self.world.main.full, self.weights)] if replies else []
        return {"": Share(self.weights, self.world.main.parameters, given)}

    def merge(self, replies: Replies, round: int) -> None:
        """The uniform mean of each component over its holders, of other tensors by samples; then recomposes the dense weights."""
        state = self.factor_state()
        components = {f"{layer}.{side}.weight" for layer in layers_of(self.factors) for side in ("u", "v")}
        parts, merged = [(self._view(r.sent.facts["components"]), r) for r in replies], {}
        for whole in (False, True):
            given = [Contribution(view, r.message["weights"], float(r.samples) if whole else 1.0) for view, r in parts]
            merged.update(self.fuse({n: t for n, t in state.items() if (n not in components) == whole}, given))
        if replies:
            dense = to_dense(merged, layers_of(self.factors))
            self.weights = pack({name: dense[name] for name in self.weights})

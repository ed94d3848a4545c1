"""ScaleFL: levels that are cut in width and in depth, with exits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from nestling.methods.api import Client, Device, Info, Message, Model, Phases, Piece, Reference, View, World, made, require
from nestling.methods.submodel.by_depth import ByDepth, exits_of, need_exits
from nestling.methods.submodel.scaler import scaled
from nestling.settings import Count, NonZeroShare, NotNegative, Positive, UnitShare
from nestling.tasks import losses
from nestling.training.objectives import Batch, Given, Net, distillation
from nestling.training.phase import Hook, divide
from nestling.views import prefix
from nestling.views.depth import depth_views


@dataclass
class ScaleFL(ByDepth):
    """ScaleFL (Ilhan, Su, Liu, "ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients", CVPR 2023).

    Idea: a level of the network has its first exits and a prefix of every layer's channels; the deepest exit that a client has teaches
    the earlier ones.
    Loss: with m exits [Σ_{j<m} j·(CE_j + γ·KD(o_m → o_j; τ)) + m·CE_m] / (m·(m+1)/2); the teacher learns from it too. Travels: the
    level's part down and up. Merge: uniform mean over the entries' holders.
    Differs from the released code: γ is meant as published (a mean over classes), so the one distillation function gets γ/C; the
    published commands for images run with γ = 0. Outputs of convolutions are divided by the width in training and in evaluation
    (there by dividing the weights, which is the same), those of shortcuts too (there not). Widths round up (there down), and where
    four divides the rounds, distillation begins one round earlier. Exits are plain unless built with `model.heads = "convs"` (exitcnn,
    exitresnet). Accuracies of exits are each their own (the released code averages them by accident).

    widths:      the levels' widths, from shallow to deep.
    depths:      the levels' numbers of stages; empty: spread evenly, the last one all of them.
    gamma:       γ, the weight of distillation.
    temperature: τ.
    kd_start:    the share of the rounds after which distillation begins.
    scaler:      the division by the width.
    """

    widths: tuple[NonZeroShare, ...] = (0.7, 0.7, 0.75, 1.0)
    depths: tuple[Count, ...] = ()
    gamma: NotNegative = 0.05
    temperature: Positive = 3.0
    kd_start: UnitShare = 0.25
    scaler: bool = True

    width_of: dict[bytes, float] = made()

    info = Info("depth", "width and depth: prefixes of channels and exits", "official code read", "A", model="tinyexits")

    def __post_init__(self) -> None:
        """Refuses widths and depths that fall or differ in number, and a last level without all channels."""
        super().__post_init__()
        require(list(self.widths) == sorted(self.widths), "must rise", "method.widths")
        require(1 in self.widths[-1:], "the last level must have all channels", "method.widths", "end with 1")
        require(len(self.depths) in (0, len(self.widths)), "one number for every level", "method.depths")
        require(list(self.depths) == sorted(self.depths), "must not fall", "method.depths")

    def setup(self, world: World) -> None:
        """Checks that the last level has every stage, and remembers the width of each level."""
        stages = len(need_exits(world.main, self.info.title).stages)
        message = f"the network has {stages} stages, and the last level must have them all"
        require(not self.depths or self.depths[-1] == stages, message, "method.depths")
        super().setup(world)
        self.width_of = {view.key(): width for view, width in zip(self.views(world.main), self.widths, strict=True)}

    def views(self, reference: Reference) -> list[View]:
        """One view per level: its first stages and exits, with a prefix of every layer's channels."""
        every = depth_views(reference)
        depths = self.depths or [math.ceil((n + 1) * len(every) / len(self.widths)) for n in range(len(self.widths))]
        levels = zip(self.widths, depths, strict=True)
        return [replace(every[depth - 1], keep=prefix(reference.axes, width).keep) for width, depth in levels]

    def facts(self, device: Device, piece: Piece, round: int) -> dict[str, float]:
        """The width of the piece, and the weight of distillation, 0 until it begins."""
        late = round > math.ceil(self.kd_start * self.world.rounds)
        kd = self.gamma / self.world.classes if late else 0.0
        return {"width": self.width_of[piece.view.key()], "kd": kd}

    def phases(self, client: Client, received: Message) -> Phases:
        """One training phase over all exits, with convolutions divided by the width where that is on."""
        width = float(received.facts["width"])
        hooks = (Hook((nn.Conv2d,), partial(divide, by=width)),) if self.scaler and width < 1 else ()
        given = {"kd": torch.tensor(float(received.facts["kd"]), device=client.place)} if self.gamma else {}
        objective = partial(_weighted_exits, temperature=self.temperature)
        return [client.train.phase(client.round, objective=objective, given=given, hooks=hooks)]

    def model_for(self, device: Device) -> Model:
        """The device's level at rest, with the division by its width in the weights."""
        model = super().model_for(device)
        width = self.width_of[model.view.key()] if self.scaler else 1.0
        layers = [name for name, layer in model.reference.module.named_modules() if isinstance(layer, nn.Conv2d)]
        return scaled(model, dict.fromkeys(layers, width)) if width < 1 else model


def _weighted_exits(net: Net, batch: Batch, given: Given, *, temperature: float) -> Tensor:
    *earlier, last = exits_of(net, batch.x)
    count = len(earlier) + 1
    loss = count * _cross_entropy(last, batch)
    for number, logits in enumerate(earlier, 1):
        loss = loss + number * _cross_entropy(logits, batch)
        if "kd" in given:
            loss = loss + number * given["kd"] * distillation(last, logits, temperature, batch)
    return loss / (count * (count + 1) / 2)


def _cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    return batch.mean(losses(logits, batch.y))

"""InCoAvg: updates of deep blocks corrected by those of the first block of their stage."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestling.methods.api import Info, InputError, Reference, Replies, World, made, pack
from nestling.methods.submodel.by_depth import ByDepth
from nestling.settings import Compat, NotNegative, Positive
from nestling.views.depth import residual_stages

_SMALL = 1e-7


@dataclass
class InCoAvg(ByDepth):
    """InCoAvg (Chan, Zhou, Zhao, Ngai, "Internal Cross-layer Gradients for Extending Homogeneity to Heterogeneity in Federated
    Learning", ICLR 2024).

    Idea: clients hold the first blocks of every stage of a residual network. Updates of a stage's first block, which everybody trains,
    agree better between clients than those of its deeper blocks, so the deeper ones are pulled towards it on the server.
    Loss: cross-entropy. Travels: the client's blocks down and up. Merge: uniform mean over holders, by name. Then, for every
    convolution of the blocks after the first, per kernel: g' = (ĝ + θ·ĝ₀)·(‖g‖ + ‖g₀‖)/2 with every entry held in [-clip, clip],
    where g is the mean update, g₀ that of the first block's last convolution of the same shape, and ^ divides by the norm.
    θ is 0 where ⟨g₀, g⟩ ≥ 0, else -⟨g₀, g⟩/⟨g₀, g₀⟩. Even θ = 0 is not plain averaging: norms are evened out and entries held.
    Differs from the released code: see `compat`; blocks are found by what they do, not by a digit in their name; mean updates are
    differences of merged weights, which are rounded by then. The variant for transformers (norms instead of convolutions) is not
    there.

    compat: "paper"; "code" takes θ = |⟨g₀, g⟩|/⟨g₀, g₀⟩, at most `most`, whichever way the updates point.
    most:   the largest θ of "code".
    clip:   the largest entry of a corrected update.
    """

    compat: Compat = "paper"
    most: NotNegative = 5.0
    clip: Positive = 0.1

    pairs: dict[str, str] = made()

    info = Info("depth", "depth: the first blocks of every stage", "official code read", "B", model="tinyresnet", any_task=True)

    def setup(self, world: World) -> None:
        """Finds which convolution of a first block corrects which ones of later blocks."""
        super().setup(world)
        self.pairs = correcting(world.main)

    def merge(self, replies: Replies, round: int) -> None:
        """The uniform mean, in which updates of later blocks are then corrected and held in [-clip, clip]."""
        before, most = self.weights, self.most if self.compat == "code" else None
        super().merge(replies, round)
        updates = {name: self.weights[name] - before[name] for pair in self.pairs.items() for name in pair}
        corrected = {n: correct(updates[n], updates[first], most) for n, first in self.pairs.items()}
        held = {n: before[n] + update.clamp(-self.clip, self.clip) for n, update in corrected.items()}
        self.weights = pack({**self.weights, **held})


def correct(update: Tensor, first: Tensor, most: float | None = None) -> Tensor:
    """The update, kernel by kernel, with a share θ of the first block's; `most` None is the paper's θ."""
    norm, norm_first = (torch.linalg.vector_norm(t, dim=(2, 3), keepdim=True) for t in (update, first))
    along = (first * update).sum((2, 3), keepdim=True)
    theta = along / ((first * first).sum((2, 3), keepdim=True) + _SMALL)
    theta = (-theta).clamp(min=0) if most is None else theta.abs().clamp(max=most)
    return (update / (norm + _SMALL) + theta * first / (norm_first + _SMALL)) * (norm + norm_first) / 2


def correcting(reference: Reference) -> dict[str, str]:
    """Every convolution that is corrected → the one of its stage's first block that corrects it."""
    found = {}
    for first, *later in residual_stages(reference):
        by_shape = {reference.axes.shapes[name]: name for name in _convolutions(reference, first)}
        names = [name for block in later for name in _convolutions(reference, block)]
        found.update({name: by_shape[shape] for name in names if (shape := reference.axes.shapes[name]) in by_shape})
    if not found:
        message = "InCoAvg needs a residual network with several blocks a stage"
        raise InputError(message, field="model.name", fix="use tinyresnet or resnet18")
    return found


def _convolutions(reference: Reference, block: str) -> list[str]:
    """The convolutions of a block in order, those of its shortcut left out."""
    inside = [n for n, shape in reference.axes.shapes.items() if n.startswith(block + ".") and len(shape) == 4]
    return [n for n in inside if not {"shortcut", "downsample"} & set(n.split("."))]

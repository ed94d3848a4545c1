"""InCoAvg: updates of deep blocks corrected by those of the first block of their stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestling.errors import InputError
from nestling.methods.api import Info, Reference, Reply, World
from nestling.methods.kept import made
from nestling.methods.submodel.by_depth import ByDepth
from nestling.schema import require
from nestling.views.depth import residual_stages
from nestling.views.flat import pack

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

    compat: str = "paper"
    most: float = 5.0
    clip: float = 0.1

    pairs: dict[str, str] = made()

    info = Info("depth", "depth: the first blocks of every stage", "official code read", "B", model="tinyresnet")

    def __post_init__(self) -> None:
        require(self.compat in ("paper", "code"), f"unknown compat {self.compat!r}", "method.compat", "allowed: paper, code")
        require(self.most >= 0, "must not be negative", "method.most")
        require(self.clip > 0, "must be above 0", "method.clip")

    def setup(self, world: World) -> None:
        super().setup(world)
        self.pairs = correcting(world.main)

    def merge(self, replies: Sequence[Reply], round: int) -> None:
        before = self.weights
        super().merge(replies, round)
        updates = {name: self.weights[name] - before[name] for pair in self.pairs.items() for name in pair}
        corrected = {n: before[n] + self._corrected(updates[n], updates[first]) for n, first in self.pairs.items()}
        self.weights = pack({**self.weights, **corrected})

    def _corrected(self, update: Tensor, first: Tensor) -> Tensor:
        return correct(update, first, self.most if self.compat == "code" else None).clamp(-self.clip, self.clip)


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
        raise InputError(
            "InCoAvg needs a residual network with several blocks a stage", field="model.name", fix="use tinyresnet or resnet18"
        )
    return found


def _convolutions(reference: Reference, block: str) -> list[str]:
    """The convolutions of a block in order, those of its shortcut left out."""
    inside = [n for n, shape in reference.axes.shapes.items() if n.startswith(block + ".") and len(shape) == 4]
    return [n for n in inside if not {"shortcut", "downsample"} & set(n.split("."))]

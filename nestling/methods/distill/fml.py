"""FML: a client's own network and a shared one teach each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from nestling.methods.api import Client
from nestling.methods.distill.pair import INFO, Pairs
from nestling.settings import UnitShare
from nestling.tasks import losses
from nestling.training.objectives import Batch, Given, Net, Objective, divergence


@dataclass
class FML(Pairs):
    """FML (Shen et al., "Federated Mutual Learning", 2020).

    Idea: every client trains its own network, of any kind, and a copy of a small "meme" network that all share; each of the two is
    the other's teacher. Only the meme network travels: it carries what is common, and the own networks stay personal.
    Loss: α·cross-entropy + (1 − α)·KL(meme ‖ own) for the own network, β·cross-entropy + (1 − β)·KL(own ‖ meme) for the meme
    network, the teacher held still in both. Travels: the meme network, down and up. Merge: mean weighted by n_k. The global model is
    the meme network.
    Differs from the paper: a device's budget counts both networks, and the meme network is a narrow part of the main one; both have
    one optimiser's settings, and where gradients are clipped, one norm. Differs from HtFLlib, which was read: there the teacher is not
    held still, KL is the mean over the classes too, the mean over clients is plain, gradients are clipped, and α = β = 1, at
    which nothing is taught. The paper is from memory, and so are α and β.

    alpha:     α.
    beta:      β.
    ratio:     the width of the meme network, of the main one (0: the widest with at most half the smallest tier's parameters).
    weighting: what a client counts in its mean: "samples" (n_k) or "uniform".
    """

    alpha: UnitShare = 0.5
    beta: UnitShare = 0.5

    info = INFO

    def objective(self, client: Client) -> Objective:
        """Mutual learning by predictions, weighted by α and β."""
        return partial(_mutual, alpha=self.alpha, beta=self.beta)


def _mutual(net: Net, batch: Batch, given: Given, *, alpha: float, beta: float) -> Tensor:  # noqa: ARG001 (an objective)
    own, meme = net(batch.x)
    mine, common = (losses(logits, batch.y) for logits in (own, meme))
    mine = alpha * mine + (1 - alpha) * divergence(meme.detach(), own)
    common = beta * common + (1 - beta) * divergence(own.detach(), meme)
    return batch.mean(mine + common)

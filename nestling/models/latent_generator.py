"""A generator of features: what a class may look like to a classifier, made out of noise
(FedGen)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LatentGenerator(nn.Module):
    """(noise, labels) → features, through one hidden layer."""

    def __init__(self, noise: int, classes: int, hidden: int, features: int) -> None:
        """Reads `noise` numbers and one flag per class, and puts out `features` numbers."""
        super().__init__()
        self.classes = classes
        self.hidden = nn.Sequential(
            nn.Linear(noise + classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU()
        )
        self.out = nn.Linear(hidden, features)

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Features, one per label."""
        return self.out(self.hidden(_codes(noise, labels, self.classes)))


def generated(state: Mapping[str, Tensor], noise: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The features that a generator of this state makes in evaluation mode: a function of tensors
    alone, so that it can be batched over clients."""
    hidden = F.linear(
        _codes(noise, labels, classes), state["hidden.0.weight"], state["hidden.0.bias"]
    )
    mean, variance = state["hidden.1.running_mean"], state["hidden.1.running_var"]
    normed = F.batch_norm(hidden, mean, variance, state["hidden.1.weight"], state["hidden.1.bias"])
    return F.linear(F.relu(normed), state["out.weight"], state["out.bias"])


def _codes(noise: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Noise and the flag of the class. Flags are found by comparing, since torch's one-hot coding
    cannot be batched."""
    flags = labels[:, None] == torch.arange(classes, device=labels.device)
    return torch.cat([noise, flags.to(noise)], 1)

"""Hyper-knowledge of a class, its mean features and its mean soft prediction: clipped and noised, and what it teaches (FedHKD)."""

from __future__ import annotations

from math import sqrt

import numpy as np
import torch
from torch import Tensor

from nestling.methods.api import State
from nestling.methods.representation.class_means import gap
from nestling.tasks import losses
from nestling.training.objectives import Batch, Given, Net, divergence, forward_with_features

_CODE_NOISE = 2.0
_SOFT = sqrt(2.0)  # how far two soft predictions can be apart


def clipped(features: Tensor, most: float) -> Tensor:
    """Every row with its norm cut to at most `most`."""
    return features * (most / features.norm(dim=1, keepdim=True).clamp(min=1e-12)).clamp(max=1)


def noised(features: Tensor, soft: Tensor, scale: Tensor, clip: float, both: bool, chance: np.random.Generator) -> State:
    """The means of every class with Gaussian noise of its own, of `scale` (one number per class) times what one row moves a sum by.
    Soft predictions get theirs only where `both` do, and are probabilities again then."""
    draws = [torch.from_numpy(chance.normal(size=tuple(t.shape))).to(t) for t in (features, soft)]
    features = features + 2 * clip * scale * draws[0]
    if both:
        soft = (soft + _SOFT * scale * draws[1]).clamp(min=1e-6)
        soft = soft / soft.sum(1, keepdim=True)
    return {"features": features, "soft": soft}


def noised_alike(features: Tensor, chance: np.random.Generator) -> Tensor:
    """The means with one vector of noise for all classes, as in the code."""
    same = torch.from_numpy(chance.normal(scale=_CODE_NOISE, size=features.shape[1]))
    return features + same.to(features)


def taught(
    net: Net, batch: Batch, given: Given, *, lam: float, gamma: float, temperature: float, code: bool, head: str
) -> Tensor:
    """Cross-entropy, how far features are from the received means of their class, and what the head says wrong of these means."""
    logits, features = forward_with_features(net, batch.x, head)
    said = net.module.get_submodule(head)(given["features"])
    if code:
        wrong = _divergence(said, given, temperature)
        far = gap(features, batch.y, given)
    else:
        wrong = (_norm(torch.softmax(said / temperature, 1) - given["soft"]) * given["known"]).sum() / given["known"].sum()
        far = _norm(features - given["features"][batch.y]) * given["known"][batch.y]
    return batch.mean(losses(logits, batch.y) + gamma * far) + lam * wrong


def _norm(rows: Tensor) -> Tensor:
    """The rows' norms, with a gradient at 0 too."""
    return rows.square().sum(1).add(1e-12).sqrt()


def _divergence(said: Tensor, given: Given, temperature: float) -> Tensor:
    """KL from the received soft predictions to what the classifier says, the mean over classes and entries as in the code."""
    wanted = temperature * given["soft"].clamp(min=1e-12).log()
    classes = Batch(said, said, said, mask=given["known"] > 0)
    return classes.mean(divergence(wanted, said, temperature)) / (temperature**2 * said.shape[1])

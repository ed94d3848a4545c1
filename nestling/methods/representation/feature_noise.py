"""Noise on features: on what enters the middle of a network and on what leaves it, as a multiple of its spread."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestling.methods.api import Client
from nestling.seeds import derive
from nestling.training.noise import normal
from nestling.training.objectives import Batch, Given, Net, Objective
from nestling.views.middle import changed


@dataclass
class FeatureNoise:
    """Adds normal draws of one key to what it is given, new ones every time; `number` is how many it has taken."""

    key: Tensor
    number: int | Tensor
    amount: float

    def __call__(self, given: Tensor) -> Tensor:
        """What is given plus noise of `amount` times its standard deviation."""
        self.number = self.number + 1
        return given + self.amount * given.detach().std() * normal(self.key, self.number, given.shape)


def noise_key(client: Client, purpose: str) -> Tensor:
    """What a client's noise of a round is drawn from."""
    return torch.tensor(derive(client.site.seed, "noise of", purpose, client.id, client.round), device=client.place)


def noisy(net: Net, batch: Batch, given: Given, *, objective: Objective, entry: str, head: str, amount: float) -> Tensor:
    """The objective with noise on what enters the middle and on what leaves it."""
    change = FeatureNoise(given["noise"], 2 * batch.counter, amount)
    with changed(net.module, entry, change), changed(net.module, head, change):
        return objective(net, batch, given)

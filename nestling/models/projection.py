"""A projection head: two layers between a network's features and its classifier."""

from __future__ import annotations

import copy

from torch import nn

from nestling.errors import InputError
from nestling.seeds import torch_seeded


def projected(module: nn.Module, size: int, seed: int) -> nn.Module:
    """A copy of a network whose classifier reads `size` projected features."""
    changed = copy.deepcopy(module).to("cpu")
    head = dict(changed.named_children()).get("head")
    if not isinstance(head, nn.Linear):
        raise InputError(
            "a projection head needs a network that ends in one linear layer named 'head'",
            field="method.projection",
            fix="set method.projection = 0 or take another network, e.g. tinycnn",
        )
    with torch_seeded(seed, "network", "projection"):
        features, classes = head.in_features, head.out_features
        changed.head = nn.Sequential(
            nn.Linear(features, features),
            nn.ReLU(),
            nn.Linear(features, size),
            nn.Linear(size, classes),
        )
    return changed

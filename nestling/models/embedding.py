"""Features of one size for networks that have nothing in common: a layer between a network's own features and its classifier."""

from __future__ import annotations

import copy

from torch import nn

from nestling.errors import unknown
from nestling.models.parts import named
from nestling.models.taps import Taps

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "none": nn.Identity}


def with_embedding(module: nn.Module, taps: Taps, size: int, activation: str = "relu") -> nn.Module:
    """A copy of the network whose head is: linear to `size` features, the activation, linear to the classes.

    The last layer is then the same in all networks, and its input, bounded by the activation where that is wanted, means the same.
    """
    if activation not in ACTIVATIONS:
        raise unknown("activation", activation, ACTIVATIONS, field="method.activation")
    changed = copy.deepcopy(module)
    parent, _, last = taps.head.rpartition(".")
    head = changed.get_submodule(taps.head)
    assert isinstance(head, nn.Linear)
    top = named(embed=nn.Linear(head.in_features, size), act=ACTIVATIONS[activation](), out=nn.Linear(size, head.out_features))
    setattr(changed.get_submodule(parent), last, top.to(head.weight.device))
    own = getattr(changed, "taps", {})
    if "head" in own:  # a network that names its head itself
        vars(changed)["taps"] = {**own, "head": f"{taps.head}.out"}
    return changed

"""The classifier of a network on its own, for methods in which it travels or is compared without the rest."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from nestling.views import Reference, State, View

LEAVES = ("weight", "bias")


def head_of(state: Mapping[str, Tensor], head: str) -> State:
    """The tensors of the layer `head`, by their own names."""
    return {leaf: state[f"{head}.{leaf}"] for leaf in LEAVES if f"{head}.{leaf}" in state}


def with_head(state: Mapping[str, Tensor], head: str, common: Mapping[str, Tensor]) -> State:
    """The state with another classifier."""
    return {**state, **{f"{head}.{leaf}": tensor for leaf, tensor in common.items()}}


@lru_cache(maxsize=256)
def columns_of(reference: Reference, view: View, head: str) -> Tensor | None:
    """Which of the reference's features a view's classifier reads; None for all."""
    name = f"{head}.weight"
    weight = reference.initial[name]
    places = torch.arange(weight.shape[1], device=weight.device).to(weight.dtype).expand_as(weight)
    kept = view.extract({**reference.initial, name: places.contiguous()})[name][0].long()
    return None if len(kept) == weight.shape[1] else kept

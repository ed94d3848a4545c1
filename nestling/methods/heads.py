"""The classifier of a network on its own, for methods in which it travels or is compared without the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from nestling.methods.api import InputError, Piece, Reference, State, Tensors, View, pack

LEAVES = ("weight", "bias")


def head_of(state: Tensors, head: str) -> State:
    """The tensors of the layer `head`, by their own names."""
    return {leaf: state[f"{head}.{leaf}"] for leaf in LEAVES if f"{head}.{leaf}" in state}


def with_head(state: Tensors, head: str, common: Tensors) -> State:
    """The state with another classifier."""
    return {**state, **{f"{head}.{leaf}": tensor for leaf, tensor in common.items()}}


@lru_cache(maxsize=256)
def columns_of(reference: Reference, view: View, head: str) -> Tensor | None:
    """Which of the reference's features a view's classifier reads; None for all."""
    name = f"{head}.weight"
    weight = reference.initial[name]
    places = torch.arange(weight.shape[1], device=weight.device).to(weight.dtype).expand_as(weight)
    read = view.extract({**reference.initial, name: places.contiguous()})[name][0].long()
    return None if len(read) == weight.shape[1] else read


def common_head(pieces: Iterable[Piece]) -> State:
    """The classifier that networks with classifiers of one form begin with: that of the first of them."""
    found = [head_of(p.view.extract(p.reference.initial), p.reference.taps.head) for p in pieces]
    if any({name: t.shape for name, t in own.items()} != {name: t.shape for name, t in found[0].items()} for own in found):
        raise InputError(
            "the networks' classifiers have more than one form, and one classifier is to fit all of them",
            field="fleet.tiers",
            fix="give all of them a bias, or none",
        )
    return pack(found[0])


def mean_head(heads: Sequence[Tensors], weights: Sequence[float]) -> State:
    """The weighted mean of some classifiers, summed as the one merge does it."""
    total = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in heads[0].items()}
    for head, weight in zip(heads, weights, strict=True):
        for name, tensor in head.items():
            total[name] += weight * tensor.to(torch.float64)
    return pack({name: (t / sum(weights)).to(heads[0][name].dtype) for name, t in total.items()})

"""Gradient rules that several methods share."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from nestling.training.objectives import Given


def masked_gradients(params: Mapping[str, Tensor], grads: Mapping[str, Tensor], given: Given) -> Mapping[str, Tensor]:
    """Gradients times the mask of the same name, where there is one. A weight that is zero and whose mask is zero stays exactly zero:
    no gradient ever reaches the optimiser's memory, and decay multiplies zero."""
    return {name: grad * given[name] if name in given else grad for name, grad in grads.items()}

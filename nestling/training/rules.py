"""Gradient rules that several methods share."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from nestling.training.objectives import Given


def masked_gradients(
    params: Mapping[str, Tensor],  # noqa: ARG001 (a rule's signature)
    grads: Mapping[str, Tensor],
    given: Given,
) -> Mapping[str, Tensor]:
    """Gradients times the mask of the same name, where there is one. A weight that is zero and
    whose mask is zero stays exactly zero: no gradient ever reaches the optimiser's memory, and
    decay multiplies zero."""
    return {name: grad * given[name] if name in given else grad for name, grad in grads.items()}


def frozen_near_zero(
    params: Mapping[str, Tensor], grads: Mapping[str, Tensor], given: Given
) -> Mapping[str, Tensor]:
    """Gradients without those of weights below 1e-6, in the tensors that have a mask: pruned
    weights stay zero, and others that come near zero stop too."""
    return {
        name: grad * (params[name].detach().abs() >= 1e-6) if name in given else grad
        for name, grad in grads.items()
    }

"""The scaler of networks that are cut in width: what a narrowed convolution puts out is divided by the share of its channels that is
left, so that the layer behind it sees the scale of the wide network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

from torch import nn

from nestling.methods.api import Model, Reference, View
from nestling.training.phase import Hook, divide

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)


_KNOWN: WeakKeyDictionary[Reference, dict[bytes, Mapping[str, float]]] = WeakKeyDictionary()
"""What was found, by the form of a view: a window that moves on has the same."""


def narrowed(reference: Reference, view: View) -> Mapping[str, float]:
    """The convolutions that have fewer outputs in a view than in the reference, by name: the share that is left."""
    known = _KNOWN.setdefault(reference, {})
    if view.form() not in known:
        known[view.form()] = _shares(reference, view)
    return known[view.form()]


def _shares(reference: Reference, view: View) -> dict[str, float]:
    layers = [name for name, layer in reference.module.named_modules() if isinstance(layer, CONVOLUTIONS)]
    weights = {name: f"{name}.weight" for name in layers if f"{name}.weight" in view.members}
    shares = {name: view.shape(weight)[0] / view.axes.shapes[weight][0] for name, weight in weights.items()}
    return {name: share for name, share in shares.items() if share < 1}


def dividing(reference: Reference, view: View) -> tuple[Hook, ...]:
    """Hooks that divide what narrowed layers put out by their share."""
    shares = narrowed(reference, view)
    found = sorted(set(shares.values()), reverse=True)
    return tuple(
        Hook(CONVOLUTIONS, partial(divide, by=share), tuple(n for n, own in shares.items() if own == share)) for share in found
    )


def scaled(model: Model, shares: Mapping[str, float]) -> Model:
    """The model that computes without hooks what its network computes with them: the layers' weights and biases are divided."""
    divided = {name: t / shares[layer] for name, t in model.state.items() if (layer := name.rpartition(".")[0]) in shares}
    return replace(model, state={**model.state, **divided}) if divided else model

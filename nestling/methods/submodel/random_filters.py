"""Sub-networks of random filters, drawn anew for every batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nestling.methods.api import Phase, Reference, View
from nestling.seeds import stream
from nestling.tasks import losses
from nestling.training.objectives import Batch, Given, Net
from nestling.training.phase import Train
from nestling.views import Axes, by_index, to_spec
from nestling.views.nested import prepare
from nestling.views.picked import Picker, picker


def narrowed(axes: Axes, vector: Sequence[float]) -> View:
    """A view with as many filters as a vector leaves: ⌈(1 − d)·K⌉ of every axis, in whole groups where a group norm has them."""
    sizes = zip(axes.names, axes.sizes, axes.grains, vector, strict=True)
    return by_index(axes, {n: range(max(1, math.ceil((1 - d) * k / g - 1e-6)) * g) for n, k, g, d in sizes})


def draws(view: View, steps: int, seed: int, client: int, round: int) -> dict[str, Tensor]:
    """For every axis that the view narrows, by number, which filters are kept in each step."""
    rows, found = max(1, steps), {}
    for axis, (name, size, grain) in enumerate(zip(view.axes.names, view.axes.sizes, view.axes.grains, strict=True)):
        left = len(view.indices(axis)) // grain
        if left * grain < size:
            chance = stream(seed, "filters", client, round, name).random((rows, size // grain))
            groups = np.sort(chance.argsort(1)[:, :left], 1)
            found[str(axis)] = torch.from_numpy((groups[:, :, None] * grain + np.arange(grain)).reshape(rows, -1))
    return found


def dropped(net: Net, batch: Batch, given: Given, *, picker: Picker, view: View, rescale: bool) -> Tensor:
    """Cross-entropy of the sub-network that was drawn for this batch."""
    drawn = {int(axis): batch.pick(rows) for axis, rows in given.items()}
    logits = picker.forward(view, net.state(), drawn, batch.x, rescale=rescale)
    return batch.mean(losses(logits, batch.y))


def filters_phase(
    main: Reference, vector: Sequence[float], steps: int, seed: int, client: int, round: int, train: Train, rescale: bool
) -> Phase:
    """Local training of sub-networks that a vector leaves, drawn for so many steps; plain training where it leaves everything."""
    view = main.view(to_spec(narrowed(main.axes, vector)))
    plain = train.phase(max(round, 1))
    if view.key() == main.full.key():
        return plain
    prepare(main, [view])
    place = next(main.module.parameters()).device
    objective = partial(dropped, picker=picker(main, place), view=view, rescale=rescale)
    given = {name: drawn.to(place) for name, drawn in draws(view, steps, seed, client, round).items()}
    return replace(plain, objective=objective, given=given, optim=replace(plain.optim, lazy=True))

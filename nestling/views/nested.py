"""Networks inside networks: views of one reference, one in another.

`forward` runs an inner view's network on the outer one's parameters, so that gradients reach them;
`narrow` does the same with zeros in place of what is left out, so that a tensor may say which view
is meant. `nested_masks` cuts the weights that lead from a level's outer channels back into inner
ones: every level then computes the same inside a larger network as alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling.errors import InputError
from nestling.models.record import vocabulary
from nestling.models.taps import logits_and_features
from nestling.views.axes import Axes
from nestling.views.reference import Reference
from nestling.views.view import Index, View, put, take


def prepare(reference: Reference, views: Iterable[View]) -> None:
    """Builds the networks of views now. A phase whose objective uses `forward` does so first:
    inside a batch of clients it is too late."""
    for view in views:
        reference.network(view)


def forward(
    reference: Reference,
    view: View,
    state: Mapping[str, Tensor],
    x: Tensor,
    inside: View | None = None,
    *,
    training: bool = True,
) -> Tensor:
    """The output of the view's network, its weights cut out of `state` on the way. `inside` is the
    view that `state` is of (None: the whole reference); it must contain `view`. Statistics that are
    kept by width move in `state`. `training = False` runs it as a model that is only asked (no
    dropout)."""
    local = {name: take(state[name], within(view, inside, name)) for name in view.members}
    # The inner network's running statistics are its own: the outer ones must not see its batches.
    local = {name: t if name in reference.parameters else t.clone() for name, t in local.items()}
    network = reference.network(view).train(training)
    try:
        out = torch.func.functional_call(network, local, (x,))
    finally:
        if not training:
            network.train()  # the skeleton may be the one that another client is about to train
    for name in reference.by_width.intersection(local) if training else ():
        put(state[name], within(view, inside, name), local[name])
    return out


def within(view: View, outer: View | None, name: str) -> Index:
    """Where the view's entries of a tensor stand in the outer view's tensor."""
    if outer is None:
        return view.where(name)
    return tuple(
        _place(inner, around)
        for inner, around in zip(view.where(name), outer.where(name), strict=True)
    )


def _place(inner: slice | np.ndarray, around: slice | np.ndarray) -> slice | np.ndarray:
    if isinstance(inner, slice) and isinstance(around, slice):
        return slice(inner.start - around.start, inner.stop - around.start)
    positions, every = (
        np.arange(p.start, p.stop) if isinstance(p, slice) else p for p in (inner, around)
    )
    return np.searchsorted(every, positions)


def headed(network: nn.Module, head: str, view: View, inside: View, features: Tensor) -> Tensor:
    """The output of the view's network, where its features are among those that the network of
    `inside` gives its `head`."""
    layer = network.get_submodule(head)
    assert isinstance(layer, nn.Linear)
    rows, columns = within(view, inside, f"{head}.weight")
    bias = None if layer.bias is None else take(layer.bias, (rows,))
    return F.linear(
        take(features, (slice(None), columns)), take(layer.weight, (rows, columns)), bias
    )


@lru_cache(maxsize=64)
def common_head(reference: Reference, own: View, views: tuple[View, ...]) -> str:
    """The name of the head, where it makes the output of every view's network of the features that
    `own` has anyway (see `headed`): true of most networks under `nested_masks`. "" where it is not:
    where the head is no linear layer, or there is noise, or there are statistics, which each
    network would move on its own. Whether a layer mixes channels is tried out."""
    noisy = any(
        isinstance(layer, nn.modules.dropout._DropoutNd) for layer in reference.module.modules()
    )
    if (
        noisy
        or any(True for _ in reference.module.buffers())
        or any(view.dropped != own.dropped for view in views)
    ):
        return ""
    try:
        name = reference.taps.head
    except InputError:
        return ""
    place = next(iter(reference.initial.values())).device
    state = own.extract(reference.initial)
    for masked, mask in nested_masks(reference.axes, (own, *views), place).items():
        state[masked] = state[masked] * own.cut(masked, mask)
    x, network = _some_inputs(reference, place), reference.network(own, state).train()
    with torch.no_grad():
        features = logits_and_features(network, name, x)[1]
        if features.shape[1] != network.get_submodule(name).in_features:
            return ""  # it answers step by step
        pairs = [
            (forward(reference, v, state, x, inside=own), headed(network, name, v, own, features))
            for v in views
        ]
    return (
        name
        if all(torch.allclose(alone, common, rtol=1e-4, atol=1e-5) for alone, common in pairs)
        else ""
    )


def _some_inputs(reference: Reference, place: torch.device) -> Tensor:
    steps = torch.arange(2 * math.prod(reference.shape), device=place).reshape(2, *reference.shape)
    words = vocabulary(reference.module)
    return steps % words if words else steps.float().sin()


Channels = dict[str, list[tuple[int, Tensor]]]
"""Per parameter, for every dimension that can be sliced, (dimension, the channel of each entry)."""


def narrow(state: Mapping[str, Tensor], channels: Channels, flags: Tensor) -> dict[str, Tensor]:
    """The parameters with zeros for all channels that are not flagged."""
    found = {}
    for name, lines in channels.items():
        found[name] = state[name]
        for d, line in lines:
            found[name] = found[name] * flags[line].reshape(
                [-1 if k == d else 1 for k in range(state[name].dim())]
            )
    return found


@lru_cache(maxsize=64)
def by_zeros(
    reference: Reference, own: View, views: tuple[View, ...]
) -> tuple[Channels, Tensor | None]:
    """What `narrow` needs to run any of some views inside `own`: the channels of its parameters,
    and a row of flags per view. There are no flags where zeros are not the same as being left out:
    where statistics would see them, or a layer mixes channels. That is tried out."""
    place = next(iter(reference.initial.values())).device
    channels = _channels_of(reference, own, place)
    if any(True for _ in reference.module.buffers()):
        return channels, None
    # The last column stands for entries that belong to every view.
    flags = torch.from_numpy(
        np.stack([np.append(view.keep, True) for view in views]).astype(np.float32)
    ).to(place)
    state = own.extract(reference.initial)
    x = _some_inputs(reference, place)
    with torch.no_grad():
        for view, row in zip(views, flags, strict=True):
            cut = forward(reference, view, state, x, inside=own)
            zeroed = torch.func.functional_call(
                reference.network(own).train(), narrow(state, channels, row), (x,)
            )
            if not torch.allclose(cut, zeroed, rtol=1e-4, atol=1e-5):
                return channels, None
    return channels, flags


def _channels_of(reference: Reference, view: View, place: torch.device) -> Channels:
    found: Channels = {}
    for name in view.members:
        if name in reference.parameters:
            lines = zip(reference.axes.dims[name], view.where(name), strict=True)
            numbers = {
                d: np.where(dim < 0, reference.axes.channels, dim)[at]
                for d, (dim, at) in enumerate(lines)
                if dim is not None
            }
            found[name] = [
                (d, torch.from_numpy(channels).to(place)) for d, channels in numbers.items()
            ]
    return found


def nested_masks(
    axes: Axes, levels: Sequence[View], device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """For every weight between two axes, flags of the entries that may be used when each level must
    stand on its own: a channel reads no channel of a larger level. `levels` are nested, in any
    order."""
    smallest = np.full(axes.channels + 1, len(levels))
    for number, view in reversed(list(enumerate(sorted(levels, key=lambda v: int(v.keep.sum()))))):
        smallest[:-1][view.keep] = number
    smallest[-1] = 0  # answers for FREE: what belongs to every view
    masks = {}
    for name, dims in axes.dims.items():
        if len(dims) >= 2 and dims[0] is not None and dims[1] is not None:
            allowed = torch.from_numpy(smallest[dims[0]][:, None] >= smallest[dims[1]][None, :])
            masks[name] = (
                allowed.reshape(*allowed.shape, *[1] * (len(dims) - 2))
                .expand(axes.shapes[name])
                .clone()
                .to(device)
            )
    return masks


@lru_cache(maxsize=256)
def own_masks(
    reference: Reference, own: View, levels: tuple[View, ...], device: torch.device
) -> Mapping[str, Tensor]:
    """`nested_masks` of some levels as the network of `own` has them; the same tensors every time,
    which nobody writes to."""
    return {
        name: own.cut(name, mask)
        for name, mask in nested_masks(reference.axes, levels, device).items()
    }

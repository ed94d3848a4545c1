"""Channel axes of any `nn.Module`, found by tracing.

One forward pass on the meta device is recorded operation by operation. Every entry of every
sliceable dimension of every state tensor is a node; an operation ties the nodes that must be kept
or dropped together (the inputs of a convolution to the outputs it reads, both sides of a residual
add, the affine of a norm to its channels, the H×W entries of a flattened channel, the gates of a
recurrent unit, all channels of an attention head). What remains after all ties are drawn are
classes of nodes: a class is one channel, and the channels that a layer produces form an axis.

An operation that is not understood freezes what it touches: those channels are then never sliced. A
network that nobody thought of is therefore at worst sliced less, never wrongly. Where it is the
network's own code that must compute the right sizes, that is tried out (`views.trial`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from nestling.errors import InputError
from nestling.models.record import input_dtype
from nestling.models.tied import tie_again, tied_names
from nestling.views.axes import FREE, Axes, no_axes
from nestling.views.rules import tensors_in
from nestling.views.steps import Steps, TieRecorder, Uses, answer, following
from nestling.views.ties import Nodes, Ties
from nestling.views.trial import Trial, mend

_INPUTS = (torch.float32, torch.int64)  # a network of words takes their numbers


def trace(module: nn.Module, shape: Sequence[int]) -> Axes:
    """The axes of `module` for inputs of `shape` (without the batch dimension)."""
    tied = tied_names(module)
    on_meta = copy.deepcopy(module).to("meta").eval()
    tie_again(on_meta, tied)
    aliases = {name for others in tied.values() for name in others}
    state = {name: t for name, t in _state(on_meta).items() if name not in aliases}
    ties, steps, dtype = _record(on_meta, state, shape)
    counts: dict[str, np.ndarray] = {}
    notes: list[str] = []
    while True:
        axes, channels = _number_axes(state, ties)
        axes = Axes(
            axes.names,
            axes.sizes,
            axes.grains,
            axes.dims,
            axes.shapes,
            tied,
            {name: channels[nodes] for name, nodes in counts.items()},
            tuple(notes),
        )
        if not ties.risky or not mend(
            Trial(on_meta, shape, dtype, axes, channels, steps), ties, counts, notes
        ):
            return axes


def trace_or_whole(module: nn.Module, shape: Sequence[int]) -> Axes:
    """The axes of `module`, or none where it runs on such inputs but cannot be traced."""
    try:
        return trace(module, shape)
    except InputError as error:
        if not any(_runs(module, shape, dtype) for dtype in _INPUTS):
            raise
        shapes = {name: tuple(t.shape) for name, t in module.state_dict().items()}
        tied = tied_names(module)
        aliases = {name for others in tied.values() for name in others}
        return no_axes(
            {name: size for name, size in shapes.items() if name not in aliases},
            tied,
            error.message,
        )


def _runs(module: nn.Module, shape: Sequence[int], dtype: torch.dtype) -> bool:
    first = next(module.parameters(), torch.zeros(0))
    tried = copy.deepcopy(module).eval()
    try:
        with torch.no_grad():
            tried(torch.zeros((2, *shape), dtype=dtype, device=first.device))
    except Exception:
        return False
    return True


def _state(module: nn.Module) -> dict[str, Tensor]:
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return {name: tensors[name] for name in module.state_dict() if name in tensors}


def _record(
    module: nn.Module, state: Mapping[str, Tensor], shape: Sequence[int]
) -> tuple[Ties, Steps, torch.dtype]:
    """The ties and steps of one pass, and the type of input that it took: a network whose inputs
    are the numbers of words takes whole ones only."""
    refused = None
    for dtype in sorted(_INPUTS, key=lambda kind: kind != input_dtype(module)):
        try:
            return *_passed(module, state, shape, dtype), dtype
        except Exception as error:  # noqa: PERF203 (whatever a user's forward raises)
            refused = refused or error
    raise InputError(
        f"the network cannot be traced with inputs of shape {tuple(shape)}: {refused}",
        field="model.name",
        fix="its forward must run on a batch of that shape without looking at the values",
    ) from refused


def _passed(
    module: nn.Module, state: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype
) -> tuple[Ties, Steps]:
    ties = Ties()
    convolutions = {
        id(layer.weight) for layer in module.modules() if isinstance(layer, nn.modules.conv._ConvNd)
    }
    for tensor in state.values():
        ties.number(tensor, kernel=id(tensor) in convolutions)
    with torch.no_grad():
        with Uses() as uses:
            out = answer(module, shape, dtype)
        recorder = TieRecorder(ties, uses.used(out))
        with following(module, recorder.path), recorder:
            out = answer(module, shape, dtype)
    for tensor in tensors_in(out):
        ties.freeze(tensor)
    for tensor in state.values():
        if id(tensor) not in recorder.read:
            ties.freeze(tensor)
    ties.freeze_ragged()
    return ties, recorder.steps


def _number_axes(state: Mapping[str, Tensor], ties: Ties) -> tuple[Axes, np.ndarray]:
    """The axes, and the channel of every node (`FREE`: in every view)."""
    names: list[str] = []
    sizes: list[int] = []
    grains: list[int] = []
    roots: dict[str, Nodes] = {
        name: [None if n is None else ties.roots(n) for n in ties.of(t)]
        for name, t in state.items()
    }
    frozen, grouped = ties.frozen_roots(), ties.grouped_roots()
    channel_of: dict[int, int] = {}
    # Producers first (dimension 0 of weights), so that the reader of a concatenation does not
    # define the axes that it reads.
    order = [(name, 0) for name, dims in roots.items() if len(dims) >= 2]
    order += [(name, d) for name, dims in roots.items() for d in range(len(dims))]
    for name, d in order:
        nodes = roots[name][d]
        if nodes is None:
            continue
        fresh = [
            n for n in dict.fromkeys(nodes.tolist()) if n not in channel_of and n not in frozen
        ]
        if fresh:
            start = len(channel_of)
            channel_of.update({n: start + i for i, n in enumerate(fresh)})
            base = name.rsplit(".", 1)[0] if "." in name else name
            names.append(base if base not in names else f"{base}.{d}.{len(names)}")
            sizes.append(len(fresh))
            grain = math.lcm(*(grouped.get(n, 1) for n in fresh))
            grains.append(grain if len(fresh) % grain == 0 else 1)
    by_root = np.full(len(ties.parent), FREE, dtype=np.int64)
    by_root[list(channel_of)] = list(channel_of.values())
    dims = {
        name: tuple(_channels(nodes, by_root) for nodes in tensor) for name, tensor in roots.items()
    }
    shapes = {name: tuple(t.shape) for name, t in state.items()}
    channels = by_root[ties.roots(np.arange(len(ties.parent)))] if ties.risky else by_root
    return Axes(tuple(names), tuple(sizes), tuple(grains), dims, shapes), channels


def _channels(nodes: np.ndarray | None, by_root: np.ndarray) -> np.ndarray | None:
    if nodes is None:
        return None
    channels = by_root[nodes]
    return channels if (channels != FREE).any() else None

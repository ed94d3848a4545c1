"""What a network costs to train: parameters, multiply-accumulates, and the memory of its
activations.

The memory is a liveness bound. Time is one step per operation: all forwards in order, the loss,
then the backwards in reverse. An activation lives from its forward until the last step that needs
it; its gradient lives from the backward of its last reader to the backward of its producer. The
peak over time of what is live together is a floor under every allocator. Conventions:

- an activation function (ReLU and its kin) is fused into the operation before it and undone from
  its output;
- max-pooling keeps one index byte per output instead of its input;
- an entry-by-entry operation overwrites an operand nobody else wants, and the loss overwrites the
  logits with their gradient;
- views (flatten, transpose) share the storage they look at; weights are counted apart.

Torch runs recurrent layers and its own attention whole (`devices/in_torch.py`): `Cost.torch_bytes`
is the same bound with each of them as one operation.

A microcontroller is not estimated: where the C runtime knows all of a network's operations,
`Cost.planned` holds the sizes of the plan that it would be given.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import nn

from nestling.devices.in_torch import as_torch_runs_it
from nestling.errors import InputError
from nestling.models.record import FUSED, Operation, Record, record
from nestling.planning.forecast import Footprint, footprint
from nestling.planning.graph import Unsupported, lower_record
from nestling.planning.plan import plan

FLOAT = 4


@dataclass(frozen=True)
class Cost:
    """What one network costs. Bytes and MACs of activations are for one sample."""

    params: int  # trainable parameters
    weight_bytes: int  # the whole state, buffers included
    trainable_bytes: int
    macs: int  # one forward
    train_macs: int  # forward + gradients of inputs + gradients of weights
    activation_bytes: int  # peak of what is live in forward and backward
    inference_bytes: int  # peak of what is live in a forward alone
    # operations a runtime steps through: views and fused activation functions are not counted
    layers: int
    planned: Footprint | None = None  # the plan for the C runtime, if that can train the network
    lacks: str = ""  # if not: what the C runtime lacks
    torch_bytes: int = 0  # the same peak where torch trains the network


def cost_of(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Cost:
    """The cost of training `module` on samples of `shape` (no batch axis), from one recorded
    forward without computation.

    `dtype` is that of the input: float32, or int64 when the network begins with an embedding,
    unless given.
    """
    recorded = record(module, tuple(shape), dtype)
    planned, lacks = _planned(recorded, module, tuple(shape))
    forward, in_torch = fuse(recorded), as_torch_runs_it(recorded, module)
    peak = _training_peak(forward)
    trainable = sum(
        parameter.numel() for parameter in module.parameters() if parameter.requires_grad
    )
    macs = sum(operation.macs for operation in forward.operations)
    return Cost(
        params=trainable,
        weight_bytes=state_bytes(module),
        trainable_bytes=FLOAT * trainable,
        macs=macs,
        train_macs=macs + sum(operation.backward_macs for operation in forward.operations),
        activation_bytes=peak,
        inference_bytes=_peak(forward.bytes, _inference_lives(forward)),
        layers=sum(operation.on_path for operation in forward.operations),
        planned=planned,
        lacks=lacks,
        torch_bytes=peak if in_torch is None else _training_peak(fuse(in_torch)),
    )


def _training_peak(forward: Record) -> int:
    return _peak(forward.bytes, _training_lives(forward))


def _planned(
    forward: Record, module: nn.Module, shape: tuple[int, ...]
) -> tuple[Footprint | None, str]:
    try:
        return footprint(plan(lower_record(forward, module, shape))), ""
    except Unsupported as error:
        return None, error.operation
    except InputError as error:
        return None, f"room for {error.message}"


def state_bytes(module: nn.Module) -> int:
    """Bytes of the module's state; what two names share is counted once."""
    tensors = module.state_dict().values()
    distinct = {
        (tensor.untyped_storage()._cdata, tensor.storage_offset()): tensor for tensor in tensors
    }
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())


def fuse(forward: Record) -> Record:
    """The record with every activation function merged into the operation whose result only it
    reads."""
    readers: dict[int, list[int]] = {}
    for position, operation in enumerate(forward.operations):
        for value in operation.reads:
            readers.setdefault(value, []).append(position)
    merged: list[Operation] = []
    # value -> (place in `merged`, position) of whoever wrote it last
    writer: dict[int, tuple[int, int]] = {}
    for position, operation in enumerate(forward.operations):
        source = _fusable(operation, forward)
        at, wrote = writer.get(source, (-1, -1))
        in_place = source in operation.writes
        if (
            at >= 0
            and source not in merged[at].keeps
            and not _read_elsewhere(readers[source], wrote, position, in_place)
        ):
            merged[at] = _merge(merged[at], operation, source)
        else:
            at = len(merged)
            merged.append(operation)
        writer.update(dict.fromkeys(operation.writes, (at, position)))
    return replace(forward, operations=merged)


def _fusable(operation: Operation, forward: Record) -> int:
    """The value an activation function could be computed in place of, or -1."""
    if operation.name not in FUSED or len(operation.reads) != 1 or len(operation.writes) != 1:
        return -1
    source, result = operation.reads[0], operation.writes[0]
    wanted = source != result and source in forward.outputs
    return -1 if wanted or forward.bytes[source] != forward.bytes[result] else source


def _read_elsewhere(readers: list[int], wrote: int, position: int, in_place: bool) -> bool:
    later = [reader for reader in readers[bisect_right(readers, wrote) :] if reader != position]
    return any(reader < position for reader in later) if in_place else bool(later)


def _merge(host: Operation, operation: Operation, source: int) -> Operation:
    writes = tuple(operation.writes[0] if value == source else value for value in host.writes)
    return replace(
        host,
        writes=writes,
        keeps=host.keeps | operation.keeps,
        trained=host.trained or operation.trained,
    )


@dataclass
class _Life:
    """The steps, both included, during which a buffer for `value` exists."""

    value: int
    start: int
    end: int


def _peak(sizes: list[int], lives: Iterable[_Life]) -> int:
    changes: dict[int, int] = {}
    for life in lives:
        if life.end >= life.start:
            changes[life.start] = changes.get(life.start, 0) + sizes[life.value]
            changes[life.end + 1] = changes.get(life.end + 1, 0) - sizes[life.value]
    return max(accumulate(changes[step] for step in sorted(changes)), default=0)


def _forward_lives(forward: Record) -> dict[int, _Life]:
    """Each value from its first writer to its last reader; outputs to the end of the forward."""
    lives = {value: _Life(value, 0, 0) for value in forward.inputs}
    for step, operation in enumerate(forward.operations):
        for value in (*operation.reads, *operation.writes):
            lives.setdefault(value, _Life(value, step, step)).end = step
    last = max(len(forward.operations) - 1, 0)
    for value in forward.outputs:
        lives.setdefault(value, _Life(value, last, last)).end = last
    return lives


def _inference_lives(forward: Record) -> list[_Life]:
    lives = _forward_lives(forward)
    read = {value for operation in forward.operations for value in operation.reads}
    lives = {
        value: life for value, life in lives.items() if value in read or value in forward.outputs
    }
    _overwrite_operands(forward, lives)
    return list(lives.values())


def _training_lives(forward: Record) -> list[_Life]:
    """Steps 0..n-1 are forwards, n is the loss, and operation i has its backward at step 2n - i."""
    count = len(forward.operations)
    lives = _forward_lives(forward)
    for index, operation in enumerate(forward.operations):
        for value in operation.keeps if operation.trained else ():
            lives[value].end = max(lives[value].end, 2 * count - index)
    _overwrite_operands(forward, lives)
    gradients = _gradient_lives(forward)
    _overwrite_gradients(forward, gradients)
    return [*lives.values(), *gradients.values(), *_scratch_lives(forward)]


def _scratch_lives(forward: Record) -> Iterator[_Life]:
    count = len(forward.operations)
    for index, operation in enumerate(forward.operations):
        if operation.scratch >= 0:
            yield _Life(operation.scratch, index, index)
            if operation.trained:
                yield _Life(operation.scratch, 2 * count - index, 2 * count - index)


def _gradient_lives(forward: Record) -> dict[int, _Life]:
    count = len(forward.operations)
    born = dict.fromkeys(forward.outputs, count)
    made: dict[int, int] = {}
    for index, operation in enumerate(forward.operations):
        for value in operation.reads if operation.trained else ():
            born[value] = min(born.get(value, 2 * count), 2 * count - index)
        for value in operation.writes:
            made.setdefault(value, index)
    return {
        value: _Life(value, start, 2 * count - made[value])
        for value, start in born.items()
        if value in forward.trained and value in made
    }


def _overwrite_operands(forward: Record, lives: dict[int, _Life]) -> None:
    for step, operation in enumerate(forward.operations):
        if not operation.elementwise:
            continue
        size = forward.bytes[operation.writes[0]]
        for value in operation.reads:
            if value in operation.writes or value in forward.inputs or forward.bytes[value] != size:
                continue
            if value in lives and lives[value].end == step:
                lives[value].end = step - 1
                break


def _overwrite_gradients(forward: Record, gradients: dict[int, _Life]) -> None:
    count = len(forward.operations)
    for index, operation in enumerate(forward.operations):
        step, result = 2 * count - index, operation.writes[0]
        if not operation.elementwise or result not in gradients or gradients[result].end != step:
            continue
        for value in operation.reads:
            fresh = value in gradients and gradients[value].start == step
            if fresh and value != result and forward.bytes[value] == forward.bytes[result]:
                gradients[value].start = step + 1
                break

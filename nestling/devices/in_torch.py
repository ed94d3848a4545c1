"""What torch computes at once where a recorded pass has many operations: recurrent layers, and its
own attention.

A pass on the meta device has an LSTM as small operations step by step, and attention with its
scores, which is what a runtime of one's own could do. Torch computes the input's share of the gates
for all steps first, gives an LSTM on a CPU to oneDNN, which keeps a workspace several times as
large, and never writes down the scores of `scaled_dot_product_attention`. Such operations become
one here, with what torch keeps for it and what it needs while it works. The numbers, in floats a
step, are those of torch's code and of measured workspaces (tests/devices/test_measured_memory.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from torch import nn

from nestling.models.record import Operation, Record, Seen

FLOAT, BLOCK = 4, 16


@dataclass(frozen=True)
class Wants:
    """Floats a step of one layer in one direction: what is kept, and what is there while it
    works."""

    kept: float
    while_at_work: float


def wants(kind: str, inputs: int, hidden: int) -> Wants:
    """What torch wants for a layer of `hidden` units over `inputs` channels."""
    if kind == "LSTM":
        # oneDNN keeps gates, cells and states there and back, the states in rows as long as the
        # longer of input and state, filled up to whole blocks
        row = -(-max(inputs, hidden) // BLOCK) * BLOCK
        return Wants(9.2 * hidden + 6.2 * row, 5.7 * hidden + 2 * inputs)
    # of a GRU three gates, what two of them overwrote, the new state and the state; the input's
    # share of the gates is there for the whole forward
    return Wants(7 * hidden, 3 * hidden) if kind == "GRU" else Wants(hidden, hidden)


def as_torch_runs_it(forward: Record, module: nn.Module) -> Record | None:
    """The record with what torch computes at once as one operation; None where that is nothing."""
    parts, calls = dict(module.named_modules()), _calls_of_attention(forward.operations)
    if not calls and not any(isinstance(part, _RECURRENT) for part in parts.values()):
        return None
    rewriter = _Rewriter(forward, list(forward.bytes))
    operations = list[Operation]()

    def together(place: int) -> tuple[str, int]:
        layer = forward.operations[place].layer
        return (layer if isinstance(parts.get(layer), _RECURRENT) else ""), calls.get(place, -1)

    for (layer, call), places in groupby(range(len(forward.operations)), key=together):
        at = list(places)
        run, end, part = [forward.operations[place] for place in at], at[-1] + 1, parts.get(layer)
        if isinstance(part, nn.RNNBase):
            run = [rewriter.recurrent(run, part, end)]
        elif call >= 0:
            run = [rewriter.attention(run, end)]
        elif isinstance(part, nn.RNNCellBase):
            run = [rewriter.kept_twice(operation) for operation in run]
        operations += run
    return replace(forward, operations=operations, bytes=rewriter.sizes)


_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


def _calls_of_attention(operations: Sequence[Operation]) -> dict[int, int]:
    """Which operations belong to which call of torch's attention without dropout. Only that has
    this softmax; before it stand a product of two scaled maps and perhaps a mask, behind it a
    product."""
    found: dict[int, int] = {}
    writer: dict[int, int] = {}
    for at, (operation, then) in enumerate(pairwise(operations)):
        if operation.name == "_safe_softmax" and len(operation.shape) == 4 and then.name == "bmm":
            begin = _begin(operations, writer, at)
            found.update(dict.fromkeys(range(begin, at + 2), at) if begin >= 0 else {})
        writer.update(dict.fromkeys(operation.writes, at))
    return found


def _begin(operations: Sequence[Operation], writer: Mapping[int, int], softmax: int) -> int:
    """Where the call begins whose softmax this is; -1 where it is not made of what was expected."""
    scores = writer.get(operations[softmax].reads[0], -1)
    if scores >= 0 and operations[scores].name == "add":
        scores = writer.get(operations[scores].reads[0], -1)
    if scores < 0 or operations[scores].name != "bmm":
        return -1
    factors = [writer.get(value, scores) for value in operations[scores].reads]
    return min([scores, *(place for place in factors if operations[place].name == "mul")])


@dataclass
class _Rewriter:
    """Makes operations, and values for what they keep."""

    forward: Record
    sizes: list[int]

    def value(self, count: float) -> int:
        """A new value of so many floats."""
        self.sizes.append(round(FLOAT * count))
        return len(self.sizes) - 1

    def one(
        self, run: Sequence[Operation], end: int, kept: float, at_work: float, own: bool
    ) -> Operation:
        """A run of operations, the last of them in front of number `end`, as one. With `own` it
        keeps what it gives, too."""
        writes = self.made(run, end)
        inside = {value for operation in run for value in operation.writes}
        reads = dict.fromkeys(v for one in run for v in one.reads if v not in inside)
        keeps = self.value(kept)
        return Operation(
            run[0].name,
            tuple(reads),
            (*writes, keeps),
            frozenset({keeps, *reads, *(writes if own else ())}),
            any(operation.trained for operation in run),
            any(operation.on_path for operation in run),
            elementwise=False,
            macs=sum(operation.macs for operation in run),
            backward_macs=sum(operation.backward_macs for operation in run),
            layer=run[0].layer,
            shape=run[-1].shape,
            scratch=self.value(at_work),
        )

    def made(self, run: Sequence[Operation], end: int) -> tuple[int, ...]:
        """What a run writes that somebody reads later."""
        later = {value for operation in self.forward.operations[end:] for value in operation.reads}
        later.update(self.forward.outputs)
        written = dict.fromkeys(value for operation in run for value in operation.writes)
        return tuple(value for value in written if value in later)

    def recurrent(self, run: Sequence[Operation], layer: nn.RNNBase, end: int) -> Operation:
        """A recurrent module. The largest of what is read later is the states of all steps."""
        kind, ways = layer.mode.split("_")[0], 2 if layer.bidirectional else 1
        said = ways * (layer.proj_size or layer.hidden_size)
        states = max((self.sizes[value] for value in self.made(run, end)), default=0)
        steps = states / (FLOAT * said)
        inputs = [layer.input_size, *[said] * (layer.num_layers - 1)]
        each = [wants(kind, size, layer.hidden_size) for size in inputs]
        if kind != "LSTM":  # the steps of the input are brought together, which is a copy
            each[0] = replace(each[0], while_at_work=each[0].while_at_work + layer.input_size)
        # what one layer says is the next one's input; two ways are joined, which is a copy
        between = said * (layer.num_layers - 1) + (said * layer.num_layers if ways == 2 else 0)
        kept = steps * (ways * sum(one.kept for one in each) + between)
        at_work = steps * max(one.while_at_work for one in each)
        return self.one(run, end, kept, at_work, own=False)

    def attention(self, run: Sequence[Operation], end: int) -> Operation:
        """Torch's own attention keeps its inputs, what it gives, and of the scores one sum a
        step."""
        product = next(operation for operation in run if operation.name == "bmm")
        sums = math.prod(product.shape[:-1]) / self.forward.batch
        return self.one(run, end, sums, 0, own=True)

    def kept_twice(self, operation: Operation) -> Operation:
        """A product in place, of which the gradient needs what was overwritten: torch copies it."""
        first = operation.arguments.get("self")
        in_place = operation.name == "mul" and operation.writes[0] in operation.reads
        if not in_place or not isinstance(first, Seen):
            return operation
        copied = self.value(math.prod(first.shape) / self.forward.batch)
        return replace(
            operation,
            writes=(*operation.writes, copied),
            keeps=operation.keeps | {copied},
        )

"""When every buffer of a training step exists.

Time runs through the forwards in order, the loss, and the backwards in reverse; a backward has two
halves, since it first undoes the activation function, in the gradient where it lies and from the
operation's result, which it does not need after that.

- An activation exists from its forward to the last half that needs it: a forward that reads it, the
  backward of a trained convolution, dense layer or affine that reads it, the backward of a group
  norm that reads it, and the first half of its own operation's backward if that ends in an
  activation function.
- The gradient of a value exists from the backward of its last reader to that of its producer. There
  is none for the input, nor for what comes before the first trained operation.
- Max-pooling keeps one byte per output, the winner's place, and group norm two floats per group.
- A sum or an activation function overwrites an operand that nobody needs any more, and hands its
  gradient on where it lies (a sum to one of its operands: what has the gradient next may change it
  in place).
- The loss overwrites the logits with their gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from nestling.planning.arena import Buffer
from nestling.planning.graph import Graph, Node

FLOAT = 4
_IN_PLACE = ("add", "activation")
_KEEPS_INPUT_FOR_WEIGHTS = ("conv", "dense", "affine")


@dataclass
class Lives:
    """The buffers, and which of them holds what: by value for activations and gradients, by
    operation for the rest."""

    buffers: list[Buffer] = field(default_factory=list)
    activation: dict[int, int] = field(default_factory=dict)
    gradient: dict[int, int] = field(default_factory=dict)
    aux: dict[int, int] = field(default_factory=dict)
    # of an operation's inputs: the gradient is added to another
    adds: dict[int, tuple[bool, ...]] = field(default_factory=dict)
    trained: frozenset[int] = frozenset()  # operations whose parameters are trained
    hands_on: frozenset[int] = frozenset()  # operations that have a gradient to hand to an input

    def new(self, size: int, start: int, end: int) -> int:
        """The number of another buffer."""
        self.buffers.append(Buffer(size, start, end))
        return len(self.buffers) - 1


def lives_of(graph: Graph, trained: frozenset[int]) -> Lives:
    """When the buffers of a training step exist. `trained`: the numbers of the operations whose
    parameters are trained."""
    wants = _values_with_gradient(graph, trained)
    hands_on = frozenset(
        i for i, node in enumerate(graph.nodes) if any(value in wants for value in node.inputs)
    )
    lives = Lives(trained=trained, hands_on=hands_on)
    _activations(graph, lives)
    _auxiliaries(graph, lives)
    _gradients(graph, lives, wants)
    return lives


def value_bytes(graph: Graph, value: int) -> int:
    """Bytes of a value or of its gradient."""
    return FLOAT * math.prod(graph.shapes[value])


def aux_bytes(graph: Graph, node: Node) -> int:
    """Bytes that an operation keeps between its forward and its backward beside values."""
    if node.kind == "max_pool":
        return math.prod(graph.shapes[node.output])
    return 2 * FLOAT * node.groups if node.kind == "group_norm" else 0


@dataclass(frozen=True)
class _Clock:
    """The time of everything: `count` operations, two halves each."""

    count: int

    def forward(self, index: int) -> int:
        return 2 * index

    @property
    def loss(self) -> int:
        return 2 * self.count

    def undo(self, index: int) -> int:
        return 2 * (2 * self.count - index)

    def backward(self, index: int) -> int:
        return self.undo(index) + 1


def _values_with_gradient(graph: Graph, trained: frozenset[int]) -> set[int]:
    """The values made from something that is trained."""
    wants: set[int] = set()
    for index, node in enumerate(graph.nodes):
        if index in trained or wants.intersection(node.inputs):
            wants.add(node.output)
    return wants


def _ends(graph: Graph, lives: Lives, clock: _Clock) -> dict[int, int]:
    """The last half step that needs each value."""
    ends = {graph.input: 0, graph.output: clock.loss}
    for index, node in enumerate(graph.nodes):
        trained, works = index in lives.trained, index in lives.trained or index in lives.hands_on
        keeps = (node.kind == "group_norm" and works) or (
            node.kind in _KEEPS_INPUT_FOR_WEIGHTS and trained
        )
        for value in node.inputs:
            ends[value] = max(
                ends.get(value, 0), clock.backward(index) if keeps else clock.forward(index)
            )
        undone = node.activation and works
        ends[node.output] = max(
            ends.get(node.output, 0), clock.undo(index) if undone else clock.forward(index)
        )
    return ends


def _activations(graph: Graph, lives: Lives) -> None:
    clock = _Clock(len(graph.nodes))
    ends = _ends(graph, lives, clock)
    lives.activation[graph.input] = lives.new(value_bytes(graph, graph.input), 0, ends[graph.input])
    for index, node in enumerate(graph.nodes):
        start, end = clock.forward(index), ends[node.output]
        reused = _overwritten(graph, lives, node, start)
        if reused is None:
            lives.activation[node.output] = lives.new(value_bytes(graph, node.output), start, end)
        else:
            lives.buffers[reused].end = end
            lives.activation[node.output] = reused


def _overwritten(graph: Graph, lives: Lives, node: Node, now: int) -> int | None:
    """The buffer of an operand that ends here and may hold the result."""
    if node.kind not in _IN_PLACE:
        return None
    for value in node.inputs:
        buffer = lives.activation[value]
        if value != graph.input and lives.buffers[buffer].end == now:
            return buffer
    return None


def _auxiliaries(graph: Graph, lives: Lives) -> None:
    clock = _Clock(len(graph.nodes))
    for index, node in enumerate(graph.nodes):
        size = aux_bytes(graph, node)
        if size:
            works = index in lives.trained or index in lives.hands_on
            now = clock.forward(index)
            lives.aux[index] = lives.new(size, now, clock.backward(index) if works else now)


def _gradients(graph: Graph, lives: Lives, wants: set[int]) -> None:
    clock = _Clock(len(graph.nodes))
    maker = {node.output: index for index, node in enumerate(graph.nodes)}
    if graph.output in wants:
        _logit_gradient(graph, lives, maker[graph.output])
    for index in sorted(lives.hands_on, reverse=True):
        inputs = graph.nodes[index].inputs
        fresh = [
            value
            for value in dict.fromkeys(inputs)
            if value in wants and value not in lives.gradient
        ]
        known = set(lives.gradient)
        in_place = graph.nodes[index].kind in _IN_PLACE and len(set(inputs)) == len(inputs)
        for place, value in enumerate(fresh):
            end = clock.backward(maker[value])
            if in_place and place == 0:
                lives.gradient[value] = lives.gradient[graph.nodes[index].output]
                lives.buffers[lives.gradient[value]].end = end
            else:
                lives.gradient[value] = lives.new(
                    value_bytes(graph, value), clock.backward(index), end
                )
        lives.adds[index] = tuple(
            value in known or value in inputs[:place] for place, value in enumerate(inputs)
        )


def _logit_gradient(graph: Graph, lives: Lives, last: int) -> None:
    clock = _Clock(len(graph.nodes))
    logits = lives.activation[graph.output]
    if graph.nodes[last].activation:  # its backward needs the logits themselves
        size = value_bytes(graph, graph.output)
        lives.gradient[graph.output] = lives.new(size, clock.loss, clock.backward(last))
    else:
        lives.buffers[logits].end = clock.backward(last)
        lives.gradient[graph.output] = logits

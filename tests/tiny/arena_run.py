"""A training step run over labels instead of numbers: every word of the arena knows what was
written there last, so that a plan which lets one buffer destroy another is found by what is read,
and not by a second calculation of lifetimes."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from nestling.planning import descriptor as d
from nestling.planning.descriptor import NONE, Op
from nestling.planning.plan import MemoryPlan


@dataclass
class Arena:
    plan: MemoryPlan
    words: list[Hashable] = field(default_factory=list)
    # by value: how many of its readers have given their share
    gradients: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        header = self.plan.header
        assert header.arena % 4 == 0
        self.words = [None] * (header.arena // 4)

    def write(self, place: int, size: int, label: Hashable) -> None:
        assert place != NONE and place % 4 == 0 and place + size <= self.plan.header.arena
        for word in range(place // 4, -(-(place + size) // 4)):
            assert not (isinstance(self.words[word], str)), f"{label} destroys {self.words[word]}"
            self.words[word] = label

    def read(self, place: int, size: int, label: Hashable) -> None:
        found = set(self.words[place // 4 : -(-(place + size) // 4)])
        assert found == {label}, f"{label} wanted, {found} found"


def run(plan: MemoryPlan) -> None:
    """One sample's forward, loss and backward."""
    arena, header, graph = Arena(plan), plan.header, plan.graph
    for name, place, size in _blocks(plan):
        arena.write(place, size, name)
    arena.write(
        header.input, 4 * header.in_channels * header.in_height * header.in_width, (graph.input, 0)
    )
    for index, op in enumerate(plan.ops):
        _forward(arena, index, op)
    arena.read(header.output, 4 * header.classes, (graph.output, 0))
    if header.trained:
        arena.write(header.output_grad, 4 * header.classes, (graph.output, 1))
        arena.gradients[graph.output] = 1
    for index in reversed(range(len(plan.ops))):
        _backward(arena, index, plan.ops[index])
    for name, place, size in _blocks(plan):
        arena.read(place, size, name)


def _blocks(plan: MemoryPlan) -> list[tuple[str, int, int]]:
    header = plan.header
    trained, classes = 4 * header.trained, 4 * header.classes
    sizes = {"weights": 4 * header.params, "grads": trained, "momentum": trained, "anchor": trained}
    sizes |= {"mask": 4 * -(-header.trained // 32), "target": classes, "present": classes}
    places = {name: getattr(header, name) for name in sizes}
    return [
        (name, places[name], size) for name, size in sizes.items() if places[name] != NONE and size
    ]


def _sizes(op: Op) -> tuple[int, int, int]:
    """Bytes of the input, of the output, and of what is kept beside."""
    out = op.out_channels * op.out_height * op.out_width
    beside = {d.MAX_POOL: out, d.GROUP_NORM: 8 * op.groups}.get(op.kind, 0)
    return 4 * op.in_channels * op.in_height * op.in_width, 4 * out, beside


def _forward(arena: Arena, index: int, op: Op) -> None:
    node = arena.plan.graph.nodes[index]
    taken, given, beside = _sizes(op)
    assert taken == 4 * math.prod(arena.plan.graph.shapes[node.inputs[0]])
    for value, place in zip(node.inputs, (op.first, op.second), strict=False):
        arena.read(place, taken, (value, 0))
    if beside:
        arena.write(op.aux, beside, (index, "aux"))
    for value, place in zip(node.inputs, (op.first, op.second), strict=False):
        arena.read(place, taken, (value, 0))
        # those may overwrite an operand, entry by entry
        if op.kind not in (d.ADD, d.ACTIVATION) or place != op.out:
            _apart((place, taken), (op.out, given))
    arena.write(op.out, given, (node.output, 0))
    if beside:
        arena.read(op.aux, beside, (index, "aux"))


def _backward(arena: Arena, index: int, op: Op) -> None:
    if not op.flags & (d.TRAINED | d.INPUT_GRADIENT):
        return
    node, plan = arena.plan.graph.nodes[index], arena.plan
    taken, given, beside = _sizes(op)
    readers = [
        other
        for k, other in enumerate(plan.graph.nodes)
        if plan.ops[k].flags & d.INPUT_GRADIENT
        for other in other.inputs
    ]
    wanted = 1 if node.output == plan.graph.output else readers.count(node.output)
    assert arena.gradients[node.output] == wanted, "its gradient is not complete"
    arena.read(op.out_grad, given, (node.output, 1))
    if op.activation:
        arena.read(op.out, given, (node.output, 0))
    if op.kind == d.GROUP_NORM or (op.flags & d.TRAINED and op.kind in (d.CONV, d.DENSE, d.AFFINE)):
        arena.read(op.first, taken, (node.inputs[0], 0))
    if beside:
        arena.read(op.aux, beside, (index, "aux"))
    if op.flags & d.INPUT_GRADIENT:
        _hand_on(arena, index, op)
    # What was read above is read until the last entry of the gradient is written.
    if op.kind not in (d.ADD, d.ACTIVATION):
        arena.read(op.out_grad, given, (node.output, 1))
        if op.kind == d.GROUP_NORM or (
            op.flags & d.TRAINED and op.kind in (d.CONV, d.DENSE, d.AFFINE)
        ):
            arena.read(op.first, taken, (node.inputs[0], 0))
        if beside:
            arena.read(op.aux, beside, (index, "aux"))


def _hand_on(arena: Arena, index: int, op: Op) -> None:
    node, taken = arena.plan.graph.nodes[index], _sizes(op)[0]
    sides = ((op.first_grad, d.ADD_TO_FIRST), (op.second_grad, d.ADD_TO_SECOND))
    handed = [place for place, _ in sides if place == op.out_grad]
    assert len(handed) <= 1, "two values may not change one gradient"
    assert not handed or op.kind in (d.ADD, d.ACTIVATION)
    # The copy goes first: what takes the place of the output's gradient must not be needed for it
    # any more.
    for value, (place, added) in sorted(
        zip(node.inputs, sides, strict=False), key=lambda side: side[1][0] == op.out_grad
    ):
        if place == NONE:
            continue
        if op.flags & added:
            arena.read(place, taken, (value, 1))
            arena.gradients[value] += 1
        else:
            assert value not in arena.gradients
            if place != op.out_grad:
                arena.read(op.out_grad, _sizes(op)[1], (node.output, 1))
            arena.write(place, taken, (value, 1))
            arena.gradients[value] = 1


def _apart(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert one[0] + one[1] <= other[0] or other[0] + other[1] <= one[0]

"""Which entries of which tensors can only be kept or dropped together.

Every entry of every sliceable dimension of every state tensor is a node; tying two nodes joins
their classes. A tensor carries nodes on each of its dimensions. Where a dimension was unfolded into
several (channels into heads and their inner channels), it carries them on those dimensions jointly
until an operation says which of them is the one that can be sliced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

Nodes = list[np.ndarray | None]
"""For each dimension of a tensor its node numbers, or None where the dimension can never be sliced
(batch, space)."""


@dataclass(frozen=True, eq=False)
class Joint:
    """Nodes over several dimensions at once: `nodes` has the sizes of `dims`, in rising order."""

    dims: tuple[int, ...]
    nodes: np.ndarray

    def moved(self, places: Sequence[int]) -> Joint:
        """The same nodes where old dimension `d` stands at `places[d]`."""
        new = [places[d] for d in self.dims]
        order = sorted(range(len(new)), key=new.__getitem__)
        return Joint(tuple(new[k] for k in order), self.nodes.transpose(order))


@dataclass(frozen=True, eq=False)
class Heads:
    """Channels that an operation treats as heads: one node a head, and the channels of each."""

    nodes: np.ndarray
    channels: int


class Ties:
    """Union-find over nodes, and which nodes each tensor's dimensions carry.

    risky: whether a rule was used that leaves it to the network's own code to compute the right
           sizes when it is cut, so that this has to be tried.
    """

    def __init__(self) -> None:
        """Starts without nodes."""
        self.parent: list[int] = []
        self.frozen: set[int] = set()
        self.groups: dict[int, int] = {}  # node → size of the group norm's group it is in
        self.nodes: dict[int, Nodes] = {}
        self.joints: dict[int, tuple[Joint, ...]] = {}
        self.heads: list[Heads] = []
        self.states: set[int] = set()
        self.made: set[int] = set()  # nodes of constants that the forward makes
        self.risky = False
        # holds the tensors, so that an id is never given to a second one
        self.alive: list[Tensor] = []

    def number(self, tensor: Tensor, kernel: bool) -> None:
        """Fresh nodes for every entry of every dimension of a state tensor, but for the sides of a
        kernel."""
        self.states.add(id(tensor))
        self.give(
            tensor,
            [
                None if kernel and d >= 2 else self.fresh(size)
                for d, size in enumerate(tensor.shape)
            ],
        )

    def fresh(self, size: int) -> np.ndarray:
        """New nodes, tied to nothing."""
        start = len(self.parent)
        self.parent.extend(range(start, start + size))
        return np.arange(start, start + size)

    def give(self, tensor: Tensor, nodes: Nodes, joints: Iterable[Joint] = ()) -> None:
        """Says which nodes a tensor carries; nodes over a single dimension are that dimension's."""
        nodes, kept = list(nodes), []
        for joint in joints:
            if len(joint.dims) == 1:
                nodes[joint.dims[0]] = joint.nodes
            else:
                kept.append(joint)
        self.alive.append(tensor)
        self.nodes[id(tensor)] = nodes
        self.joints[id(tensor)] = tuple(kept)

    def of(self, tensor: Tensor) -> Nodes:
        """The nodes of a tensor's dimensions, one by one: what it carries jointly is frozen. A
        constant that appeared from nowhere has none."""
        for joint in self.joints.get(id(tensor), ()):
            self.freeze_nodes(joint.nodes.reshape(-1))
        return self.apart(tensor)

    def apart(self, tensor: Tensor) -> Nodes:
        """The nodes of a tensor's dimensions, for a rule that looks at the joint ones too; a
        dimension that is frozen as a whole needs none."""
        lines = self.nodes.get(id(tensor), [None] * tensor.dim())
        return [None if self._all_frozen(line) else line for line in lines]

    def _all_frozen(self, line: np.ndarray | None) -> bool:
        if line is None or not len(line) or int(line[0]) not in self.frozen:
            return False
        return self.frozen.issuperset(line.tolist())

    def jointly(self, tensor: Tensor) -> tuple[Joint, ...]:
        """What a tensor carries over several dimensions at once."""
        return self.joints.get(id(tensor), ())

    def flatten(self, joint: Joint, dims: Iterable[int]) -> Joint:
        """The joint without some of its dimensions: along them all nodes are tied to the first."""
        gone = [k for k, d in enumerate(joint.dims) if d in set(dims)]
        self.risky |= bool(gone)
        nodes = joint.nodes
        for k in reversed(gone):
            first = nodes.take([0], axis=k)
            self.tie(np.broadcast_to(first, nodes.shape).reshape(-1), nodes.reshape(-1))
            nodes = first.squeeze(k)
        return Joint(tuple(d for k, d in enumerate(joint.dims) if k not in gone), nodes)

    def root(self, node: int) -> int:
        """The oldest node of a class."""
        while self.parent[node] != node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def roots(self, nodes: np.ndarray) -> np.ndarray:
        """The oldest node of each node's class."""
        flat = [self.root(n) for n in nodes.reshape(-1).tolist()]
        return np.array(flat, dtype=np.int64).reshape(nodes.shape)

    def frozen_roots(self) -> set[int]:
        """The classes that belong to every view."""
        return {self.root(n) for n in self.frozen}

    def grouped_roots(self) -> dict[int, int]:
        """The size of the group norm's group that a class is in."""
        return {self.root(n): size for n, size in self.groups.items()}

    def tie(self, a: np.ndarray | None, b: np.ndarray | None) -> None:
        """Entry i of `a` and entry i of `b` are kept or dropped together; what is tied to an
        unsliceable dimension is frozen."""
        if a is None or b is None or len(a) != len(b):
            self.freeze_nodes(a)
            self.freeze_nodes(b)
        elif a is not b:
            self.join(a, b)

    def join(self, a: np.ndarray, b: np.ndarray) -> bool:
        """Makes entry i of `a` and entry i of `b` one class; whether any were not before."""
        changed = False
        for i, j in zip(a.tolist(), b.tolist(), strict=True):
            ri, rj = self.root(i), self.root(j)
            if ri != rj:
                # The older node stays the root: numbering follows the order of the state.
                self.parent[max(ri, rj)] = min(ri, rj)
                changed = True
        return changed

    def freeze_ragged(self) -> None:
        """Freezes what is carried jointly and would not stay a rectangle when it is cut."""
        for joint in (j for joints in self.joints.values() for j in joints):
            roots = self.roots(joint.nodes)
            varying = [(roots != roots.take([0], axis=k)).any() for k in range(roots.ndim)]
            if sum(varying) > 1:
                self.freeze_nodes(joint.nodes)

    def freeze_nodes(self, nodes: np.ndarray | None) -> None:
        """Puts nodes into every view."""
        if nodes is not None:
            self.frozen.update(nodes.reshape(-1).tolist())

    def freeze(self, tensor: Tensor) -> None:
        """Puts every entry of a tensor into every view."""
        for nodes in self.of(tensor):
            self.freeze_nodes(nodes)

"""A graph hyper-network: a network that makes the weights of other networks from their
architecture.

A network is a graph of its layers. Every layer starts as the embedding of its kind and its shape;
one pass of gated messages along the graph and one back let it know its surroundings; decoders turn
what it then is into its tensors. The decoders have one largest shape: a smaller tensor is cut out
of it, a larger one tiled.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

KINDS = ("convolution", "grouped convolution", "linear", "head", "norm", "other")
BINS = 13
"""Sizes are told apart by their power of two."""


@dataclass(frozen=True)
class GraphLayer:
    """A node: the layer's name and kind, the shapes of its tensors, and which layers it reads."""

    name: str
    kind: int
    tensors: dict[str, tuple[int, ...]]
    reads: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes that its embedding tells of."""
        return self.tensors.get("weight", next(iter(self.tensors.values())))


def graph_of(module: nn.Module) -> tuple[GraphLayer, ...]:
    """The layers that have parameters, each after those it reads; a chain where the network cannot
    be traced."""
    tensors: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, p in module.named_parameters():  # a tied one once, under its first name
        layer, _, leaf = name.rpartition(".")
        tensors.setdefault(layer, {})[leaf] = tuple(p.shape)
    layers = {name: layer for name, layer in module.named_modules() if name in tensors}
    reads = _reads(module, layers) or {
        name: [before] if before else []
        for before, name in zip(["", *layers], layers, strict=False)
    }
    last = [name for name in reads if isinstance(layers[name], nn.Linear)][-1:]
    numbers = {name: number for number, name in enumerate(reads)}
    return tuple(
        GraphLayer(
            name,
            KINDS.index("head") if name in last else _kind(layers[name]),
            tensors[name],
            tuple(numbers[other] for other in before),
        )
        for name, before in reads.items()
    )


def _reads(module: nn.Module, layers: dict[str, nn.Module]) -> dict[str, list[str]]:
    """Layer → the layers whose output reaches it through operations without parameters; nothing
    where tracing fails."""
    try:
        nodes = fx.symbolic_trace(module).graph.nodes
    except Exception:  # whatever a user's forward does that tracing cannot follow
        return {}
    reaching: dict[fx.Node, list[str]] = {}
    found: dict[str, list[str]] = {}
    for node in nodes:
        before = list(
            dict.fromkeys(name for source in node.all_input_nodes for name in reaching[source])
        )
        named = str(node.target) if node.op == "call_module" and node.target in layers else ""
        if named and named not in found:
            found[named] = before
        reaching[node] = [named] if named else before
    return found if found.keys() == layers.keys() else {}


def _kind(layer: nn.Module) -> int:
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return int(layer.groups > 1)
    if isinstance(layer, nn.Linear):
        return KINDS.index("linear")
    norms = (nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._BatchNorm)
    return KINDS.index("norm" if isinstance(layer, norms) else "other")


class HyperNetwork(nn.Module):
    """φ. `max_shape` is (outputs, inputs, kernel) of the largest weight that is made without
    tiling; `max_inputs` that of flat ones."""

    def __init__(
        self,
        classes: int,
        hidden: int = 32,
        basis: int = 16,
        max_shape: tuple[int, int, int] = (64, 64, 5),
        max_inputs: int = 1024,
    ) -> None:
        """Makes the embeddings of kinds and sizes, the gated unit, and one decoder for each form of
        tensor."""
        super().__init__()
        outputs, inputs, kernel = max_shape
        self.max_shape, self.classes, self.basis = max_shape, classes, basis
        self.kinds = nn.Parameter(torch.randn(len(KINDS), hidden))
        self.sizes = nn.Parameter(torch.randn(4, BINS, hidden) / 2)
        self.message = nn.Sequential(
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden)
        )
        self.gates, self.fresh = nn.Linear(2 * hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.space, self.channels = (
            nn.Linear(hidden, kernel**2 * basis),
            nn.Linear(basis, outputs * inputs, bias=False),
        )
        self.rows, self.columns = (
            nn.Linear(hidden, outputs * basis),
            nn.Linear(basis, max_inputs, bias=False),
        )
        self.head, self.head_columns = (
            nn.Linear(hidden, classes * basis),
            nn.Linear(basis, max_inputs, bias=False),
        )
        self.line = nn.Linear(hidden, 2 * outputs)

    def forward(self, graph: tuple[GraphLayer, ...]) -> dict[str, Tensor]:
        """The parameters of a network by name."""
        states = self._pass_messages(graph, [self._embed(layer) for layer in graph])
        return {
            f"{layer.name}.{leaf}" if layer.name else leaf: self._decode(layer, leaf, shape, state)
            for layer, state in zip(graph, states, strict=True)
            for leaf, shape in layer.tensors.items()
        }

    def _embed(self, layer: GraphLayer) -> Tensor:
        bins = [min(int(math.log2(size)), BINS - 1) for size in layer.shape[:4]]
        return torch.stack(
            [self.kinds[layer.kind], *(self.sizes[place, b] for place, b in enumerate(bins))]
        ).sum(0)

    def _pass_messages(self, graph: tuple[GraphLayer, ...], states: list[Tensor]) -> list[Tensor]:
        for number, layer in enumerate(graph):
            states = self._update(states, number, layer.reads)
        for number in reversed(range(len(graph))):
            states = self._update(
                states, number, [k for k, layer in enumerate(graph) if number in layer.reads]
            )
        return states

    def _update(
        self, states: list[Tensor], number: int, others: tuple[int, ...] | list[int]
    ) -> list[Tensor]:
        """A gated recurrent unit, spelt out so that it can be batched over clients."""
        own = states[number]
        heard = (
            torch.stack([self.message(states[k]) for k in others]).sum(0)
            if others
            else torch.zeros_like(own)
        )
        reset, update = self.gates(torch.cat([heard, own])).sigmoid().chunk(2)
        fresh = self.fresh(torch.cat([heard, reset * own])).tanh()
        return [*states[:number], (1 - update) * fresh + update * own, *states[number + 1 :]]

    def _decode(
        self, layer: GraphLayer, leaf: str, shape: tuple[int, ...], state: Tensor
    ) -> Tensor:
        if leaf == "weight" and len(shape) >= 2:
            # Every weight gets the scale that keeps the signal's size through its layer.
            weight = fitted(self._weight(KINDS[layer.kind], len(shape), state), shape)
            gain = 1.0 if KINDS[layer.kind] == "head" else 2.0
            return (
                weight
                * (gain / math.prod(shape[1:])) ** 0.5
                / (weight.square().mean() + 1e-8).sqrt()
            )
        scales, shifts = self.line(state).chunk(2)
        flat = fitted(scales if leaf == "weight" else shifts, (math.prod(shape),)).reshape(shape)
        return 2 * (flat / 2).sigmoid() if leaf == "weight" else (flat / 5).tanh()

    def _weight(self, kind: str, dims: int, state: Tensor) -> Tensor:
        outputs, inputs, kernel = self.max_shape
        if dims == 2:
            rows, columns = (
                (self.head, self.head_columns) if kind == "head" else (self.rows, self.columns)
            )
            return columns(rows(state).reshape(-1, self.basis))
        made = self.channels(self.space(state).reshape(kernel**2, self.basis))
        square = made.reshape(kernel, kernel, outputs, inputs).permute(2, 3, 0, 1)
        return square[..., 0] if dims == 3 else square


def fitted(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor cut or tiled to a shape."""
    tiled = tensor.repeat(
        [-(-want // have) for want, have in zip(shape, tensor.shape, strict=True)]
    )
    return tiled[tuple(slice(0, want) for want in shape)]


class Generated(nn.Module):
    """A network that has no weights but those its hyper-network makes: φ is its only state, and
    training it trains φ.

    With `tuned` it also has what is added to the weights made, zero at first: training that alone
    is training the network itself.
    """

    def __init__(self, generator: HyperNetwork, network: nn.Module, tuned: bool = False) -> None:
        """Takes the graph of `network` and leaves the network's own tensors out of the state."""
        super().__init__()
        self.generator, self.graph = generator, graph_of(network)
        # In a tuple the network is no sub-module: none of its tensors belongs to the state.
        self._network = (_without_statistics(network),)
        shapes = (
            {
                f"{layer.name}.{leaf}": shape
                for layer in self.graph
                for leaf, shape in layer.tensors.items()
            }
            if tuned
            else {}
        )
        self.names = tuple(shapes)
        self.added = nn.ParameterList(torch.zeros(shape) for shape in shapes.values())

    def weights(self) -> dict[str, Tensor]:
        """The network's parameters as they are now."""
        made = self.generator(self.graph)
        return {
            **made,
            **{name: made[name] + more for name, more in zip(self.names, self.added, strict=True)},
        }

    def forward(self, x: Tensor) -> Tensor:
        """The logits of the network made."""
        return functional_call(self._network[0], self.weights(), (x,))

    def train(self, mode: bool = True) -> Generated:
        """Sets the mode of the network made, too."""
        self._network[0].train(mode)
        return super().train(mode)


def _without_statistics(network: nn.Module) -> nn.Module:
    """A copy whose batch norms use the batch at hand: running statistics cannot be made."""
    bare = copy.deepcopy(network)
    for layer in bare.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            (
                layer.track_running_stats,
                layer.running_mean,
                layer.running_var,
                layer.num_batches_tracked,
            ) = False, None, None, None
    return bare

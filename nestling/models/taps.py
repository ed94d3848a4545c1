"""Where to look inside a network: its convolutions in order, its features and its head, found by
watching one pass through it.

No rule names a network. Every call of a pass is written down with what it reads, which gives the
graph that the data takes. A convolution counts if it lies on a longest way from the input to the
output (a shortcut does not), and its place is that of the normalisation that directly follows it,
where one does. The head is the last linear layer that the output comes from, and what it is given
are the features. Who disagrees names the layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from nestling.errors import InputError
from nestling.models.record import blank_inputs

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


@dataclass(frozen=True)
class Taps:
    """Layers of a network by name: what the convolutions put out, in order (each behind its own
    normalisation), and the head, a linear layer, with the number of features that it is given."""

    convs: tuple[str, ...]
    head: str
    features: int

    @property
    def depth(self) -> int:
        """How many convolutions the data passes."""
        return len(self.convs)

    @property
    def first(self) -> str:
        """The first convolution."""
        return self._conv(0)

    @property
    def last(self) -> str:
        """The last convolution."""
        return self._conv(-1)

    def cut(self, module: nn.Module) -> Taps:
        """The same layers of a network that is cut out of this one."""
        head = module.get_submodule(self.head)
        assert isinstance(head, nn.Linear)
        return replace(self, features=head.in_features)

    def _conv(self, number: int) -> str:
        if not self.convs:
            raise InputError(
                "the network has no convolution",
                field="model.name",
                fix="take a convolutional network, e.g. tinycnn",
            )
        return self.convs[number]


def find_taps(
    module: nn.Module, shape: Sequence[int], convs: Sequence[str] = (), head: str = ""
) -> Taps:
    """The taps of a network that takes inputs of a shape; `convs` and `head` name layers instead of
    searching for them."""
    layers = dict(module.named_modules())
    for name in (*convs, *([head] if head else ())):
        if name not in layers:
            raise InputError(
                f"the network has no layer {name!r}",
                field="taps",
                fix=f"some of its layers: {_some(layers)}",
            )
    graph = _watch(module, shape)
    top = head or _head(graph, layers)
    linear = layers[top]
    if not isinstance(linear, nn.Linear):
        raise InputError(
            f"the head {top!r} is not a linear layer", field="taps", fix="name a linear layer"
        )
    return Taps(tuple(convs) or _convolutions(graph, layers), top, linear.in_features)


@dataclass(eq=False)
class _Call:
    """One call of a pass: in which layer, what it read, whether it joins tensors."""

    layer: str
    reads: list[_Call]
    joins: bool
    weight: int = 0  # 1 for a convolution
    readers: list[_Call] = field(default_factory=list)


@dataclass(eq=False)
class _Graph:
    calls: list[_Call]
    output: _Call


class _Watch(TorchFunctionMode):
    """Writes down every call that makes a tensor of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: list[str] = []
        self.calls: list[_Call] = []
        # the tensor is held, so that its id stays its own
        self._made: dict[int, tuple[Any, _Call]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if made:
            read = [
                self._made[id(t)][1]
                for t in tree_leaves((args, kwargs))
                if isinstance(t, Tensor) and id(t) in self._made
            ]
            call = _Call(
                self.layers[-1] if self.layers else "",
                read,
                func in (torch.cat, torch.concat, torch.concatenate),
            )
            for other in read:
                other.readers.append(call)
            self.calls.append(call)
            for t in made:
                self._made[id(t)] = (t, call)
        return out

    def start(self, x: Tensor) -> None:
        self.calls.append(_Call("", [], False))
        self._made[id(x)] = (x, self.calls[-1])

    def of(self, x: Tensor) -> _Call:
        return self._made[id(x)][1]


@torch.no_grad()
def _watch(module: nn.Module, shape: Sequence[int]) -> _Graph:
    watch, handles = _Watch(), []

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: watch.layers.append(name)

    for name, layer in module.named_modules():
        if not list(layer.children()):
            handles += [
                layer.register_forward_pre_hook(enter(name)),
                layer.register_forward_hook(lambda *_: _leave(watch)),
            ]
    training = module.training
    try:
        with watch:
            x = blank_inputs(module, shape)
            watch.start(x)
            out = module.eval()(x)
    finally:
        module.train(training)
        for handle in handles:
            handle.remove()
    layers = dict(module.named_modules())
    seen: set[str] = set()
    for call in watch.calls:
        call.weight = int(
            isinstance(layers.get(call.layer), CONVOLUTIONS) and call.layer not in seen
        )
        seen.add(call.layer)
    return _Graph(watch.calls, watch.of(out))


def _leave(watch: _Watch) -> None:
    watch.layers.pop()


def _convolutions(graph: _Graph, layers: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Those on a longest way through the network, in order, each by the layer whose output stands
    for it."""
    before = _longest(graph.calls, lambda call: call.reads)
    after = _longest(reversed(graph.calls), lambda call: call.readers)
    total = max(before.values(), default=0)
    found = [c for c in graph.calls if c.weight and before[c] + after[c] - c.weight == total]
    # Ways of equal length: the first that was called stands for its place.
    by_place: dict[int, _Call] = {}
    for call in found:
        by_place.setdefault(before[call], call)
    ordered = [by_place[place] for place in sorted(by_place)]
    return tuple(_behind(call, layers, last=call is ordered[-1]) for call in ordered)


def _longest(calls: Iterable[_Call], sources: Callable[[_Call], list[_Call]]) -> dict[_Call, int]:
    """Per call, the most convolutions on a way from one end up to and with it."""
    found: dict[_Call, int] = {}
    for call in calls:
        found[call] = call.weight + max(
            (found[other] for other in sources(call) if other in found), default=0
        )
    return found


def _behind(call: _Call, layers: Mapping[str, nn.Module], last: bool) -> str:
    """The layer whose output is taken: the normalisation that alone reads the convolution; behind
    the last one, a joining of maps may stand between (DenseNet)."""
    reader = _only_reader(call)
    if last and reader is not None and reader.joins:
        reader = _only_reader(reader)
    return (
        reader.layer
        if reader is not None and isinstance(layers.get(reader.layer), NORMS)
        else call.layer
    )


def _only_reader(call: _Call) -> _Call | None:
    readers = list(dict.fromkeys(call.readers))
    return readers[0] if len(readers) == 1 else None


def _head(graph: _Graph, layers: Mapping[str, nn.Module]) -> str:
    """The last linear layer on the way to the output."""
    reached, waiting = set(), [graph.output]
    while waiting:
        call = waiting.pop()
        if call not in reached:
            reached.add(call)
            waiting += call.reads
    linear = [
        c.layer for c in graph.calls if c in reached and isinstance(layers.get(c.layer), nn.Linear)
    ]
    if not linear:
        raise InputError(
            "the network does not end in a linear layer",
            field="taps",
            fix="name the head, or end with one",
        )
    return linear[-1]


def _some(layers: Mapping[str, nn.Module]) -> str:
    return ", ".join([name for name in layers if name][:8])


@contextlib.contextmanager
def watching(
    module: nn.Module, names: Sequence[str], head: str = ""
) -> Iterator[dict[str, Tensor]]:
    """What the named layers put out during a pass inside the block, by name; with `head`, what it
    is given as "features"."""
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        # A copy: a layer behind it may write into what it is given (in-place activations, sums with
        # a shortcut).
        return lambda _, _inputs, out: seen.__setitem__(name, out.clone())

    handles = [
        module.get_submodule(name).register_forward_hook(note(name))
        for name in dict.fromkeys(names)
    ]
    if head:
        take = module.get_submodule(head).register_forward_pre_hook
        handles.append(take(lambda _, inputs: seen.__setitem__("features", inputs[0].flatten(1))))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def logits_and_features(
    module: nn.Module, head: str, x: Tensor, run: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """What a network says of some inputs, and what its head is given for it; `run` is how it is run
    where that is not by a call."""
    with watching(module, (), head) as seen:
        logits = (run or module)(x)
    return logits, seen["features"]

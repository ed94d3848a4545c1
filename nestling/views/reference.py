"""One network at full size: the reference of which clients hold views."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import nn

from nestling.views.axes import Axes, trace
from nestling.views.shrink import resize
from nestling.views.view import State, View, from_spec, full

_KEPT = 64


class Reference:
    """A named network, its axes (traced on first use), and a small cache of the sub-networks that views of it describe.

    The sub-networks are skeletons: whoever uses one loads weights into it first, and nobody keeps it.
    """

    def __init__(self, name: str, module: nn.Module, shape: Sequence[int]) -> None:
        self.name, self.module, self.shape = name, module, tuple(shape)
        self._networks: OrderedDict[bytes, nn.Module] = OrderedDict()
        self._views: OrderedDict[str, View] = OrderedDict()

    @cached_property
    def axes(self) -> Axes:
        return trace(self.module, self.shape)

    @cached_property
    def full(self) -> View:
        """The view of everything."""
        return full(self.axes)

    @cached_property
    def initial(self) -> State:
        """The state the network was built with: where every run of the experiment starts."""
        return {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}

    @cached_property
    def parameters(self) -> frozenset[str]:
        """The names that are trained; the rest of the state are buffers."""
        return frozenset(name for name, p in self.module.named_parameters(remove_duplicate=False) if p.requires_grad)

    def view(self, spec: Mapping[str, Any]) -> View:
        """The view that a plain description stands for (see `to_spec`)."""
        key = json.dumps(spec, sort_keys=True)
        if key not in self._views:
            self._views[key] = from_spec(self.axes, spec)
            _forget_oldest(self._views)
        return self._views[key]

    def network(self, view: View, state: Mapping[str, Any] | None = None) -> nn.Module:
        """The skeleton of a view's network, loaded with `state` when given."""
        key = view.key()
        if key not in self._networks:
            self._networks[key] = resize(self.module, {name: view.shape(name) for name in view.members}, view.dropped)
            _forget_oldest(self._networks)
        self._networks.move_to_end(key)
        network = self._networks[key]
        if state is not None:
            network.load_state_dict(state)
        return network

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_networks": OrderedDict(), "_views": OrderedDict()}


def _forget_oldest(kept: OrderedDict[Any, Any]) -> None:
    while len(kept) > _KEPT:
        kept.popitem(last=False)

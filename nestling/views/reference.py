"""One network at full size: the reference of which clients hold views."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from nestling.models.norm import used_rows
from nestling.models.taps import Taps, find_taps
from nestling.models.tied import name_once
from nestling.views.axes import Axes
from nestling.views.flat import Layout, Packed, layout_of, pack
from nestling.views.shrink import resize
from nestling.views.tracing import trace_or_whole
from nestling.views.view import View, from_spec, full

_KEPT = 64
_AXES: OrderedDict[Hashable, Axes] = OrderedDict()


class Reference:
    """A named network, its axes (traced on first use), and a small cache of the sub-networks that
    views of it describe.

    The sub-networks are skeletons, one for all views of the same form: whoever uses one loads
    weights into it first, and nobody keeps it. `kind` says what the network was built from, if it
    says all: networks of one kind differ in their weights only, and what follows from their form is
    found out once per process.
    """

    def __init__(
        self, name: str, module: nn.Module, shape: Sequence[int], kind: Hashable = None
    ) -> None:
        """Takes the network for inputs of `shape`; its axes are traced only when somebody asks."""
        self.name, self.module = name, name_once(module)
        self.shape, self.kind = tuple(shape), kind
        self._networks: OrderedDict[bytes, nn.Module] = OrderedDict()
        self._layouts: dict[bytes, Layout] = {}
        self._views: OrderedDict[str, View] = OrderedDict()
        self._specs: OrderedDict[int, tuple[Mapping[str, Any], View]] = OrderedDict()

    @cached_property
    def axes(self) -> Axes:
        """The network's channel axes, traced once for all networks of one kind."""
        if self.kind is None:
            return trace_or_whole(self.module, self.shape)
        if self.kind not in _AXES:
            _AXES[self.kind] = trace_or_whole(self.module, self.shape)
            _forget_oldest(_AXES)
        return _AXES[self.kind]

    def to(self, device: torch.device) -> None:
        """Moves the network to a device; everything made from it is there from then on."""
        self.module.to(device)
        self._networks.clear()
        self.__dict__.pop("initial", None)

    @cached_property
    def full(self) -> View:
        """The view of everything."""
        return full(self.axes)

    @cached_property
    def initial(self) -> Packed:
        """The state the network was built with: where every run of the experiment starts."""
        return pack(
            {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}
        )

    @cached_property
    def parameters(self) -> frozenset[str]:
        """The names that are trained; the rest of the state are buffers."""
        return frozenset(name for name, p in self.module.named_parameters() if p.requires_grad)

    @cached_property
    def taps(self) -> Taps:
        """Its convolutions, features and head. A network may name them itself: `taps = {"convs":
        [...], "head": "..."}`."""
        return find_taps(self.module, self.shape, **getattr(self.module, "taps", {}))

    @cached_property
    def by_width(self) -> frozenset[str]:
        """The buffers that hold statistics of every width (see `models.norm.WidthNorm`)."""
        return frozenset(used_rows(self.module))

    def view(self, spec: Mapping[str, Any]) -> View:
        """The view that a plain description stands for (see `to_spec`)."""
        known = self._specs.get(id(spec))
        if known is not None and known[0] is spec:
            return known[1]
        key = json.dumps(spec, sort_keys=True)
        if key not in self._views:
            self._views[key] = from_spec(self.axes, spec)
            _forget_oldest(self._views)
        # Holding the description keeps its id from being given to another.
        self._specs[id(spec)] = (spec, self._views[key])
        _forget_oldest(self._specs)
        return self._views[key]

    def network(self, view: View, state: Mapping[str, Any] | None = None) -> nn.Module:
        """The skeleton of a view's network, loaded with `state` when given."""
        key = view.form()
        if key not in self._networks:
            if torch._C._functorch.maybe_current_level() is not None:
                raise RuntimeError(
                    "the network of a view is built inside a batch of clients: call "
                    "views.nested.prepare before"
                )
            shapes = {name: view.shape(name) for name in view.members}
            self._networks[key] = resize(self.module, shapes, view.dropped, view.sizes)
            _forget_oldest(self._networks)
        self._networks.move_to_end(key)
        network = self._networks[key]
        if state is not None:
            network.load_state_dict(state)
        return network

    def layout(self, view: View) -> Layout:
        """The layout of the state of a view's network, in its own order."""
        key = view.form()
        if key not in self._layouts:
            if len(self._layouts) > 16 * _KEPT:
                self._layouts.clear()
            self._layouts[key] = layout_of(self.network(view).state_dict())
        return self._layouts[key]

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the caches out of a pickle."""
        return {
            **self.__dict__,
            "_networks": OrderedDict(),
            "_layouts": {},
            "_views": OrderedDict(),
            "_specs": OrderedDict(),
        }


def _forget_oldest(kept: OrderedDict[Any, Any]) -> None:
    while len(kept) > _KEPT:
        kept.popitem(last=False)

"""How many clients trained each channel of the shared networks: counted round by round, kept in
`coverage.json`.

Only sums are kept: for every layer one number a channel, over all rounds. The file holds them as of
the last checkpoint and as of the one before, since a run may end between the writing of this file
and of its checkpoint; a resumed run takes those of the round that it goes on from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nestling.views import Reference, View
from nestling.world import Piece

OUTPUTS, INPUTS, WHOLE = "outputs", "inputs", "whole"


@dataclass
class _Layer:
    """A tensor of weights, and where the channels that it is counted by stand among those of all
    axes; -1 is a layer that no view cuts."""

    name: str
    by: str
    dim: int
    places: np.ndarray
    start: int  # where its counts begin among those of all layers


@dataclass
class _Network:
    """The counts of one network, layer after layer in one vector."""

    layers: list[_Layer]
    places: np.ndarray
    counts: np.ndarray
    client_rounds: int = 0
    known: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict)

    def add(self, view: View, clients: int) -> None:
        """Counts a view that so many clients trained."""
        flags = np.append(view.keep, True)  # the last one answers for -1
        self.counts += clients * (flags[self.places] & self._there(view))
        if view.masks:
            self._take_off(view, clients)
        self.client_rounds += clients

    def _there(self, view: View) -> np.ndarray:
        """Which channels are of layers that the view holds."""
        if view.names not in self.known:
            held = set(view.names)
            sizes = [len(layer.places) for layer in self.layers]
            self.known[view.names] = np.repeat([at.name in held for at in self.layers], sizes)
        return self.known[view.names]

    def _take_off(self, view: View, clients: int) -> None:
        """A channel of which a view masks entries counts for the share that is left."""
        for layer in self.layers:
            mask = view.mask(layer.name) if layer.name in view.names else None
            if mask is not None and layer.by == OUTPUTS:
                rows = mask.movedim(layer.dim, 0).reshape(mask.shape[layer.dim], -1)
                kept = rows.float().mean(1).double().cpu().numpy()
                channels = np.append(view.keep, True)[layer.places].nonzero()[0]
                if len(channels) == len(kept):
                    self.counts[layer.start + channels] -= clients * (1 - kept)

    def told(self) -> dict[str, Any]:
        """The counts as plain data."""
        return {
            "client_rounds": self.client_rounds,
            "layers": [
                {
                    "name": layer.name,
                    "by": layer.by,
                    "counts": [
                        round(float(count), 3) if count % 1 else int(count)
                        for count in self.counts[layer.start : layer.start + len(layer.places)]
                    ],
                }
                for layer in self.layers
            ],
        }

    def take(self, told: Mapping[str, Any]) -> None:
        """Goes on from what `told` gave."""
        counts = [layer["counts"] for layer in told["layers"]]
        if [len(some) for some in counts] != [len(layer.places) for layer in self.layers]:
            raise ValueError("the counts are of another network")
        self.counts = np.array([c for some in counts for c in some], dtype=np.float64)
        self.client_rounds = int(told["client_rounds"])


@dataclass
class Coverage:
    """The counts of a run. A run whose method shares no weights has none."""

    rounds: int = 0  # how many were counted
    networks: dict[str, _Network] = field(default_factory=dict)
    _saved: dict[str, Any] = field(default_factory=dict)

    def add(self, trained: Collection[Piece]) -> None:
        """Counts a round: the pieces of those whose replies were merged."""
        self.rounds += 1
        pieces = {id(piece): piece for piece in trained}
        for key, clients in Counter(map(id, trained)).items():
            self._network(pieces[key].reference).add(pieces[key].view, clients)

    def told(self, round: int) -> dict[str, Any]:
        """What `coverage.json` is to hold after a round."""
        networks = {name: network.told() for name, network in self.networks.items()}
        now = {"round": round, "rounds": self.rounds, "networks": networks}
        before, self._saved = self._saved, now
        return {**now, "before": before} if before and before["round"] < round else now

    def restore(self, told: object, round: int, references: Mapping[str, Reference]) -> None:
        """Goes on from what a folder holds as of a round; from nothing where it has none, as the
        folder of an earlier version."""
        for found in (told, told.get("before") if isinstance(told, Mapping) else None):
            if isinstance(found, Mapping) and found.get("round") == round:
                try:
                    for name, network in found["networks"].items():
                        self._network(references[name]).take(network)
                    self.rounds = int(found["rounds"])
                    self._saved = {k: v for k, v in found.items() if k != "before"}
                except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                    self.rounds, self.networks = 0, {}  # a picture must not end a run
                return

    def _network(self, reference: Reference) -> _Network:
        if reference.name not in self.networks:
            self.networks[reference.name] = _network_of(reference)
        return self.networks[reference.name]


def _network_of(reference: Reference) -> _Network:
    layers: list[_Layer] = []
    start = 0
    for name, shape in reference.axes.shapes.items():
        if len(shape) > 1 and name in reference.parameters:
            layers.append(_layer_of(reference, name, start))
            start += len(layers[-1].places)
    places = np.concatenate([np.zeros(0, dtype=np.int64), *(layer.places for layer in layers)])
    return _Network(layers, places, np.zeros(start))


def _layer_of(reference: Reference, name: str, start: int) -> _Layer:
    """A layer by its outputs, or by its inputs where only those are ever cut."""
    for dim, line in enumerate(reference.axes.dims[name][:2]):
        channels = np.unique(line[line >= 0]) if line is not None else ()
        if len(channels):
            return _Layer(name, (OUTPUTS, INPUTS)[dim], dim, np.asarray(channels), start)
    return _Layer(name, WHOLE, 0, np.array([-1], dtype=np.int64), start)

"""How many clients trained each channel of the shared networks.

A round only notes which views were trained, and how often: views that are equal have one key, which
is known on the host. Channels are counted from the notes when somebody asks, for a checkpoint or a
page. No tensor is looked at, so that nothing waits for a device; views with masks, whose channels
only tensors could tell, are left out and said to be.

The counts are part of the totals that every checkpoint holds, so a run that is gone on with has
those of the very round it goes on from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nestling.views import Reference, View
from nestling.world import Piece

OUTPUTS, INPUTS, WHOLE = "outputs", "inputs", "whole"
MOST_NOTES = 1024
"""Of so many different views the notes are counted, lest methods that draw them fill memory."""


@dataclass
class _Note:
    """A view that clients trained: what of it is needed, since a view itself may hold tensors."""

    reference: Reference
    keep: np.ndarray
    names: tuple[str, ...]
    clients: int


@dataclass
class _Layer:
    """A tensor of weights, and where the channels that it is counted by stand among those of all
    axes; -1 is a layer that no view cuts."""

    name: str
    by: str
    places: np.ndarray


@dataclass
class _Network:
    """The counts of one network, layer after layer in one vector."""

    layers: list[_Layer]
    places: np.ndarray
    counts: np.ndarray
    client_rounds: int = 0

    def add(self, note: _Note) -> None:
        flags = np.append(note.keep, True)  # the last one answers for -1
        held = set(note.names)
        sizes = [len(layer.places) for layer in self.layers]
        there = np.repeat([layer.name in held for layer in self.layers], sizes)
        self.counts += note.clients * (flags[self.places] & there)
        self.client_rounds += note.clients

    def by_layer(self) -> list[list[int]]:
        ends = np.cumsum([len(layer.places) for layer in self.layers])
        return [counts.tolist() for counts in np.split(self.counts, ends[:-1])]


@dataclass
class Coverage:
    """The counts of a run. A run whose method shares no weights has none."""

    rounds: int = 0  # how many were counted
    masked: int = 0  # replies that are not counted, since masks say what was trained
    _networks: dict[str, _Network] = field(default_factory=dict)
    _notes: dict[tuple[str, bytes], _Note] = field(default_factory=dict)

    def add(self, trained: Iterable[Piece]) -> None:
        """Notes a round: the pieces of those whose replies were merged."""
        self.rounds += 1
        # Clients of one tier share a view, of which then a single key is asked for.
        here: dict[View, list[Any]] = {}
        for piece in trained:
            if piece.view in here:
                here[piece.view][1] += 1
            else:
                here[piece.view] = [piece.reference, 1]
        for view, (reference, clients) in here.items():
            if view.masks:
                self.masked += clients
                continue
            key = (reference.name, view.key())
            if key in self._notes:
                self._notes[key].clients += clients
            else:
                self._notes[key] = _Note(reference, view.keep, view.names, clients)
        if len(self._notes) > MOST_NOTES:
            self._count()

    def told(self) -> dict[str, Any]:
        """The counts as plain data, for a checkpoint; nothing before the first round."""
        self._count()
        networks = {
            name: {"client_rounds": own.client_rounds, "counts": own.counts.tolist()}
            for name, own in self._networks.items()
        }
        return (
            {"rounds": self.rounds, "masked": self.masked, "networks": networks}
            if self.rounds
            else {}
        )

    def page(self, round: int) -> dict[str, Any]:
        """What `coverage.json` is to hold after a round: the counts layer by layer."""
        self._count()
        networks = {
            name: {"client_rounds": own.client_rounds, "layers": _layers_told(own)}
            for name, own in self._networks.items()
        }
        known = {"round": round, "rounds": self.rounds, "masked": self.masked}
        return {**known, "networks": networks}

    def restore(self, told: object, references: Mapping[str, Reference]) -> None:
        """Goes on from what `told` gave; from nothing where it is none of these networks, as in the
        checkpoint of an earlier version: a picture must not end a run."""
        try:
            self._take(told, references)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            self.rounds, self.masked, self._networks = 0, 0, {}

    def _take(self, told: Any, references: Mapping[str, Reference]) -> None:
        for name, found in told["networks"].items():
            own = self._network(references[name])
            counts = np.array(found["counts"], dtype=np.int64)
            if counts.shape != own.counts.shape:
                raise ValueError("the counts are of another network")
            own.counts, own.client_rounds = counts, int(found["client_rounds"])
        self.rounds, self.masked = int(told["rounds"]), int(told["masked"])

    def _count(self) -> None:
        for note in self._notes.values():
            self._network(note.reference).add(note)
        self._notes.clear()

    def _network(self, reference: Reference) -> _Network:
        if reference.name not in self._networks:
            self._networks[reference.name] = _network_of(reference)
        return self._networks[reference.name]


def _layers_told(network: _Network) -> list[dict[str, Any]]:
    return [
        {"name": layer.name, "by": layer.by, "counts": counts}
        for layer, counts in zip(network.layers, network.by_layer(), strict=True)
    ]


def _network_of(reference: Reference) -> _Network:
    layers = [
        _layer_of(reference, name)
        for name, shape in reference.axes.shapes.items()
        if len(shape) > 1 and name in reference.parameters
    ]
    places = _in_one([layer.places for layer in layers])
    return _Network(layers, places, np.zeros(len(places), dtype=np.int64))


def _in_one(lines: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *lines])


def _layer_of(reference: Reference, name: str) -> _Layer:
    """A layer by its outputs, or by its inputs where only those are ever cut."""
    for by, line in zip((OUTPUTS, INPUTS), reference.axes.dims[name][:2], strict=True):
        channels = np.unique(line[line >= 0]) if line is not None else ()
        if len(channels):
            return _Layer(name, by, np.asarray(channels))
    return _Layer(name, WHOLE, np.array([-1], dtype=np.int64))

"""Hermes: every client prunes whole channels, and the server averages where clients overlap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from nestling.methods.api import Client, Device, Info, InputError, Message, Model, Phases, Piece, Replies, Tensors, View
from nestling.methods.part import WEIGHTS, Fact
from nestling.methods.sparse.gate import HELD_OUT, PRUNINGS, PrunesItself
from nestling.training.memory import section, sectioned
from nestling.views import from_spec, to_spec
from nestling.views.sparse import channel_norms, inside_of, overwritten, strongest, whole_widths

_CHANNELS = "channels"
_PERSONAL = replace(
    WEIGHTS,
    down=lambda method, device, *_: method.model_for(device).state,
    up=lambda _method, client, _: {name: client.weights[name] for name in client.view.names},
    like=lambda method, piece, _: {n: method.weights[n].new_empty(shape) for n, shape in piece.view.shapes.items()},
)
_KEPT = Fact(
    "index",
    lambda _method, client, _: to_spec(client.view)["index"],
    lambda _method, _sent, said: isinstance(said, dict),
    "the channels kept",
)


@dataclass
class Hermes(PrunesItself):
    """Hermes (Li, Sun, Li, Pu, Li, Chen, "Hermes: An Efficient Federated Learning Framework for Heterogeneous Mobile Clients",
    MobiCom 2021). Details beyond the abstract are from memory.

    Idea: a client whose model is good enough drops the output channels with the smallest L1 norm, with everything tied to them, and
    trains, sends and stores a smaller network of its own. The server averages only what clients have in common; the rest of each
    client's model stays personal.
    Loss: cross-entropy. Travels: the client's personal model down; what it kept of it up, with the list of channels in the header.
    Merge: mean weighted by n_k over the entries that all participants of the round hold; all other entries keep each client's own value
    (`overlap = "holders"`: every entry is the mean over those that hold it). The server keeps a model for every client it has seen.
    Differs from the paper: channel ties come from tracing, so residual sums and norms follow; channels that one group norm normalises
    go together; counts are rounded up, so that no axis falls below `r_target` by more than the last step. A client that is new gets
    the mean over holders. A personal model is cut from what fits the device at rest: passing shortages of memory are not followed.

    acc_thr:    accuracy above which a client prunes.
    prune_step: share of the kept channels of every axis that go in one pruning.
    r_target:   pruning ends when the kept share is not above it.
    validation: share of a client's training rows held out to decide on pruning.
    overlap:    "all" (entries that all participants hold are averaged) or "holders" (every entry, over its holders).
    rewind:     whether a pruning takes the channels that stay back to their initial values (lottery-ticket pruning).
    """

    overlap: Literal["all", "holders"] = "all"
    rewind: bool = False

    shares_weights: ClassVar[bool] = False  # clients go on from models of their own
    info = Info(
        "sparse", "structured masks: channels, one set a client", "from memory", "C", HELD_OUT, global_model=False, personal=True
    )
    parts = (_PERSONAL,)
    said = (*PrunesItself.said, _KEPT)

    def piece(self, device: Device, round: int) -> Piece:
        """The channels that the client has kept; before its first reply, what fits its device at rest."""
        known = self.records.get(device.id)
        if not known:
            return self.world.device(device.id).piece
        return Piece(self.world.main, View(self.world.main.axes, known[_CHANNELS].cpu().numpy()))

    def alike(self, device: Device, piece: Piece) -> None:
        """Every client has a model of its own."""

    def facts(self, device: Device, piece: Piece, round: int) -> dict[str, Any]:
        """The number of prunings, and the widths that they start from."""
        return {**super().facts(device, piece, round), "of": _widths(self.world.device(device.id).piece.view)}

    def pruned(self, piece: Piece, sent: Message, facts: Mapping[str, Any]) -> Piece:
        """The channels that the client says it kept; refused unless they are as many as a pruning leaves."""
        view = _read(piece.view, facts["index"])
        wanted = whole_widths(piece.view, self._widths(sent, facts[PRUNINGS]))
        if not piece.view.contains(view) or _widths(view) != wanted:
            raise InputError("the channels kept are not those that a pruning leaves")
        return Piece(piece.reference, view)

    def merge(self, replies: Replies, round: int) -> None:
        """The mean over holders, written into the participants' own models: where all overlap, or everywhere."""
        super().merge(replies, round)
        if not replies:
            return
        common = View(self.world.main.axes, reduce(np.logical_and, [reply.piece.view.keep for reply in replies]))
        for reply in replies:
            view, said = reply.piece.view, reply.message
            held = self.overlap == "holders"
            model = view.extract(self.weights) if held else overwritten(view, said["weights"], common, self.weights)
            known = {_CHANNELS: torch.from_numpy(view.keep.copy()), PRUNINGS: torch.tensor(int(said.facts[PRUNINGS]))}
            self.records.put(reply.device.id, {**known, **sectioned(weights=model)}, round)

    def model_for(self, device: Device) -> Model:
        """The client's recorded model; for a new one, its part of the mean over holders."""
        known = self.records.get(device.id)
        if not known:
            return super().model_for(device)
        view = self.piece(device, 0).view
        own = section(known, "weights")
        return Model(self.world.main, view, {name: own[name].to(self.world.place) for name in view.names})

    def global_model(self) -> None:  # type: ignore[override]
        """There is none: the mean over holders only serves clients that are new."""

    # -- on both sides ---------------------------------------------------------------------------------------------------------

    def _widths(self, sent: Message, prunings: int) -> list[float]:
        """How many channels of each axis are left after so many prunings, before rounding."""
        return [n * self.kept(prunings) for n in sent.facts["of"]]

    # -- on the client ---------------------------------------------------------------------------------------------------------

    def start(self, client: Client, received: Message) -> Tensors:
        """The received model, or what a pruning leaves of it, if the client prunes now."""
        known, weights, outer = int(received.facts[PRUNINGS]), received["weights"], client.view
        pruning = self.opens(client, weights, known)
        client.memory = {PRUNINGS: torch.tensor(known + pruning)}
        if not pruning:
            return weights
        client.view = strongest(outer, channel_norms(outer, weights), self._widths(received, known + 1))
        return client.view.extract(client.reference.initial) if self.rewind else inside_of(client.view, outer, weights)

    def phases(self, client: Client, received: Message) -> Phases:
        """One training phase on the rows that are not held out."""
        return [self.training(client)]

    def keep(self, client: Client, received: Message) -> None:
        """Nothing stays on the client."""
        client.memory = {}  # the server keeps everything, also how often the client has pruned; the memory only led here from `start`


def _read(outer: View, index: Any) -> View:
    """The view that a client says it kept. A number stands for a prefix, and an endless one must not be spelt out."""
    try:
        if any(type(number) is int and number > outer.axes.channels for number in index.values()):
            raise InputError("an axis has fewer channels")
        return from_spec(outer.axes, {"index": index, "dropped": [], "private": []})
    except (AttributeError, IndexError, OverflowError, TypeError, ValueError) as error:
        raise InputError(f"the channels kept cannot be read ({error})") from error


def _widths(view: View) -> list[int]:
    return [len(view.indices(number)) for number in range(len(view.axes.sizes))]

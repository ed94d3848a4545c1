"""How a group is trained: one network after another in slots side by side, or as one stack.

Guessed from shapes: a stack pays for many small networks, whose kernels would not fill the device,
and slots for everything else, since the library's kernels for one network are better than those for
a stack of them. Only where neither is clear are both tried out; what was found is remembered on
disk, for the next run on such a device.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from nestling.engines.cuda.cuda_settings import CudaSettings
from nestling.files import cache_folder, write_atomic
from nestling.training.stacks.group import Group
from nestling.training.stacks.stacked import honours_masks
from nestling.version import __version__
from nestling.world import Piece, piece_cost

SLOTS, SLOTS_LAST, PLAIN = "slots", "slots, channels last", "one by one"
STACK, MATRICES = "stack", "stack of matrices"
STACKS = (STACK, MATRICES)

MANY, SOME = 16, 8
"""From how many clients a stack of small networks surely pays, and from how many it may."""

SMALL, TINY = 5e8, 2.5e7
"""Multiply-accumulates of a forward pass over one batch of one client, up to which a stack of many
pays, and one of some may."""

LARGE = 7e8
"""From how many the library's convolutions are faster with channels last."""


def candidates(group: Group, settings: CudaSettings) -> list[str]:
    """The ways that may be the fastest; one where the shapes say which."""
    macs, count = macs_of(group), len(group.clients)
    alone = single(group)
    # The library computes a stack of convolutions group by group, or at least their gradients; as
    # products of shifted copies a compiler can fuse them.
    stack = MATRICES if settings.compile and _convolves(group) else STACK
    if not can_stack(group) or count < SOME or macs > SMALL:
        return [alone]
    # Clients with fewer batches than others wait in a stack until all are done; in slots they do
    # not.
    if count >= MANY and _filled(group) > 0.5:
        return [stack]
    return [stack, alone] if macs <= TINY and group.schedule.even else [alone]


def single(group: Group) -> str:
    """The way in which every client is trained for itself."""
    return SLOTS_LAST if _convolves(group) and macs_of(group) >= LARGE else SLOTS


def _convolves(group: Group) -> bool:
    return any(isinstance(layer, nn.Conv2d) for layer in group.module.modules())


def can_stack(group: Group) -> bool:
    """Whether the clients can be one stack: layers that mix rows cannot be filled up."""
    if any(
        isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in group.module.modules()
    ):
        return False
    full = group.schedule.even and group.schedule.wide == group.width
    return full or honours_masks(group)


def _filled(group: Group) -> float:
    """The share of a stack's rows that are somebody's."""
    lengths = group.schedule.lengths
    return float(lengths.sum()) / max(lengths.size * group.schedule.wide, 1)


def macs_of(group: Group) -> float:
    """Multiply-accumulates of the forward pass of one client over one batch."""
    client = group.clients[0]
    return piece_cost(Piece(client.reference, client.view)).macs * group.phase.batch


def description(group: Group, settings: CudaSettings) -> str:
    """What a decision depends on, in words that another run will use too."""
    layout, phase = group.layout, group.phase
    parts = (
        layout.names,
        layout.shapes,
        group.clients[0].reference.shape,
        len(group.clients),
        phase.batch,
        group.schedule.even,
    )
    optim = (phase.optim.name, phase.optim.momentum > 0, settings.precision, settings.compile)
    return hashlib.sha256(
        repr((parts, optim, getattr(phase.objective, "__qualname__", ""))).encode()
    ).hexdigest()[:24]


@dataclass
class Decisions:
    """What was found out on a device, kept in a file of the user's cache folder."""

    path: Path | None = field(default_factory=lambda: cache_folder() / "ways.json")

    def get(self, what: str) -> str | None:
        """The way that was found, if any."""
        found = self._read().get(_machine())
        return found.get(what) if isinstance(found, dict) else None

    def put(self, what: str, way: str) -> None:
        """Remembers it; a disk that refuses costs the next run a trial and nothing else."""
        if self.path is None:
            return
        known = self._read()
        old = known.get(_machine())
        known[_machine()] = {**(old if isinstance(old, dict) else {}), what: way}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps(known, indent=1, sort_keys=True))
        except OSError:
            self.path = None

    def _read(self) -> dict[str, dict[str, str]]:
        try:
            found = json.loads(self.path.read_text()) if self.path else {}
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


@lru_cache(maxsize=1)
def _machine() -> str:
    """The device and the libraries that a decision holds for."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{name}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, nestling "
        f"{__version__}"
    )
